"""State of a run beside model, optimizer and scheduler: rollout batch and log line in progress, sizes that fit.

Differs from TRL, which samples again on resume, and saves the entropy controller alone. Saved as safetensors and JSON,
so that reading it executes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from safetensors.torch import load_file, save_file
from transformers import TrainerState
from transformers.trainer_callback import ExportableState

from ..errors import CheckpointError
from ..forward.reference import weight_sums
from ..forward.snapshot import Weights
from ..rollouts.batch import Column, RolloutBatch
from ..rollouts.ragged import Ragged
from ..runtime.out_of_memory import device_kind

logger = get_logger(__name__)

REFERENCE = "grpo_ext_reference.safetensors"
STATE, TENSORS = "grpo_ext_state.json", "grpo_ext_rollout.safetensors"
WEIGHTS = "grpo_ext_rollout_weights.safetensors"


@dataclass
class RunState:
    """What a checkpoint holds beside model, optimizer and scheduler."""

    rollout: RolloutBatch | None = None  # scored, and being trained on
    rollout_name: tuple[int, int] | None = None  # its epoch and its index in the epoch
    metrics: dict[str, list[float]] = field(default_factory=dict)  # of the steps since the last log line, by name
    # sums of the Trainer since the last log line and since the start, and the step of the last log line
    loss: dict[str, float] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)  # of every step so far
    limits: dict[str, Any] = field(default_factory=dict)  # sizes that fit into the memory of a kind of device
    # rollout batches that are being sampled (`rollout_lag`): for each the first optimizer step, from 0, that trains on
    # it, and the weights that sample it. Those with the same weights share one object
    waiting: list[tuple[int, Weights]] = field(default_factory=list)
    sampled_at: int = 0  # optimizer steps made before the weights that sampled `rollout`
    reference: dict[str, torch.Tensor] = field(default_factory=dict)  # the weights of one that has moved
    evaluation_due: bool = False  # an interrupt left the evaluation of the last step to the run that resumes
    pass_or_fail: bool = True  # every reward of the evaluations so far was 0 or 1
    stopped_early: bool = False  # a callback ended the run before its last step

    @classmethod
    def of(cls, trainer: Any) -> RunState:
        """The state of a trainer's run as it is now; called on all processes together."""
        rollouts, reference, loop, watch = trainer._rollouts, {}, trainer.state, trainer._keeper.watch
        ends = watch.ends_anyway if watch.stopping else trainer.control.should_training_stop
        ahead = None if rollouts.ahead is None else [(job.step, job.weights) for job in rollouts.ahead.jobs]
        if trainer._keeper.reference_start not in (None, weight_sums(trainer.ref_model)):
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
                "window": trainer._step_planner.state_dict(),
                "scoring": trainer._forwards.memory.limit,
                "generation": rollouts.memory.limit,
                "device": _conditions(trainer),
            },
            waiting=list(rollouts.waiting) if ahead is None else ahead,
            sampled_at=rollouts.sampled_at,
            reference=reference,
            evaluation_due=watch.evaluation_due,
            pass_or_fail=trainer._pass_at_k.pass_or_fail,
            stopped_early=ends and loop.global_step < loop.max_steps,
        )

    def restore_limits(self, trainer: Any) -> None:
        """Adopt the sizes that fit, where device and configuration are the same; else the configured ones run first."""
        if self.limits.get("device") in (None, _conditions(trainer)):
            trainer._step_planner.load_state_dict(self.limits["window"])
            trainer._forwards.memory.limit = self.limits["scoring"]
            trainer._rollouts.memory.limit = self.limits["generation"]

    def restore(self, trainer: Any) -> None:
        """Put the state back into a trainer, after its loop has set its sums to zero."""
        rollouts = trainer._rollouts
        rollouts.hold(self.rollout, self.rollout_name)
        rollouts.waiting, rollouts.sampled_at = self.waiting, self.sampled_at
        trainer._pass_at_k.pass_or_fail = self.pass_or_fail
        trainer._metrics["train"].clear()
        trainer._metrics["train"].update(self.metrics)
        trainer._step, trainer._losses = trainer.state.global_step, list(self.losses)
        trainer._tr_loss = trainer._tr_loss + self.loss["since_log"]
        trainer._total_loss_scalar = self.loss["total"]
        trainer._initial_global_step, trainer._globalstep_last_logged = 0, int(self.loss["last_logged"])
        if self.reference and trainer.ref_model is not None:
            trainer.accelerator.unwrap_model(trainer.ref_model).load_state_dict(self.reference)

    def save(self, folder: str | Path) -> None:
        """Write into a checkpoint's folder."""
        plain = {name: value for name, value in vars(self).items() if name not in ("rollout", "reference")}
        plain["waiting"] = [{"step": step, "progress": weights.progress} for step, weights in self.waiting]
        tensors, objects = ({}, {}) if self.rollout is None else _split(self.rollout)
        python = [*objects.get("lists", {}).items(), *objects.get("constants", {}).items()]
        if unstorable := [name for name, value in python if not _survives_json(value)]:
            logger.warning(
                f"A checkpoint cannot hold {', '.join(unstorable)} of this rollout batch (Python objects other than "
                "numbers, texts, lists and dictionaries of them), so it is left out: a run that resumes here samples "
                "it again, with the weights as they are then. Return tensors from _generate_and_score_completions."
            )
            tensors, objects, plain["rollout_name"] = {}, {}, None
        plain["rollout_objects"] = objects
        (Path(folder) / STATE).write_text(json.dumps(plain, indent=1) + "\n")
        save_file(tensors, Path(folder) / TENSORS)
        if self.waiting:
            save_file(_flat({weights.step: weights for _, weights in self.waiting}), Path(folder) / WEIGHTS)
        if self.reference:
            save_file(_of_their_own(self.reference), Path(folder) / REFERENCE)

    @classmethod
    def load(cls, folder: str | Path, num_generations: int) -> RunState | None:
        """Read from a checkpoint's folder, with groups of `num_generations`; None if another trainer wrote it.

        Raises:
            CheckpointError: a file cannot be read.
        """
        path = Path(folder) / STATE
        if not path.is_file():
            return None
        try:
            plain = json.loads(path.read_text())
            tensors = load_file(Path(folder) / TENSORS)
            waiting, objects = plain.pop("waiting"), plain.pop("rollout_objects")
            known = {spec.name for spec in fields(cls)}  # earlier versions saved more
            state = cls(**{name: value for name, value in plain.items() if name in known})
            if waiting:
                stored = load_file(Path(folder) / WEIGHTS)
                snapshots = {part["progress"]["global_step"]: part["progress"] for part in waiting}
                weights = {step: _weights(stored, progress) for step, progress in snapshots.items()}
                state.waiting = [(part["step"], weights[part["progress"]["global_step"]]) for part in waiting]
            if state.rollout_name is not None:
                state.rollout_name = (state.rollout_name[0], state.rollout_name[1])
                state.rollout = _join(tensors, objects, num_generations)
            if (reference := Path(folder) / REFERENCE).is_file():
                state.reference = load_file(reference)
        except Exception as error:  # whatever the parsers raise
            raise CheckpointError(f"{path}, or a safetensors file beside it, is broken: {error}.") from None
        return state


