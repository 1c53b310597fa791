"""The components of a trainer, built once its models are there. Called by the trainer's constructor."""

import trl

from .forward.architecture import base_model_of, token_cost
from .forward.lm_head import install
from .forward.quantised import keep_4bit_weights
from .forward.routing import install_routers
from .rollouts.build import build_rollouts
from .rollouts.settings import reward_functions
from .rollouts.trl_methods import TrlMethods
from .run.keeper import RunKeeper
from .run.log import RunLog
from .runtime.determinism import align_memory
from .step.evaluation import PassAtK
from .step.optimizer_step import StepPlanner
from .step.overrides import LossOverrides
from .view import TrainerView


class Components:
    """What the override points of a trainer hand over to."""

    def __init__(self, view: TrainerView, user_args: trl.GRPOConfig | None) -> None:
        args, base = view.args, base_model_of(view.model)
        keep_4bit_weights(view.model)
        install(base, view.temperature, args.cast_lm_head_to_fp32)
        if args.replay.experts:
            install_routers(base)
        log = RunLog()
        self.rollouts = rollouts = build_rollouts(view, log.rollout)
        self.clock = rollouts.worker.clock
        self.forwards, self.step_planner = rollouts.worker.forwards, StepPlanner(view, rollouts, token_cost(base))
        self.trl_methods = TrlMethods(rollouts)
        self.loss_overrides = LossOverrides(view, self.step_planner)
        self.pass_at_k = PassAtK(args)
        self.keeper = RunKeeper(view, user_args, rollouts, self.pass_at_k, log)
        rollouts.worker.rewards.pack_functions(reward_functions(view))
        view.add_callback(self.clock)
        view.add_callback(self.keeper)
        view.add_callback(self.keeper.watch)
        if args.bitwise_invariant:
            align_memory(*view.models)
