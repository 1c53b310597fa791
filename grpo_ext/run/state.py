"""The states of a run's components in a checkpoint, and those of callbacks.

Differs from TRL, which samples again on resume, and saves the entropy controller alone. Saved as JSON and safetensors,
so that reading it executes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from safetensors.torch import load_file, save_file
from transformers import TrainerState
from transformers.trainer_callback import ExportableState

from ..errors import CheckpointError

logger = get_logger(__name__)

STATE, TENSORS = "grpo_ext_state.json", "grpo_ext_state.safetensors"
_TENSOR = "tensor:"  # begins the key of a dictionary in JSON that stands for a tensor


def save_state(folder: str | Path, state: Mapping[str, Any]) -> None:
    tensors: dict[str, torch.Tensor] = {}
    plain = _plain(state, (), tensors)
    (Path(folder) / STATE).write_text(json.dumps(plain, indent=1) + "\n")
    # copies, because safetensors takes no tensors that share memory
    save_file({key: tensor.cpu().contiguous().clone() for key, tensor in tensors.items()}, Path(folder) / TENSORS)


def load_state(folder: str | Path) -> dict[str, Any] | None:
    """The states in a checkpoint by name, or a CheckpointError; None if another trainer wrote it."""
    path = Path(folder) / STATE
    if not path.is_file():
        return None
    try:
        state: dict[str, Any] = _with_tensors(json.loads(path.read_text()), load_file(Path(folder) / TENSORS))
    except Exception as error:  # whatever the parsers raise
        raise CheckpointError(f"{path}, or {TENSORS} beside it, is broken: {error}.") from None
    return state


def _plain(value: Any, path: tuple[str, ...], tensors: dict[str, torch.Tensor]) -> Any:
    """A value for JSON, whose tensors are moved to `tensors`, by their path."""
    if isinstance(value, torch.Tensor):
        key = f"{len(tensors)} {'/'.join(path)}"  # numbered, because names may contain a slash
        tensors[key] = value.detach()
        return {_TENSOR: key}
    if isinstance(value, Mapping):
        return {name: _plain(part, (*path, name), tensors) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part, (*path, str(index)), tensors) for index, part in enumerate(value)]
    return value


def _with_tensors(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_TENSOR}:
            # copied: tensors of a mapped file may be aligned otherwise, which changes bits (runtime.determinism)
            return tensors[value[_TENSOR]].clone()
        return {name: _with_tensors(part, tensors) for name, part in value.items()}
    return [_with_tensors(part, tensors) for part in value] if isinstance(value, list) else value


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
