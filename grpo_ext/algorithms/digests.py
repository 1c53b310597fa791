"""Short digests that are the same on every machine: of token ids, and of weights.

The digest of weights is a sum over elements of their bits times a factor of their place, modulo 2^32 within a block and
2^64 over blocks: it changes with a bit, and where two elements change places. Projections of the weights on random
signs stand beside it: for two sets of weights the mean square of their differences estimates the squared distance.
"""

import functools
import hashlib
import math
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch

from .keyed_random import GOLDEN, mix, signed

PROJECTIONS = 2  # of each group of layers
_BLOCK = 1 << 16  # elements that share the table of factors and signs
_ROW = 1 << 10  # elements of a block whose projection is a sum in their own precision, or in float32
_CHUNKS = {"cpu": 2}  # blocks at a time: on a CPU they stay in its cache
_CHUNK = 64
_MODULUS = 1 << 64
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MOST_GROUPS = 16


def digest(*parts: torch.Tensor | str) -> str:
    """8 bytes in hex of texts, and of tensors of integers, whatever their size."""
    hasher = hashlib.blake2b(digest_size=8)
    for part in parts:
        content = part.encode() if isinstance(part, str) else part.long().cpu().numpy().astype("<i8").tobytes()
        hasher.update(len(content).to_bytes(8, "little") + content)
    return hasher.hexdigest()


@dataclass
class WeightDigest:
    """The digest and the projections of some weights."""

    total: torch.Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64))  # modulo 2^64
    # (P,) on the device of the weights
    projections: torch.Tensor = field(default_factory=lambda: torch.zeros(PROJECTIONS, dtype=torch.float64))

    def add(self, name: str, values: torch.Tensor) -> None:
        """Add a parameter (of any shape and device) by its name."""
        flat = values.detach().reshape(-1)
        if flat.device.type == "mps":  # which has no float64
            flat = flat.cpu()
        key, size = int(digest(name), 16), _CHUNKS.get(flat.device.type, _CHUNK) * _BLOCK
        factors_B, signs_RP, signs_KP = _table(flat.device)
        sums, projected = [], []
        for start in range(0, flat.numel(), size):
            part = flat[start : start + size]
            # zeros add nothing, so a block that is alone has no more rows than it needs
            block = min(-(-part.numel() // _ROW) * _ROW, _BLOCK)
            part_NB = torch.nn.functional.pad(part, (0, -part.numel() % block)).view(-1, block)
            sums.append(_sums(part_NB, factors_B[:block]))
            projected.append(_projected(part_NB, signs_RP, signs_KP[: block // _ROW]))
        if not sums:
            return
        count = -(-flat.numel() // _BLOCK)
        factors, flips = _of_blocks(key, count, flat.device)
        self.total = self.total.to(flat.device) + (torch.cat(sums) * factors).sum()
        self.projections = self.projections.to(flat.device) + (torch.cat(projected) * flips).sum(0)

    def as_list(self) -> list[Any]:
        """The digest in hex and the projections; NaN where weights are not finite."""
        return [f"{int(self.total) % _MODULUS:016x}", self.projections.tolist()]


def _sums(part_NB: torch.Tensor, factors_B: torch.Tensor) -> torch.Tensor:
    """The sums (N,) of the bits of blocks times the factors, modulo 2^32."""
    bits_NB = part_NB.view(_INTEGERS[part_NB.element_size()])
    if bits_NB.element_size() > 2:  # the highest bits alone would be lost in a product
        bits_NB = bits_NB ^ (bits_NB >> 4 * bits_NB.element_size())
    bits_NB = bits_NB.int()
    # the product of integer matrices is for CPUs only, and faster there
    on_cpu = bits_NB.device.type == "cpu"
    return (torch.mv(bits_NB, factors_B) if on_cpu else (bits_NB * factors_B).sum(1, dtype=torch.int32)).long()


def _projected(part_NB: torch.Tensor, signs_RP: torch.Tensor, signs_KP: torch.Tensor) -> torch.Tensor:
    """The projections (N, P) of blocks; a sign is that of the place in a row times that of the row."""
    values = part_NB.to(torch.promote_types(part_NB.dtype, torch.float32)).view(-1, _ROW)
    columns = [torch.mv(values, signs.to(values)) for signs in signs_RP.unbind(1)]  # faster than one product
    rows_NKP = torch.stack(columns, 1).double().view(len(part_NB), -1, PROJECTIONS)
    return (rows_NKP * signs_KP).sum(1)


def _mixed(key: int, count: int) -> torch.Tensor:
    """64 well mixed bits for each of `count` numbers after a key."""
    return mix((signed(key) + torch.arange(count)) * signed(GOLDEN), 0)


@functools.cache  # 24 bytes for each 65,536 elements of a parameter
def _of_blocks(key: int, count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors (N,) and signs (N, P) of the blocks of a parameter, which the host sends to a device once."""
    return _factors(key, count).to(device), _signs(key, count).double().to(device)


def _factors(key: int, count: int) -> torch.Tensor:
    """An odd factor for each of `count` numbers after a key."""
    return _mixed(key, count) | 1


def _signs(key: int, count: int) -> torch.Tensor:
    """1 or -1 for each of `count` numbers after a key and each projection, (count, P)."""
    return 1 - 2 * (_mixed(key, count)[:, None] >> (8 + torch.arange(PROJECTIONS)) & 1)


@functools.lru_cache(maxsize=4)
def _table(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Factors (B,) of the elements of a block, signs (R, P) of those of a row, and (K, P) of its rows."""
    factors_B = _factors(0, _BLOCK).int()  # the lower bits
    # float32 as most weights are, which then need no conversion
    of_row, of_rows = _signs(0, _ROW).float(), _signs(1 << 32, _BLOCK // _ROW).double()
    return factors_B.to(device), of_row.to(device), of_rows.to(device)


def layer_of(name: str) -> str:
    """The layer of a parameter: its name up to the first number, or without the last part."""
    match = re.match(r".*?\.\d+(?=\.)", name)
    return match[0] if match else name.rpartition(".")[0] or name


def layer_groups(names: Collection[str]) -> dict[str, str]:
    """The group of each parameter: neighbouring layers together, so that there are at most 16 groups."""
    layers = list(dict.fromkeys(map(layer_of, names)))
    size = max(math.ceil(len(layers) / _MOST_GROUPS), 1)
    parts = [layers[start : start + size] for start in range(0, len(layers), size)]
    groups = {layer: " to ".join(dict.fromkeys((part[0], part[-1]))) for part in parts for layer in part}
    return {name: groups[layer_of(name)] for name in names}
