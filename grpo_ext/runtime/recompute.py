"""Selective recomputation: gradient checkpointing that keeps the matrix products and runs the rest of a layer again.

Differs from transformers' gradient checkpointing, which keeps a layer's input alone and runs all of the layer again
(Korthikanti et al., arXiv 2205.05198, section 5). Handed to it as an argument; works on every model that it works on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

_aten = torch.ops.aten
# attention is not among them: packs compute it in parts, which take more memory than they save time; nor are the
# grouped products of experts, to which transformers adds biases in place
PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default, _aten.linear.default}


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


class KeepProducts(str):
    """The `context_fn` of torch's checkpoint, in `gradient_checkpointing_kwargs`; text, because trackers log those."""

    __slots__ = ()

    def __call__(self) -> Any:
        return create_selective_checkpoint_contexts(_policy)


KEEP_PRODUCTS = KeepProducts("keep matrix products")