def _conditions(trainer: Any) -> str:
    """What decides which sizes fit, beside the model: the device, and what a user changes to make more fit."""
    args = trainer.args
    sizes = (args.per_device_train_batch_size, args.micro_batch_tokens, args.gradient_checkpointing)
    return f"{device_kind(trainer.accelerator.device)}, {sizes}"


def callback_states(callbacks: Sequence[Any]) -> Any:
    """The states of callbacks that have one (transformers' `ExportableState`), by their classes' names."""
    stateful: Any = [callback for callback in callbacks if isinstance(callback, ExportableState)]
    return TrainerState(stateful_callbacks=stateful).stateful_callbacks


def restore_callbacks(callbacks: Sequence[Any], saved: Mapping[str, Any], checkpoint: str) -> None:
    """Restore the attributes that callbacks saved, in the user's objects and with the user's arguments."""
    for name, states in saved.items():
        alike = [part for part in callbacks if isinstance(part, ExportableState) and type(part).__name__ == name]
        latest = (states if isinstance(states, list) else [states])[-len(alike) :]
        for callback, state in zip(alike, latest):
            old, new = (json.loads(json.dumps(part.get("args", {}))) for part in (state, callback.state()))
            if old != new:
                logger.warning(
                    f"{name} had {old} when {checkpoint} was written and has {new} now, which counts; "
                    "restore_callback_states_from_checkpoint=True takes the checkpoint's."
                )
            try:
                read, values = type(callback).from_state, state.get("attributes", {})
                if read.__qualname__ != ExportableState.from_state.__qualname__:  # a class's own way
                    like = read({**state, "args": callback.state().get("args", {})})
                    values = {attribute: getattr(like, attribute) for attribute in values}
                for attribute, value in values.items():
                    setattr(callback, attribute, value)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                logger.warning(f"The state of {name} in {checkpoint} was not restored ({reason}).")


