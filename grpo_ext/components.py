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
from .runtime.clock import PhaseClock
from .runtime.determinism import align_memory
from .runtime.out_of_memory import MicroBatchLimits
from .step.evaluation import PassAtK
from .step.optimizer_step import StepPlanner
from .step.overrides import LossOverrides
from .view import TrainerView


class Components:
    """What the override points of a trainer hand over to."""

    def __init__(self, view: TrainerView, user_args: trl.GRPOConfig | None) -> None:
        args, base, self.clock = view.args, base_model_of(view.model), PhaseClock()
        view.add_callback(self.clock)
        keep_4bit_weights(view.model)
        install(base, view.temperature, args.cast_lm_head_to_fp32)
        if args.replay.experts:
            install_routers(base)
        log = RunLog()
        limits = MicroBatchLimits(args.per_device_train_batch_size, args.micro_batch_tokens)
        self.forwards, self.rollouts = forwards, rollouts = build_rollouts(view, self.clock, limits, log.rollout)
        self.step_planner = StepPlanner(forwards, self.clock, rollouts.images, token_cost(base), limits, view)
        self.trl_methods = TrlMethods(rollouts)
        self.loss_overrides = LossOverrides(view, self.step_planner)
        self.pass_at_k = PassAtK(args)
        self.keeper = RunKeeper(view, user_args, rollouts, forwards, limits, self.pass_at_k, log)
        rollouts.worker.rewards.pack_functions(reward_functions(view))
        view.add_callback(self.keeper)
        view.add_callback(self.keeper.watch)
        if args.bitwise_invariant:
            align_memory(*view.models)
