"""What a run has to remember beside model, optimizer and scheduler: the rollout in progress and the log in progress.

Differs from TRL, which forgets both on resume and samples again. Saved as safetensors and JSON, so reading executes
nothing. Written and read by the trainer around transformers' own checkpoint files.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from safetensors.torch import load_file, save_file

from ..errors import CheckpointError
from ..forward.snapshot import Weights
from ..rollouts.batch import NAMES, Column, RolloutBatch
from ..rollouts.ragged import Ragged

logger = get_logger(__name__)

REFERENCE = "grpo_ext_reference.safetensors"
STATE, TENSORS = "grpo_ext_state.json", "grpo_ext_rollout.safetensors"
WEIGHTS = "grpo_ext_rollout_weights.safetensors"


@dataclass
class RunState:
    """See the module.

    Attributes:
        rollout: the scored rollout batch that is being trained on.
        rollout_name: its epoch and its index in the epoch.
        step: steps of this trainer's own count.
        metrics: values of the steps since the last log line, by name.
        loss: sums of the Trainer since the last log line and since the start, and the step of the last log line.
        losses: of every step so far.
        entropy: the adaptive entropy controller.
        limits: sizes that fit into memory, where they are smaller than those asked for.
        waiting: rollout batches that are being sampled (`rollout_lag`): the optimizer step, from 0, that each is for
            first, and the weights that sample it, one object for all that the same weights sample.
        sampled_at: optimizer steps made before the weights that sampled `rollout`.
    """

    rollout: RolloutBatch | None = None
    rollout_name: tuple[int, int] | None = None
    step: int = 0
    metrics: dict[str, list[float]] = field(default_factory=dict)
    loss: dict[str, float] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    entropy: dict[str, float] = field(default_factory=dict)
    limits: dict[str, Any] = field(default_factory=dict)
    waiting: list[tuple[int, Weights]] = field(default_factory=list)
    sampled_at: int = 0

    def save(self, folder: str | Path) -> None:
        """Write into a checkpoint's folder."""
        plain = {name: value for name, value in vars(self).items() if name != "rollout"}
        plain["waiting"] = [{"step": step, "progress": weights.progress} for step, weights in self.waiting]
        tensors, objects = ({}, {}) if self.rollout is None else _of_rollout(self.rollout)
        if objects and (unstored := _unstorable(objects)):
            logger.warning(
                f"A checkpoint cannot hold {', '.join(unstored)} of this rollout batch (Python objects other than "
                "numbers, texts, lists and dictionaries of them), so it is left out: a run that resumes here samples "
                "it again, with the weights as they are then. Return tensors from _generate_and_score_completions."
            )
            tensors, objects, plain["rollout_name"] = {}, {}, None
        plain["rollout_objects"] = objects
        (Path(folder) / STATE).write_text(json.dumps(plain, indent=1) + "\n")
        save_file(tensors, Path(folder) / TENSORS)
        if self.waiting:
            save_file(_stored({weights.step: weights for _, weights in self.waiting}), Path(folder) / WEIGHTS)

    @classmethod
    def load(cls, folder: str | Path, num_generations: int) -> RunState | None:
        """Read from a checkpoint's folder; None if it is one of another trainer.

        Args:
            num_generations: completions per group of the rollout batch.

        Raises:
            CheckpointError: it is there and cannot be read.
        """
        path = Path(folder) / STATE
        if not path.is_file():
            return None
        try:
            plain = json.loads(path.read_text())
            tensors = load_file(Path(folder) / TENSORS)
            waiting, objects = plain.pop("waiting", []), plain.pop("rollout_objects", {})
            state = cls(**plain)
            if waiting:
                stored = load_file(Path(folder) / WEIGHTS)
                moments = {part["progress"]["global_step"]: part["progress"] for part in waiting}
                loaded = {step: _weights(stored, progress) for step, progress in moments.items()}
                state.waiting = [(part["step"], loaded[part["progress"]["global_step"]]) for part in waiting]
        except Exception as error:  # whatever the parsers raise
            raise CheckpointError(f"{path}, {TENSORS} or {WEIGHTS} beside it is broken: {error}.") from None
        if state.rollout_name is not None:
            state.rollout_name = (state.rollout_name[0], state.rollout_name[1])
            state.rollout = _rollout(tensors, objects, num_generations)
        return state


