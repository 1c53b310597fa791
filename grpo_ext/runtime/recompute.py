"""Selective recomputation: gradient checkpointing that keeps matrix products and attention, and runs the rest again.

Differs from transformers' gradient checkpointing, which keeps a layer's input alone and runs all of the layer again
(Korthikanti et al., arXiv 2205.05198, section 5). Handed to it as an argument; works on every model that it works on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

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