def _split(rollout: RolloutBatch) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]]]:
    """The tensors of a rollout batch ("<name>/values", "<name>/lengths" where rows differ), and its Python objects."""
    tensors: dict[str, torch.Tensor] = {}
    layout = {"widths": rollout.widths, "items_per_token": rollout.items_per_token}
    objects: dict[str, dict[str, Any]] = {"lists": {}, "constants": {}, "layout": layout}
    for name, column in rollout.columns.items():
        if isinstance(column, list):
            objects["lists"][name] = column
        elif isinstance(column, Ragged):
            tensors[f"{name}/values"], tensors[f"{name}/lengths"] = column.values, torch.tensor(column.lengths)
        else:
            tensors[f"{name}/values"] = column
    for name, value in rollout.constants.items():
        if isinstance(value, torch.Tensor):
            tensors[f"{name}/constant"] = value
        else:
            objects["constants"][name] = value
    return _of_their_own(tensors), objects


def _of_their_own(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies for safetensors, which takes no tensors that share memory."""
    return {name: value.cpu().contiguous().clone() for name, value in tensors.items()}


def _survives_json(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False


def _join(tensors: dict[str, torch.Tensor], objects: dict[str, dict[str, Any]], num_generations: int) -> RolloutBatch:
    columns: dict[str, Column] = dict(objects["lists"])
    constants = dict(objects["constants"])
    for key in sorted(tensors):
        name, part = key.rsplit("/", 1)
        lengths = tensors.get(f"{name}/lengths")
        if part == "constant":
            constants[name] = tensors[key]
        elif part == "values":
            columns[name] = tensors[key] if lengths is None else Ragged(tensors[key], lengths.tolist())
    layout = dict(objects["layout"])
    if layout["widths"] is not None:
        layout["widths"] = tuple(layout["widths"])
    return RolloutBatch.of_columns(columns, num_generations, constants=constants, **layout)


def _flat(snapshots: dict[int, Weights]) -> dict[str, torch.Tensor]:
    return {
        f"{step}/{part}/{name}": tensor.cpu().contiguous()
        for step, weights in snapshots.items()
        for part, tensors in (("policy", weights.policy), ("reference", weights.reference))
        for name, tensor in tensors.items()
    }


def _weights(stored: dict[str, torch.Tensor], progress: dict[str, Any]) -> Weights:
    parts: dict[str, dict[str, torch.Tensor]] = {"policy": {}, "reference": {}}
    for key, value in stored.items():
        step, part, name = key.split("/", 2)
        if int(step) == progress["global_step"]:
            # copied: tensors of a mapped file may be aligned otherwise, which changes bits (runtime.determinism)
            parts[part][name] = value.clone()
    return Weights(progress, **parts)
