"""The run that a trainer is in, as this room reads and restores it: the one object between a trainer and `run/`.

What is read is that of the moment: the Trainer makes its optimizer late and replaces its state when a run begins.
"""

from __future__ import annotations

from typing import Any

import torch

from ..batching.sizes import describe_plan
from ..rollouts.build import described
from .fingerprint import data_fingerprint, model_fingerprint, settings_of, tokenizer_fingerprint, tools_fingerprint
from .recorded_completions import RecordedCompletions, record
from .state import RunState


class LiveRun:
    """See the module.

    Attributes:
        trainer: read from outside of this class for what is public of a `transformers.Trainer`.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    @property
    def model(self) -> Any:
        """The policy under the wrappers of Accelerate, as PEFT wraps it."""
        return self.trainer.accelerator.unwrap_model(self.trainer.model)

    @property
    def reference(self) -> Any:
        """The reference model, where it is one of its own; None otherwise."""
        model = self.trainer.ref_model
        return None if model is None else self.trainer.accelerator.unwrap_model(model)

    @property
    def logs(self) -> dict[str, Any]:
        """TRL's record of completions."""
        return self.trainer._logs

    def plan(self) -> str:
        """The resolved plan, for people."""
        trainer, args = self.trainer, self.trainer.args
        prompts = len(trainer.train_dataset) if hasattr(trainer.train_dataset, "__len__") else None
        epochs = None if args.max_steps > 0 else args.num_train_epochs
        slower = "; float32 is faster on a CPU: bf16=False" if trainer.accelerator.device.type == "cpu" else ""
        return describe_plan(
            trainer.geometry,
            prompts,
            args.dataloader_drop_last,
            epochs,
            args.micro_batch_tokens,
            form=trainer._scorer.described(trainer.model),
            precision=f"bfloat16 (TRL's default){slower}" if args.bf16 else None,
            ahead=described(trainer),
        )

    def fingerprint(self, whole: bool) -> dict[str, Any]:
        """Everything that is compared on resume, in plain JSON types.

        Args:
            whole: whether this process holds all weights.
        """
        trainer = self.trainer
        return {
            "data": data_fingerprint(trainer.train_dataset),
            "model": model_fingerprint(self.model, self.reference, whole),
            "tokenizer": tokenizer_fingerprint(trainer._tokenizer),
            "end_tokens": sorted(trainer.eos_token_ids),
            "rewards": list(trainer.reward_func_names),
            "tools": tools_fingerprint(trainer.tools or ()),
            "settings": settings_of(trainer.args, trainer.geometry),
        }

    def state(self) -> RunState:
        """What a checkpoint holds beside model, optimizer and scheduler; on all processes together."""
        trainer = self.trainer
        rollouts, limits = trainer._rollouts, trainer._step_runner.limits
        entropy = {"coefficient": trainer.entropy_coef, "last": trainer._last_world_entropy}
        return RunState(
            rollout=rollouts.batch,
            rollout_name=rollouts.held,
            step=trainer._step,
            metrics={name: [float(v) for v in values] for name, values in trainer._metrics["train"].items()},
            loss={
                "since_log": float(trainer._tr_loss),
                "total": float(trainer._total_loss_scalar),
                "last_logged": float(trainer._globalstep_last_logged),
            },
            losses=trainer._losses,
            entropy=entropy if trainer.use_adaptive_entropy else {},
            limits={
                "window": limits.state(),
                "scoring": trainer._scorer.memory.limit,
                "generation": rollouts.worker.parts.memory.limit,
            },
            waiting=list(rollouts.waiting) if rollouts.ahead is None else rollouts.ahead.for_checkpoint(),
            sampled_at=rollouts.sampled_at,
        )

    def restore(self, state: RunState) -> None:
        """Give a trainer what `state` took, once its loops have set their own sums to zero."""
        trainer = self.trainer
        rollouts = trainer._rollouts
        rollouts.hold(state.rollout, state.rollout_name)
        trainer._step, rollouts.waiting, rollouts.sampled_at = state.step, state.waiting, state.sampled_at
        trainer._metrics["train"].clear()
        trainer._metrics["train"].update(state.metrics)
        if state.loss:
            trainer._tr_loss = trainer._tr_loss + state.loss["since_log"]
            trainer._total_loss_scalar = state.loss["total"]
            trainer._initial_global_step, trainer._globalstep_last_logged = 0, int(state.loss["last_logged"])
            trainer._losses = list(state.losses)
        if state.entropy:
            trainer.entropy_coef = state.entropy["coefficient"]
            trainer._last_world_entropy = state.entropy["last"]
        if state.limits:
            trainer._step_runner.limits.restore(state.limits["window"])
            trainer._scorer.memory.limit = state.limits["scoring"]
            rollouts.worker.parts.memory.limit = state.limits["generation"]

    def record(self) -> RecordedCompletions | None:
        """Log-probabilities of a few completions under the policy as it is now, for a checkpoint."""
        trainer = self.trainer
        rollout, model = trainer._rollouts.batch, trainer.model
        if rollout is None or trainer._rollouts.images.prepare is not None:  # images are not recorded
            return None

        def score(row: int) -> torch.Tensor:
            with trainer._scorer.without_gradients(model):
                return trainer._score(model, *trainer._step_runner.parts.collate(rollout, (row,)))[0][0]

        return record(rollout, score, model, trainer.args, trainer.temperature, trainer.accelerator)
