"""Weights read back from a checkpoint: every one of them, also where files have other names for them than the model.

Differs from transformers' Trainer, which loads by name and only warns of what it has left out: experts and image
towers, whose classes save them under names of their own, would go on with the weights they began with. Used where a run
is resumed and where the best checkpoint is loaded at its end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ..errors import CheckpointError


def _saved_names(folder: Path) -> set[str] | None:
    """The names of the weights in a checkpoint's files; None where it holds no whole model."""
    if (index := folder / SAFE_WEIGHTS_INDEX_NAME).is_file():
        return set(json.loads(index.read_text())["weight_map"])
    if not (weights := folder / SAFE_WEIGHTS_NAME).is_file():
        return None
    with safe_open(weights, "pt") as file:
        return set(file.keys())


@contextmanager
def all_loaded(model: Any, folder: str | Path, by_engine: bool) -> Iterator[None]:
    """Inside, transformers loads the weights of a checkpoint; afterwards all are loaded, in the number format they had.

    PEFT makes float32 of an adapter that was bfloat16.

    Args:
        by_engine: an engine loads its own, which are all there are.

    Raises:
        CheckpointError: a weight of the model is not in the checkpoint.
    """
    before = {name: parameter.dtype for name, parameter in model.named_parameters()}
    yield
    for name, parameter in model.named_parameters():
        if parameter.dtype != before.get(name, parameter.dtype):
            parameter.data = parameter.data.to(before[name])
    if not by_engine:
        load_renamed(model, folder)


def load_renamed(model: Any, folder: str | Path) -> None:
    """Load the weights of a model that loading by name has left out, through the class that has written them.

    Args:
        folder: the checkpoint; nothing is done where its files have all names of the model, or hold an adapter.

    Raises:
        CheckpointError: a weight of the model is not in the checkpoint.
    """
    names, own = _saved_names(Path(folder)), model.state_dict(keep_vars=True)
    if names is None:
        return
    loaded = {id(value) for name, value in own.items() if name in names}  # tied weights are one object
    missing = [name for name, value in own.items() if id(value) not in loaded]
    if not missing:
        return
    if not isinstance(model, PreTrainedModel):
        raise CheckpointError(f"{folder} lacks {_some(missing)}, and nothing tells which of its weights they are.")
    widest = max((p.dtype for p in model.parameters()), key=lambda dtype: dtype.itemsize)
    reading: Any = type(model).from_pretrained
    try:
        read, info = reading(folder, dtype=widest, output_loading_info=True)
        absent = sorted({*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])})
        if not absent:
            model.load_state_dict(read.state_dict())
    except (RuntimeError, ValueError) as error:  # what is there does not fit together
        raise CheckpointError(f"{folder} lacks {_some(missing)}: {error}") from error
    if absent:
        raise CheckpointError(f"{folder} lacks {_some(absent)}; it is not a checkpoint of this model.")


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more weights" if len(names) > 4 else "")
