"""Short digests that are the same on every machine: of token ids, and of weights in any number of parts.

The digest of weights is a sum over elements, modulo 2^64, so parts that several processes hold add up to the whole. A
change of one bit, or of two elements that change places, changes it. Beside it stand projections of the weights on
random signs: for two sets of weights the mean square of their differences estimates the squared distance.
"""

from __future__ import annotations

import functools
import hashlib
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

PROJECTIONS = 8
_BLOCK = 1 << 16  # elements that share the table of factors and signs
_CHUNK = 64  # blocks at a time, so that temporary tensors stay small
_MODULUS = 1 << 64
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MOST_GROUPS = 16


def digest(*parts: Any) -> str:
    """8 bytes in hex of tensors (as 64-bit integers; floats by their bits), texts and bytes."""
    found = hashlib.blake2b(digest_size=8)
    for part in parts:
        if isinstance(part, torch.Tensor):
            part = part.double() if part.is_floating_point() else part.long()
            part = part.cpu().contiguous().numpy().astype(part.numpy().dtype.newbyteorder("<")).tobytes()
        elif isinstance(part, str):
            part = part.encode()
        found.update(len(part).to_bytes(8, "little") + part)
    return found.hexdigest()


@dataclass
class WeightDigest:
    """The digest and the projections of some weights; digests of parts of one whole are added."""

    total: int = 0  # modulo 2^64
    projections: list[float] = field(default_factory=lambda: [0.0] * PROJECTIONS)

    def add(self, name: str, values: torch.Tensor) -> None:
        """Add a parameter (of any shape and device) by its name."""
        flat = values.detach().reshape(-1)
        if flat.device.type == "mps":  # which has no float64
            flat = flat.cpu()
        key = int(digest(name), 16)
        for start in range(0, flat.numel(), _CHUNK * _BLOCK):
            part = flat[start : start + _CHUNK * _BLOCK]
            part = torch.nn.functional.pad(part, (0, -part.numel() % _BLOCK)).view(-1, _BLOCK)
            first = start // _BLOCK
            total, projections = _of_blocks(part, [_mix(key + number) for number in range(first, first + len(part))])
            self.total = (self.total + total) % _MODULUS
            self.projections = [old + new for old, new in zip(self.projections, projections, strict=True)]

    def as_list(self) -> list[Any]:
        return [f"{self.total:016x}", self.projections]


def _of_blocks(part_NB: torch.Tensor, keys: Sequence[int]) -> tuple[int, list[float]]:
    factors_B, signs_BP = _table(part_NB.device)
    bits = part_NB.view(_INTEGERS[part_NB.element_size()]).long()
    factors_N = torch.tensor([_signed(key | 1) for key in keys], device=part_NB.device)
    total = int(((bits * factors_B).sum(1) * factors_N).sum())
    flips_NP = torch.tensor([[1 - 2 * (key >> (8 + p) & 1) for p in range(PROJECTIONS)] for key in keys])
    values = torch.where(torch.isfinite(part_NB), part_NB, 0).double() @ signs_BP
    return total, (values * flips_NP.to(values)).sum(0).tolist()


@functools.lru_cache(maxsize=4)
def _table(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Odd factors (B,) and signs (B, P) of the elements of a block."""
    keys = [_mix(number) for number in range(_BLOCK)]
    factors = torch.tensor([_signed(key | 1) for key in keys])
    signs = torch.tensor([[1.0 - 2.0 * (key >> (8 + p) & 1) for p in range(PROJECTIONS)] for key in keys])
    return factors.to(device), signs.double().to(device)


def _mix(value: int) -> int:
    """64 well mixed bits of a number (splitmix64, Steele et al. 2014)."""
    value = (value * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) % _MODULUS
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % _MODULUS
    value = (value ^ value >> 27) * 0x94D049BB133111EB % _MODULUS
    return value ^ value >> 31


def _signed(value: int) -> int:
    return value - _MODULUS if value >= _MODULUS // 2 else value


def layer_groups(names: Iterable[str]) -> dict[str, str]:
    """The group of each parameter: neighbouring layers together, so that there are at most 16, in the model's order."""
    places: dict[str, tuple[str, int | None]] = {}
    for name in names:
        found = re.search(r"^(.*?)\.(\d+)\.", name)
        places[name] = (found[1], int(found[2])) if found else (name.rpartition(".")[0] or name, None)
    stacks: dict[str, int] = {}
    for stack, layer in places.values():
        if layer is not None:
            stacks[stack] = max(stacks.get(stack, 0), layer + 1)
    others = len({stack for stack, layer in places.values() if layer is None})
    together = math.ceil(sum(stacks.values()) / max(_MOST_GROUPS - others - len(stacks), 1))

    def group(stack: str, layer: int | None) -> str:
        if layer is None:
            return stack
        first = layer - layer % together
        last = min(first + together, stacks[stack]) - 1
        return f"{stack}.{first}" if first == last else f"{stack}.{first}-{last}"

    return {name: group(*place) for name, place in places.items()}


def distance(one: Sequence[float], other: Sequence[float]) -> float:
    """An estimate of the distance of two sets of weights from their projections."""
    return math.sqrt(sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) / len(one))
