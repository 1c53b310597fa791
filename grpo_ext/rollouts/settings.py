"""Reads the settings of a rollout batch when it begins, because users and callbacks may change them.

Called by `Rollouts`, where a rollout batch begins or is submitted to be sampled ahead; its functions by checks too.
"""

import sys
from typing import Any

import torch

from ..algorithms.advantages import AdvantageRule
from ..algorithms.losses import RatioRule
from ..batching.sizes import ChunkSizes
from ..forward.architecture import base_model_of
from ..rewards.runner import RewardFunctions
from ..sampling.sampler import Sampler
from ..value_checks import check_advantage_k
from ..view import TrainerView
from .chat import Chat
from .local import RolloutSettings
from .tools import Environments, Toolbox, TurnLimits
from .worker import RolloutWorker

SCORE = "_generate_and_score_completions"
LOGPS = "_get_per_token_logps_and_entropies"


def read_settings(
    view: TrainerView, worker: RolloutWorker, sampler: Sampler, unchecked: bool, max_tokens: int | None
) -> RolloutSettings:
    """The settings of a rollout batch that begins now.

    `unchecked`: vLLM's log-probabilities are to be compared with the trainer's. `max_tokens` of a forward fit into
    memory; None: any number.
    """
    args, training, ratios, own_scoring = view.args, view.model.training, None, view.override_of(SCORE)
    environments = Environments(dict(view.environment_factories or {}), view.environment_pools, worker.retired)
    group, batching = view.group_size, worker.forwards.choice.batching(view.model)
    if view.corrects_sampling:
        bounds = view.vllm_importance_sampling_clip_min, view.vllm_importance_sampling_clip_max
        ratios = RatioRule(view.vllm_importance_sampling_mode, *bounds)
    steps = view.geometry.steps_per_rollout * view.num_iterations  # optimizer steps on one rollout batch
    trained_on = steps > 1 or ratios is not None or (training and bool(args.rollout_lag))
    record_experts = args.replay.experts and "experts" not in sampler.returns
    checked = unchecked and sampler.by_user is None and own_scoring is None
    of_policy = trained_on or record_experts or checked
    wanted = {"policy": of_policy, "reference": view.beta != 0.0, "teacher": view.teacher_model is not None}
    return RolloutSettings(
        training=training,
        num_generations=group,
        sizes=view.geometry.chunk_sizes(group, batching) if sampler.pads else ChunkSizes(group),
        seed=args.seed,
        sampler=sampler,
        chat=chat_of(view),
        toolbox=Toolbox(list(view.standalone_tools), environments, view.async_loop),
        limits=_turn_limits(view, sampler.context),
        masks_truncated=view.mask_truncated_completions,
        replay=args.replay,
        own_rewards=worker.known_rewards or view.override_of("_calculate_rewards"),
        own_scoring=own_scoring,
        scored_by=tuple(name for name in wanted if wanted[name]),
        trained_on=trained_on,
        record_experts=record_experts,
        batch_size=args.per_device_train_batch_size if training else args.per_device_eval_batch_size,
        max_tokens=max_tokens,
        ratios=ratios,
        functions=reward_functions(view),
        rule=advantage_rule(view),
        log_extra=view.override_of("_log_completion_extra"),
        pending_metrics=view.pending_metrics,
        pending_columns=view.pending_columns,
        state=view.state,
    )


def reward_functions(view: TrainerView) -> RewardFunctions:
    functions, names = list(view.reward_funcs), list(view.reward_func_names)
    return RewardFunctions(functions, names, view.reward_processing_classes, dict(view.chat_template_kwargs))


def advantage_rule(view: TrainerView) -> AdvantageRule:
    args, scale, aggregation = view.args, view.scale_rewards, view.multi_objective_aggregation
    check_advantage_k(args.advantage_estimator, args.advantage_k, view.num_generations)  # a callback may have set them
    weights_F = torch.as_tensor(view.reward_weights).float().cpu().clone()
    settings = (args.advantage_estimator, scale, aggregation, args.advantage_k, args.eval_pass_threshold)
    return AdvantageRule(weights_F, view.group_size, *settings)


# ---- Prompts --------------------------------------------------------------------------------------------------------


def template_of(view: TrainerView) -> dict[str, Any]:
    return {"chat_template": view.chat_template, **view.chat_template_kwargs}


def chat_of(view: TrainerView) -> Chat:
    embedding = base_model_of(view.model).get_input_embeddings()
    # an image's token may have no row
    embedded = None if view.takes_images else getattr(embedding, "num_embeddings", None)
    return Chat(
        view.processing_class,
        view.tokenizer,
        list(view.tools or ()),
        None if view.environment_factories is None else dict(view.environment_tools),
        view.chat_template,
        dict(view.chat_template_kwargs),
        embedded,
        _placeholders(view),
    )


def _placeholders(view: TrainerView) -> list[str]:
    """The texts of the tokens that stand for an image, a video or a sound."""
    config, kinds = view.policy.config, ("image", "video", "audio") if view.takes_images else ()
    ids = [getattr(config, f"{kind}_token_id", None) for kind in kinds]
    tokens = view.tokenizer.convert_ids_to_tokens([token for token in ids if isinstance(token, int)])
    return [token for token in tokens if token is not None]  # of ids beyond the vocabulary


def _turn_limits(view: TrainerView, context: int | None) -> TurnLimits:
    config = view.model.config.text_config if view.takes_images else view.model.config
    context = context or getattr(config, "max_position_embeddings", None) or sys.maxsize
    return TurnLimits(
        max_completion_length=view.max_completion_length or sys.maxsize,
        context=context,
        max_turns=view.max_tool_calling_iterations,
        seconds=view.args.tool_timeout,
        message_ends=frozenset(view.eos_token_ids),
    )
