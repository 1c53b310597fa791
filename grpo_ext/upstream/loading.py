"""Loads the weights and optimizer states of a checkpoint that transformers' Trainer leaves out, in the model's dtypes.

Repairs `transformers.Trainer._issue_warnings_after_load`, which only warns of weights that a file has under other names
(experts, image towers), so they stay as they were; `peft.PeftModel.load_adapter`, which converts a bfloat16 adapter to
float32; and `accelerate.utils.load_fsdp_optimizer`, which cannot load a parameter without a state. Until they fix it;
last seen in transformers 5.23, PEFT 0.21 and Accelerate 1.15. Also names the engine that wrote a state.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..errors import CheckpointError
from ..runtime.collectives import shards_parameters

# the optimizer's state as it is written by each engine, which no other one reads
_STATES = {
    "one process or DDP": "optimizer.pt",
    "FSDP with FULL_STATE_DICT": "optimizer.bin",
    "FSDP with SHARDED_STATE_DICT": "optimizer_*",
    "DeepSpeed": "global_step*",
}


def refuse_other_engine(folder: str | Path, accelerator: Any) -> None:
    own, plugin = "one process or DDP", getattr(accelerator.state, "fsdp_plugin", None)
    if shards_parameters(accelerator):
        own = "DeepSpeed" if plugin is None else f"FSDP with {plugin.state_dict_type.name}"
    written = [engine for engine, files in _STATES.items() if any(Path(folder).glob(files))]
    if written and own not in written:
        raise CheckpointError(
            f"{folder} was written under {written[0]}, and its optimizer state cannot be read under {own}; start as "
            f"before, or export its weights (grpo-ext export {folder} NEW_FOLDER) and begin a new run with them."
        )


@contextmanager
def dtypes_kept(model: Any) -> Iterator[None]:
    """PEFT converts a bfloat16 adapter to float32 when it loads it."""
    before = {name: parameter.dtype for name, parameter in model.named_parameters()}
    yield
    for name, parameter in model.named_parameters():
        if parameter.dtype != before.get(name, parameter.dtype):
            parameter.data = parameter.data.to(before[name])


def load_renamed(model: Any, folder: str | Path, missing: Collection[str]) -> None:
    """Load weights whose names in the files differ from the model's (experts, image towers), through its class."""
    weights = model.state_dict(keep_vars=True)
    loaded = {id(value) for name, value in weights.items() if name not in missing}  # tied weights are one object
    absent = [name for name, value in weights.items() if id(value) not in loaded]
    if not absent:
        return
    if not isinstance(model, PreTrainedModel):
        raise CheckpointError(f"{folder} lacks {_some(absent)}, and its class cannot read them.")
    widest = max((p.dtype for p in model.parameters()), key=lambda dtype: dtype.itemsize)
    reading: Any = type(model).from_pretrained
    try:
        read, info = reading(folder, dtype=widest, output_loading_info=True)
    except (RuntimeError, ValueError) as error:  # shapes do not match
        raise CheckpointError(f"{folder} lacks {_some(absent)}: {error}") from error
    if absent := sorted({*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])}):
        raise CheckpointError(f"{folder} lacks {_some(absent)}; it is not a checkpoint of this model.")
    model.load_state_dict(read.state_dict())


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more weights" if len(names) > 4 else "")


def fill_missing_state(optimizer: Any) -> None:
    """Give parameters without a gradient (LLaVA's last image layer) zeros as state: FSDP2 cannot load them without."""
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
