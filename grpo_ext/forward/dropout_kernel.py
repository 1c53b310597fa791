"""Keyed dropout as one Triton kernel, with the bits of `dropout`: the hash and the product in one pass.

Imported where Triton is; TRITON_INTERPRET=1 runs it on a CPU. Shapes: N tokens, C channels.
"""

import torch
import triton
import triton.language as tl

from ..algorithms.keyed_random import GOLDEN, MIX1, MIX2, signed
from .dropout import CHANNEL, FIRST, SECOND, scale, threshold

_BLOCK = 1024
_GOLDEN, _MIX1, _MIX2 = tl.constexpr(GOLDEN), tl.constexpr(MIX1), tl.constexpr(MIX2)
_CHANNEL, _FIRST, _SECOND = tl.constexpr(CHANNEL % 2**32), tl.constexpr(FIRST), tl.constexpr(SECOND % 2**32)


@triton.jit(do_not_specialize=["module", "below"])
def _mask(values, keys, output, module, below, channels, factor, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    key = (tl.load(keys + row) ^ module).to(tl.uint64, bitcast=True) + _GOLDEN
    key = (key ^ (key >> 30)) * _MIX1
    key = (key ^ (key >> 27)) * _MIX2
    key = key ^ (key >> 31)
    mixed = (key & 0xFFFFFFFF).to(tl.uint32) ^ (channel.to(tl.uint32) * _CHANNEL)
    mixed = (mixed ^ (mixed >> 16)) * _FIRST
    mixed = mixed ^ (key >> 32).to(tl.uint32)
    mixed = (mixed ^ (mixed >> 15)) * _SECOND
    places, inside = row * channels + channel, channel < channels
    number = tl.load(values + places, mask=inside, other=0.0)
    kept = mixed.to(tl.int32, bitcast=True) >= below
    product = (number.to(tl.float32) * factor).to(number.dtype)
    tl.store(output + places, tl.where(kept, product, 0.0), mask=inside)


def masked(values: torch.Tensor, keys_N: torch.Tensor, module: int, rate: float) -> torch.Tensor:
    """Dropout of values (..., C) of N tokens; `module`: the key of the module and its call."""
    values = values.contiguous()
    output, channels = torch.empty_like(values), values.size(-1)
    grid = (len(keys_N), triton.cdiv(channels, _BLOCK))
    _mask[grid](values, keys_N, output, signed(module), threshold(rate), channels, scale(rate), BLOCK=_BLOCK)
    return output
