"""The run that a trainer is in, as this room reads and restores it: the one object between a trainer and `run/`.

What is read is that of the moment: the Trainer makes its optimizer late and replaces its state when a run begins.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .interrupts import RunCallback
from .recorded_completions import RecordedCompletions, record
from .state import RunState


@dataclass(frozen=True)
class RunParts:
    """What a run is made of, under the wrappers of Accelerate.

    Attributes:
        model: the policy, as PEFT wraps it; reference: of its own, or None.
        optimizer: None before training.
        processing_class: tokenizer or processor; tokenizer: its tokenizer; end_tokens: ids at which completions end.
        train_dataset, reward_weights, reward_names: of the run.
        tools: functions, and methods of environments.
    """

    model: Any
    reference: Any
    optimizer: Any
    processing_class: Any
    tokenizer: Any
    end_tokens: Collection[int]
    train_dataset: Any
    reward_weights: torch.Tensor
    reward_names: Sequence[str]
    tools: Sequence[Any]


class LiveRun:
    """See the module."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    @property
    def global_step(self) -> int:
        """Optimizer steps so far."""
        return self._trainer.state.global_step

    @property
    def logs(self) -> dict[str, Any]:
        """TRL's record of completions."""
        return self._trainer._logs

    @property
    def callbacks(self) -> list[RunCallback]:
        """Those that are told of the end of the run."""
        return [callback for callback in self._trainer.callback_handler.callbacks if isinstance(callback, RunCallback)]

    def parts(self) -> RunParts:
        """What the run is made of."""
        trainer = self._trainer
        unwrap = trainer.accelerator.unwrap_model
        return RunParts(
            model=unwrap(trainer.model),
            reference=None if trainer.ref_model is None else unwrap(trainer.ref_model),
            optimizer=trainer.optimizer,
            processing_class=trainer.processing_class,
            tokenizer=trainer._tokenizer,
            end_tokens=trainer.eos_token_ids,
            train_dataset=trainer.train_dataset,
            reward_weights=trainer.reward_weights,
            reward_names=trainer.reward_func_names,
            tools=trainer.tools or (),
        )

    def state(self) -> RunState:
        """What a checkpoint holds beside model, optimizer and scheduler; on all processes together."""
        trainer = self._trainer
        sampler, limits = trainer._sampler, trainer._step_runner.limits
        entropy = {"coefficient": trainer.entropy_coef, "last": trainer._last_world_entropy}
        return RunState(
            rollout=sampler.rollout,
            rollout_name=sampler.rollout_name,
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
                "generation": sampler.memory.limit,
            },
            waiting=trainer._waiting if trainer._ahead is None else trainer._ahead.for_checkpoint(),
            sampled_at=trainer._sampled_at,
        )

    def restore(self, state: RunState) -> None:
        """Give a trainer what `state` took, once its loops have set their own sums to zero."""
        trainer = self._trainer
        trainer._sampler.hold(state.rollout, state.rollout_name)
        trainer._step, trainer._waiting, trainer._sampled_at = state.step, state.waiting, state.sampled_at
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
            trainer._sampler.memory.limit = state.limits["generation"]

    def record(self) -> RecordedCompletions | None:
        """Log-probabilities of a few completions under the policy as it is now, for a checkpoint."""
        trainer = self._trainer
        rollout, model = trainer._sampler.rollout, trainer.model
        if rollout is None or trainer._sampler.prepare is not None:  # images are not recorded
            return None

        def score(row: int) -> torch.Tensor:
            with trainer._scorer.without_gradients(model):
                return trainer._score(model, trainer._step_runner.collate(rollout, (row,)))[0][0]

        return record(rollout, score, model, trainer.args, trainer.temperature, trainer.accelerator)
