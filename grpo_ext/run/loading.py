"""Loading a checkpoint: what transformers' Trainer leaves out of weights and optimizer.

transformers loads weights by name and only warns of those it does not find. Used on resume and where the best
checkpoint is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ..errors import CheckpointError

# ---- Weights --------------------------------------------------------------------------------------------------------


@contextmanager
def all_loaded(model: Any, folder: str | Path, by_engine: bool) -> Iterator[None]:
    """Inside, transformers loads the weights of a checkpoint; at the end the missing ones are loaded too.

    Parameters keep their dtypes: PEFT makes a bfloat16 adapter float32.

    Args:
        by_engine: an engine (FSDP, DeepSpeed) loads all weights itself.

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
    """Load weights whose names in the files differ from the model's (experts, image towers), through its class.

    Args:
        folder: the checkpoint; nothing is done where its files have all names of the model, or hold an adapter.

    Raises:
        CheckpointError: a weight of the model is not in the checkpoint.
    """
    names, weights = _saved_names(Path(folder)), model.state_dict(keep_vars=True)
    if names is None:
        return
    loaded = {id(value) for name, value in weights.items() if name in names}  # tied weights are one object
    missing = [name for name, value in weights.items() if id(value) not in loaded]
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
    except (RuntimeError, ValueError) as error:  # shapes do not match
        raise CheckpointError(f"{folder} lacks {_some(missing)}: {error}") from error
    if absent:
        raise CheckpointError(f"{folder} lacks {_some(absent)}; it is not a checkpoint of this model.")


def _saved_names(folder: Path) -> set[str] | None:
    """The names of the weights in a checkpoint's files; None where it holds no whole model."""
    if (index := folder / SAFE_WEIGHTS_INDEX_NAME).is_file():
        return set(json.loads(index.read_text())["weight_map"])
    if not (weights := folder / SAFE_WEIGHTS_NAME).is_file():
        return None
    with safe_open(weights, "pt") as file:
        return set(file.keys())


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more weights" if len(names) > 4 else "")


# ---- Optimizer ------------------------------------------------------------------------------------------------------


def fill_missing_state(optimizer: Any) -> None:
    """Give parameters that never had a gradient the optimizer state that they would begin with: zeros.

    torch saves none for them under FSDP2, and then refuses to load what it has saved. A model with an image tower has
    such parameters: LLaVA reads the last layer but one.
    """
    known = {parameter: state for parameter, state in optimizer.state.items() if state}
    if not known:
        return
    like, first = next(iter(known.items()))
    tensors = {name: value for name, value in first.items() if isinstance(value, torch.Tensor)}
    if any(value.dim() and value.shape != like.shape for value in tensors.values()):
        return  # factored, or otherwise not of a parameter's shape
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if parameter.requires_grad and parameter not in known:
            optimizer.state[parameter] = {
                name: torch.zeros_like(parameter if value.dim() else value) for name, value in tensors.items()
            }
