"""Selective recomputation: gradient checkpointing that keeps matrix products and attention, and runs the rest again.

Differs from transformers' gradient checkpointing, which keeps a layer's input alone and runs all of the layer again
(Korthikanti et al., arXiv 2205.05198, section 5). Handed to it as an argument; works on every model that it works on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ..errors import ConfigError

_aten = torch.ops.aten
# the grouped products of experts are not among them: transformers adds biases to them in place
_NAMES = (
    *("mm", "addmm", "bmm", "baddbmm", "linear"),
    *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention", "_flash_attention_forward"),
    *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
)
PRODUCTS = {getattr(_aten, name).default for name in _NAMES if hasattr(_aten, name)}


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


class KeepProducts(str):
    """The `context_fn` of torch's checkpoint, in `gradient_checkpointing_kwargs`; text, because trackers log those."""

    __slots__ = ()

    def __call__(self) -> Any:
        return create_selective_checkpoint_contexts(_policy)


KEEP_PRODUCTS = KeepProducts("keep matrix products and attention")


def check_recompute(settings: Mapping[str, Any], zero3: bool = False) -> None:
    """Refuse a `recompute_granularity` that cannot be had; `settings` by the names of GRPOConfig, some may be missing.

    Raises:
        ConfigError: another granularity, one that other settings contradict, or that does not work under ZeRO-3.
    """
    granularity = settings.get("recompute_granularity", "full")
    if granularity not in ("full", "selective"):
        raise ConfigError(f"recompute_granularity={granularity!r} is unknown; use one of 'full', 'selective'.")
    if granularity == "full":
        return
    if zero3:
        raise ConfigError(
            "recompute_granularity='selective' under ZeRO-3, which gathers weights inside the layers that run again: "
            "torch takes that for a part of the layer. Use 'full', ZeRO-2 or FSDP2."
        )
    given = settings.get("gradient_checkpointing_kwargs") or {}
    given = json.loads(given) if isinstance(given, str) else given  # as the command line has it
    for name, clashes in (
        ("gradient_checkpointing=False", not settings.get("gradient_checkpointing", True)),
        ("use_reentrant=True", bool(given.get("use_reentrant"))),
        ("a context_fn of your own", "context_fn" in given),
    ):
        if clashes:
            raise ConfigError(
                "recompute_granularity='selective' says what gradient checkpointing (not the reentrant kind) keeps, "
                f"and there is {name}; change one of the two."
            )
