"""Keyed dropout as one Triton kernel, with the bits of `dropout`: the hash and the product in one pass.

Imported where Triton is; TRITON_INTERPRET=1 runs it on a CPU. Shapes: N tokens, C channels.
"""

from contextlib import nullcontext

import torch
import triton
import triton.language as tl

from ..algorithms.keyed_random import CHANNEL, FIRST, SECOND

_BLOCK = 1024
_CHANNEL, _FIRST, _SECOND = tl.constexpr(CHANNEL % 2**32), tl.constexpr(FIRST), tl.constexpr(SECOND % 2**32)


@triton.jit(do_not_specialize=["module", "below"])
def _mask(values, keys, output, module, below, channels, scale, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    key = (tl.load(keys + row) ^ module).to(tl.uint64, bitcast=True)
    mixed = (key & 0xFFFFFFFF).to(tl.uint32) ^ (channel.to(tl.uint32) * _CHANNEL)
    mixed = ((mixed ^ (mixed >> 16)) * _FIRST) ^ (key >> 32).to(tl.uint32)
    mixed = (mixed ^ (mixed >> 15)) * _SECOND
    places, inside = row * channels + channel, channel < channels
    number = tl.load(values + places, mask=inside, other=0.0)
    stays = mixed.to(tl.int32, bitcast=True) >= below
    product = (number.to(tl.float32) * scale).to(number.dtype)
    tl.store(output + places, tl.where(stays, product, 0.0), mask=inside)


def masked(values: torch.Tensor, keys_N: torch.Tensor, module: int, below: int, scale: float) -> torch.Tensor:
    """Values (..., C) of N tokens with dropout, by the key of a module and its call."""
    values = values.contiguous()
    output, channels = torch.empty_like(values), values.size(-1)
    grid = (len(keys_N), triton.cdiv(channels, _BLOCK))
    with torch.cuda.device(values.device) if values.is_cuda else nullcontext():
        _mask[grid](values, keys_N, output, module, below, channels, scale, BLOCK=_BLOCK)
    return output