def _of_rollout(rollout: RolloutBatch) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]]]:
    """The tensors of a rollout batch, and its Python objects.

    A column is "<name>/values"; "<name>/lengths" is beside it where rows have values of any number.
    """
    tensors: dict[str, torch.Tensor] = {}
    objects: dict[str, dict[str, Any]] = {"lists": {}, "constants": {}, "layout": {}}
    objects["layout"] = {"widths": rollout.widths, "items_per_token": rollout.items_per_token}
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
    return {name: value.contiguous().clone() for name, value in tensors.items()}, objects  # they may share memory


def _unstorable(objects: dict[str, dict[str, Any]]) -> list[str]:
    """Names of Python objects that JSON does not give back as they were."""

    def lost(value: Any) -> bool:
        try:
            return bool(json.loads(json.dumps(value)) != value)
        except (TypeError, ValueError):
            return True

    return [name for part in ("lists", "constants") for name, value in objects[part].items() if lost(value)]


def _rollout(
    tensors: dict[str, torch.Tensor], objects: dict[str, dict[str, Any]], num_generations: int
) -> RolloutBatch:
    columns: dict[str, Column] = dict(objects.get("lists", {}))
    constants = dict(objects.get("constants", {}))
    for key in sorted(tensors):
        name, part = key.rsplit("/", 1)
        lengths: Any = tensors.get(f"{name}/lengths")
        if part == "constant":
            constants[name] = tensors[key]
        elif part == "values" and lengths is None:
            columns[name] = tensors[key]
        elif part == "values" and (name in _ONE_EACH or name not in NAMES) and bool((lengths == 1).all()):
            # as single values were written once
            columns[name] = tensors[key][:, None] if name == "importance_sampling_ratio" else tensors[key]
        elif part == "values":
            columns[name] = Ragged(tensors[key], lengths.tolist())
    layout = objects.get("layout", {})
    widths = layout.get("widths")
    rollout = RolloutBatch.of_columns(columns, num_generations, constants, None if widths is None else tuple(widths))
    rollout.items_per_token = layout.get("items_per_token")
    return rollout


_ONE_EACH = ("advantages", "importance_sampling_ratio", "row_number")


def _stored(weights: dict[int, Weights]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for step, kept in weights.items():
        for part, tensors in (("policy", kept.policy), ("reference", kept.reference)):
            found |= {f"{step}/{part}/{name}": tensor.cpu().contiguous() for name, tensor in tensors.items()}
    return found


def _weights(stored: dict[str, torch.Tensor], progress: dict[str, Any]) -> Weights:
    parts = []
    for part in ("policy", "reference"):
        prefix = f"{progress['global_step']}/{part}/"
        # copied, as what a file was mapped for may lie where no other tensor does (runtime.determinism.align_memory)
        own = {key: value.clone() for key, value in stored.items() if key.startswith(prefix)}
        parts.append({key.removeprefix(prefix): value for key, value in own.items()})
    return Weights(progress, *parts)


def save_reference(model: torch.nn.Module, folder: str | Path) -> None:
    """Write a reference model that moves during the run (`sync_ref_model`)."""
    state = {name: value.detach().cpu().contiguous().clone() for name, value in model.state_dict().items()}
    save_file(state, Path(folder) / REFERENCE)


def load_reference(model: torch.nn.Module, folder: str | Path) -> None:
    """Read it again, where it was written."""
    path = Path(folder) / REFERENCE
    if path.is_file():
        model.load_state_dict(load_file(path))
