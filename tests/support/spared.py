"""What libraries do again and again that says nothing here: no accelerator is there, no part of a model is compiled.

And what this package does for every run of a model: most tests train the same few, whose forms need one comparison.
"""

import functools
import hashlib
import inspect
import os
from collections.abc import Hashable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import accelerator
from accelerate.utils import other
from trl.trainer import utils as trl_utils

from grpo_ext.batching import packing
from grpo_ext.forward import attention, choice, form_check, forms, lm_head, prefix_cache, shared_prefix
from grpo_ext.forward.form_check import RowsAlone
from tests.support.selection import FULL

# TRL's forward, which calls that of the class: of a version that has one
_FUSED = getattr(trl_utils, "add_fused_lm_head", lambda: None).__code__.co_consts
_CODE = (attention, form_check, forms, lm_head, packing, prefix_cache, shared_prefix)  # where tests plant faults
_LIBRARIES = {"torch", "transformers", "peft"}  # whose modules compute the same from the same weights


def spare() -> None:
    """Leave it out in this process, and in those that it forks: a sixth of a tiny run."""
    backends: tuple[Any, ...] = (torch.cuda, torch.xpu, torch.mtia)
    for backend in backends:
        backend.traceback = SimpleNamespace(format_stack=list)  # whenever a seed is set
    # before every run, through all that was ever imported
    accelerator.release_memory = lambda *objects: [None] * len(objects)
    if FULL not in os.environ:
        os.fsync = lambda descriptor: None  # of every file of a checkpoint: nothing here cuts the power
    other.has_compiled_regions = lambda module: False  # walks all modules whenever a model is unwrapped


def remember_comparisons() -> None:
    """Compare the forms of a library's model once in this process: an eighth of a tiny run."""
    if choice.why_form_fails.__name__ == "remembered":
        return
    compare, found = choice.why_form_fails, dict[Hashable, str | None]()

    def remembered(form: Any, alone: RowsAlone, checkpointing: Any = None, group: Any = None, *draws: int) -> Any:
        key = None if group is not None or choice.why_form_fails is not remembered else _key(alone)
        if key is None:
            return compare(form, alone, checkpointing, group, *draws)
        key = (form, str(checkpointing), draws, key)
        if key not in found:
            found[key] = compare(form, alone, checkpointing, group, *draws)
        return found[key]

    choice.why_form_fails = remembered


def _key(alone: RowsAlone) -> Hashable:
    """All that the comparison of such a model reads, None for another: hooks or a forward of its own."""
    modules, rows = list(alone.policy.named_modules()), alone.rows
    kinds = [(name, type(m), type(m).forward, m.training) for name, m in modules]
    own = any(_has_own_forward(module) for _, module in modules)
    if own or rows.images is not None or {kind.__module__.split(".")[0] for _, kind, *_ in kinds} - _LIBRARIES:
        return None
    weights: dict[str, torch.Tensor] = {**dict(alone.policy.named_parameters()), **dict(alone.policy.named_buffers())}
    if any(type(weight.data) is not torch.Tensor for weight in weights.values()):  # an engine's, or quantised
        return None
    return (
        *_functions(),
        *kinds,
        *((name, weight.dtype, weight.shape, _digest(weight)) for name, weight in weights.items()),
        *(alone.policy.config.to_json_string(), alone.policy.config._attn_implementation, *alone.paddings),
        *(_digest(rows.ids_N), *rows.prompts_B, *rows.completions_B),
        *(torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.get_default_dtype()),
        *(torch.backends.mkldnn.matmul.fp32_precision, torch.are_deterministic_algorithms_enabled()),
    )


@functools.cache
def _places() -> list[tuple[dict[str, Any], str]]:
    """Where the functions of the forms and the methods of their classes are, which tests replace."""
    holders: list[Any] = list(_CODE)
    for module in _CODE:
        values = vars(module).values()
        holders += (v for v in values if isinstance(v, type) and v.__module__.startswith("grpo_ext."))
    return [(holder, name) for holder in map(vars, holders) for name in holder if inspect.isroutine(holder[name])]


def _functions() -> Iterator[Hashable]:
    return (holder.get(name) for holder, name in _places())


def _has_own_forward(module: torch.nn.Module) -> bool:
    """Whether a user has hooked or replaced the forward of the module's class, beside this package and TRL."""
    forward = vars(module).get("forward", type(module).forward)
    while (inner := _below(forward)) is not None:
        forward = inner
    own = getattr(forward, "__func__", forward) is not type(module).forward
    return bool(own or module._forward_hooks or module._forward_pre_hooks)


def _below(forward: Any) -> Any:
    """The forward that one of this package or of TRL calls, None for another."""
    function = getattr(forward, "__func__", forward)
    if not inspect.isfunction(function):
        return None
    name = "below" if hasattr(function, "of_grpo_ext") else "original_forward" if function.__code__ in _FUSED else ""
    return inspect.getclosurevars(function).nonlocals.get(name)


def _digest(tensor: torch.Tensor) -> bytes:
    return hashlib.blake2b(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).digest()
