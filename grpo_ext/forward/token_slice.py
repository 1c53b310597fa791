"""One pack over several processes: each holds a slice of its tokens; in attention each holds all tokens of some heads.

Differs from TRL, which refuses context and sequence parallelism in GRPO. After Ulysses (Jacobs et al., arXiv
2309.14509), around the attention of packs, which sees whole sequences as before. Shapes: H heads, h of them a member's,
N tokens of the pack, n of a slice, D head dimension, S completion tokens.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ..batching.micro_batches import Form
from ..errors import ModelError
from ..runtime.sequence_group import SequenceGroup
from .architecture import attention_layers, shared_key_heads

States = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # query, key and value


class TokenSlice(NamedTuple):
    """The tokens of a pack that this member holds, and the completion tokens whose log-probabilities it computes."""

    group: SequenceGroup
    tokens: slice  # of the pack
    # of all S completion tokens: a log-probability belongs to the member that holds the position before its token
    targets: torch.Tensor
    completion_tokens: int  # S
    last_position: int  # the largest of the pack

    @classmethod
    def of(cls, group: SequenceGroup, predictor_S: torch.Tensor, positions_N: torch.Tensor) -> "TokenSlice":
        length = len(positions_N) // group.size
        first = group.member * length
        targets = (predictor_S // length == group.member).nonzero().squeeze(1)
        return cls(group, slice(first, first + length), targets, len(predictor_S), int(positions_N.max()))

    def gathered(self, values: torch.Tensor) -> torch.Tensor:
        """Values of the completion tokens that this member holds -> of all, (S, ...); one exchange."""
        zeros = values.new_zeros(self.completion_tokens, *values.shape[1:])
        return self.group.total(zeros.index_copy(0, self.targets, values))


def to_heads(group: SequenceGroup, states: States, half: bool) -> States:
    """Query, key and value (1, H, n, D) -> (1, h, N, D), in one exchange; `half` as in `shared_key_heads`."""
    query, key, value = states
    repeats = shared_key_heads(query.size(1), key.size(1), group.size, half) // key.size(1)
    if repeats > 1:
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    parts = [x[0].unflatten(0, (group.size, -1)) for x in (query, key, value)]
    received = group.swap(torch.cat([part.flatten(1) for part in parts], dim=1))
    chunks = received.split([part[0].numel() for part in parts], dim=1)
    whole = [
        chunk.view(part.shape).transpose(0, 1).flatten(1, 2)[None].to(part.dtype)
        for chunk, part in zip(chunks, parts, strict=True)
    ]
    return whole[0], whole[1], whole[2]


def to_tokens(group: SequenceGroup, out: torch.Tensor) -> torch.Tensor:
    """The output of attention (1, N, h, D) -> (1, n, H, D)."""
    parts = out[0].unflatten(0, (group.size, -1))
    return group.swap(parts.flatten(1)).view(parts.shape).transpose(0, 1).flatten(1, 2)[None]


class LocalHeads:
    """An attention layer, as a kernel reads it that gets a member's heads."""

    def __init__(self, module: nn.Module, group: SequenceGroup, states: States) -> None:
        self._module, heads = module, states[0].size(1)
        self._heads = slice(group.member * heads, (group.member + 1) * heads)
        self.num_key_value_groups = heads // states[1].size(1)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return value[self._heads] if name == "sinks" and value is not None else value  # GPT-OSS: one for each head


def refuse_heads(config: Any, size: int, processes: int) -> None:
    """Raise a ModelError where the attention heads of a model cannot be shared by `size` processes."""
    heads = [number for number, *_ in attention_layers(config)]
    fit = [n for n in range(1, processes + 1) if math.gcd(*heads) % n == 0 and processes % n == 0]
    if size not in fit:
        raise ModelError(
            f"sequence_parallel_size={size}: {type(config).__name__} has {_listed(heads)} attention heads, which "
            f"{size} processes cannot share evenly; on {processes} processes use {_listed(fit)}."
        )


def refuse_other_forms(size: int, form: Form, in_words: str) -> None:
    """Raise a ModelError where a model cannot run packs, of which `size` processes could share the tokens."""
    if size > 1 and form != "packed":
        raise ModelError(
            f"sequence_parallel_size={size} shares the tokens of packs, and this model runs as {in_words}. Use a model "
            "that runs packs, or sequence_parallel_size=1."
        )


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, sorted(set(numbers))))
