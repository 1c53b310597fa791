"""What operators allocate, measured without a profiler."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def _memory(values: Any) -> dict[int, int]:
    """Bytes of the memory of tensors, by address."""
    storages = [value.untyped_storage() for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


class LargestAllocation(TorchDispatchMode):
    """Records the bytes of the largest tensor that an operator allocated."""

    bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = _memory((args, kwargs))
        result = function(*args, **(kwargs or {}))
        self.bytes = max([self.bytes, *(size for address, size in _memory(result).items() if address not in before)])
        return result
