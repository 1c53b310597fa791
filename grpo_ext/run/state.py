"""State of a run beside model, optimizer and scheduler: rollout batch and log line in progress, sizes that fit.

Differs from TRL, which samples again on resume, and saves the entropy controller alone. Saved with torch, and read with
`weights_only`, so that reading it executes nothing.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger

from ..errors import CheckpointError
from ..forward.snapshot import Weights
from ..rollouts.batch import RolloutBatch
from ..rollouts.ragged import Ragged
from ..runtime.collectives import shards_parameters

logger = get_logger(__name__)

STATE = "grpo_ext_state.pt"


@dataclass
class RunState:
    """What a checkpoint holds beside model, optimizer and scheduler.

    Attributes:
        rollout: the scored rollout batch that is being trained on.
        rollout_name: its epoch and its index in the epoch.
        metrics: values of the steps since the last log line, by name.
        loss: sums of the Trainer since the last log line and since the start, and the step of the last log line.
        losses: of every step so far.
        limits: sizes that fit into memory, where they are smaller than those in the configuration.
        waiting: rollout batches that are being sampled (`rollout_lag`): for each the first optimizer step, from 0, that
            trains on it, and the weights that sample it. Those with the same weights share one object.
        sampled_at: optimizer steps made before the weights that sampled `rollout`.
        reference: the weights of a reference model that moves during the run (`sync_ref_model`).
    """

    rollout: RolloutBatch | None = None
    rollout_name: tuple[int, int] | None = None
    metrics: dict[str, list[float]] = field(default_factory=dict)
    loss: dict[str, float] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    limits: dict[str, Any] = field(default_factory=dict)
    waiting: list[tuple[int, Weights]] = field(default_factory=list)
    sampled_at: int = 0
    reference: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, trainer: Any) -> RunState:
        """The state of a trainer's run as it is now; called on all processes together."""
        rollouts, reference = trainer._rollouts, {}
        if trainer.ref_model is not None and trainer.args.sync_ref_model and not shards_parameters(trainer.accelerator):
            reference = trainer.accelerator.unwrap_model(trainer.ref_model).state_dict()
        return cls(
            rollout=rollouts.batch,
            rollout_name=rollouts.batch_name,
            metrics={name: [float(v) for v in values] for name, values in trainer._metrics["train"].items()},
            loss={
                "since_log": float(trainer._tr_loss),
                "total": float(trainer._total_loss_scalar),
                "last_logged": float(trainer._globalstep_last_logged),
            },
            losses=trainer._losses,
            limits={
                "window": asdict(trainer._step_planner.limits),
                "scoring": trainer._forwards.memory.limit,
                "generation": rollouts.memory.limit,
            },
            waiting=list(rollouts.waiting) if rollouts.ahead is None else rollouts.ahead.for_checkpoint(),
            sampled_at=rollouts.sampled_at,
            reference=reference,
        )

    def restore(self, trainer: Any) -> None:
        """Put the state back into a trainer, after its loop has set its sums to zero."""
        rollouts = trainer._rollouts
        rollouts.hold(self.rollout, self.rollout_name)
        rollouts.waiting, rollouts.sampled_at = self.waiting, self.sampled_at
        trainer._metrics["train"].clear()
        trainer._metrics["train"].update(self.metrics)
        trainer._step, trainer._losses = trainer.state.global_step, list(self.losses)
        trainer._tr_loss = trainer._tr_loss + self.loss["since_log"]
        trainer._total_loss_scalar = self.loss["total"]
        trainer._initial_global_step, trainer._globalstep_last_logged = 0, int(self.loss["last_logged"])
        trainer._step_planner.limits.restore(**self.limits["window"])
        trainer._forwards.memory.limit = self.limits["scoring"]
        rollouts.memory.limit = self.limits["generation"]
        if self.reference and trainer.ref_model is not None:
            trainer.accelerator.unwrap_model(trainer.ref_model).load_state_dict(self.reference)

    def save(self, folder: str | Path) -> None:
        """Write into a checkpoint's folder."""
        saved, rollout = dict(vars(self)), self.rollout
        if rollout is not None:
            values = {**rollout.columns, **rollout.constants}
            objects = {name: v for name, v in values.items() if not isinstance(v, torch.Tensor | Ragged)}
            if unstorable := [name for name, value in objects.items() if not _survives_json(value)]:
                logger.warning(
                    f"A checkpoint cannot hold {', '.join(unstorable)} of this rollout batch (Python objects other "
                    "than numbers, texts, lists and dictionaries of them), so it is left out: a run that resumes here "
                    "samples it again, with the weights as they are then. Return tensors from "
                    "_generate_and_score_completions."
                )
                saved |= {"rollout": None, "rollout_name": None}
        torch.save(saved, Path(folder) / STATE)

    @classmethod
    def load(cls, folder: str | Path) -> RunState | None:
        """Read from a checkpoint's folder; None if another trainer wrote it.

        Raises:
            CheckpointError: the file cannot be read.
        """
        path = Path(folder) / STATE
        if not path.is_file():
            return None
        try:
            with torch.serialization.safe_globals([RolloutBatch, Ragged, Weights]):
                saved = torch.load(path, map_location="cpu", weights_only=True)
            known = {spec.name for spec in fields(cls)}  # earlier versions saved more
            return cls(**{name: value for name, value in saved.items() if name in known})
        except Exception as error:  # whatever the unpickler raises
            raise CheckpointError(f"{path} is broken: {error}.") from None


def _survives_json(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False
