"""The settings of a step and of its loss, read where TRL reads them: at each step and each loss.

A callback, or a subclass after `super().__init__()`, may change a setting once the trainer is built.
"""

from dataclasses import dataclass, fields

from ..algorithms.losses import LossConfig, adapted_entropy_coefficient
from ..algorithms.policy_losses import adds_at_zero_advantage
from ..forward.architecture import has_own_hooks
from ..settings import read_at
from ..view import TrainerView

# the settings of a loss under TRL's names, by where TRL reads them; whether there is a teacher is known here alone
_OF_LOSS = {spec.name for spec in fields(LossConfig)} - {"teacher_kl_coef"}
_ON_TRAINER, _IN_ARGS = {"epsilon_low", *read_at("loss")} & _OF_LOSS, {*read_at("args")} & _OF_LOSS


@dataclass(frozen=True)
class StepSettings:
    skip_zeros: bool  # a completion with advantage 0 adds nothing to loss or gradient, and is not run
    top_entropy_quantile: float  # share of the tokens with the highest entropy that carry loss; 1: all
    router: bool  # a MoE model's load-balancing loss is added
    in_trl_form: bool  # the user overrides the loss or log-probabilities: micro-batches have all of TRL's columns
    equal_counts: bool  # code of the user runs in every micro-batch, and may hold collectives
    training: bool  # False in an evaluation


def step_settings_of(view: TrainerView) -> StepSettings:
    training, quantile, router = view.model.training, view.top_entropy_quantile, view.aux_loss_enabled
    custom_loss = view.overridden("compute_loss", "_compute_loss") is not None
    in_trl_form = custom_loss or view.overridden("_get_per_token_logps_and_entropies") is not None
    # terms that are not zero at advantage 0
    always_adds = view.beta != 0.0 or view.entropy_bonus or router or quantile < 1.0
    always_adds = always_adds or custom_loss or view.teacher_model is not None or adds_at_zero_advantage(view.loss_type)
    return StepSettings(
        skip_zeros=view.args.skip_zero_contribution and training and not always_adds,
        top_entropy_quantile=quantile,
        router=router,
        in_trl_form=in_trl_form,
        equal_counts=in_trl_form or has_own_hooks(view.model),
        training=training,
    )


def next_entropy_coefficient(view: TrainerView) -> float:
    args = view.args
    bounds = args.entropy_target, args.entropy_coef_delta, args.entropy_coef_min, args.entropy_coef_max
    return adapted_entropy_coefficient(view.entropy_coef, view.last_entropy, *bounds)


def loss_config_of(view: TrainerView) -> LossConfig:
    args = view.args
    # TRL's gate: the adaptive bonus acts only while the last step's entropy was at or below the target
    acts = not view.use_adaptive_entropy or view.last_entropy <= args.entropy_target
    return LossConfig(
        **{name: getattr(view, name) for name in _ON_TRAINER},
        **{name: getattr(args, name) for name in _IN_ARGS},
        max_completion_length=view.max_completion_length or 1,
        correct_sampling=view.corrects_sampling,
        aggregation=args.loss_aggregation,
        entropy_coefficient=(view.entropy_coef if acts else 0.0) if view.entropy_bonus else None,
        router_coefficient=view.router_aux_loss_coef if view.aux_loss_enabled else None,
        teacher_kl_coef=None if view.teacher_model is None else args.teacher_kl_coef,
        log_ratios=bool(args.rollout_lag) and view.model.training,
    )
