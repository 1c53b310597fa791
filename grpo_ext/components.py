"""The components of a trainer, built once its models are there. Called by the trainer's constructor."""

from __future__ import annotations

from dataclasses import dataclass

import trl

from .config import GRPOConfig
from .forward.architecture import base_model_of, token_cost
from .forward.lm_head import install
from .forward.quantised import keep_4bit_weights
from .forward.routing import install_routers
from .forward.runner import OverridableRunner
from .rollouts.build import build_rollouts
from .rollouts.source import Rollouts
from .rollouts.trl_methods import TrlMethods
from .run.keeper import RunKeeper
from .runtime.clock import PhaseClock
from .step.evaluation import PassAtK
from .step.inputs import Collation
from .step.optimizer_step import StepPlanner
from .step.overrides import LossOverrides
from .view import TrainerView


@dataclass(frozen=True, kw_only=True)
class Components:
    """What the override points of a trainer hand over to."""

    clock: PhaseClock
    forwards: OverridableRunner
    rollouts: Rollouts
    trl_methods: TrlMethods
    step_planner: StepPlanner
    loss_overrides: LossOverrides
    pass_at_k: PassAtK
    keeper: RunKeeper


def build_components(view: TrainerView, config: GRPOConfig, user_args: trl.GRPOConfig | None) -> Components:
    """Prepare the policy's modules, and build the components of a trainer; its callbacks are added to it.

    Args:
        config: the user's, converted; user_args: as the user passed it.
    """
    args, base, clock = view.args, base_model_of(view.model), PhaseClock()
    args.steps_per_generation = config.geometry.steps_per_rollout
    view.add_callback(clock)
    keep_4bit_weights(view.model)
    install(base, view.temperature, args.cast_lm_head_to_fp32)
    if args.replay.experts:
        install_routers(base)
    forwards, rollouts = build_rollouts(view, clock, max_tokens=lambda: step_planner.limits.tokens)
    images, pad, device = rollouts.images, rollouts.worker.settings.pad, view.accelerator.device
    step_planner = StepPlanner(
        forwards=forwards,
        clock=clock,
        collation=Collation(images, pad, forwards.multiple, device),
        cost=token_cost(base),
    )
    pass_at_k = PassAtK(args)
    keeper = RunKeeper(view, user_args, rollouts, forwards, step_planner.limits, pass_at_k)
    view.add_callback(keeper)
    view.add_callback(keeper.watch)
    return Components(
        clock=clock,
        forwards=forwards,
        rollouts=rollouts,
        trl_methods=TrlMethods(rollouts),
        step_planner=step_planner,
        loss_overrides=LossOverrides(view, forwards, images),
        pass_at_k=pass_at_k,
        keeper=keeper,
    )
