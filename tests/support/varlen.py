"""torch's flash attention for sequences of several lengths, in plain arithmetic: same arguments, same omissions.

Stands in for `aten::_flash_attention_forward` and its backward where there is no CUDA. Strict where the kernels are
silently wrong: a log-sum-exp that is not contiguous, sequences without keys, one query with grouped heads.
Shapes: n rows, H heads of queries (a multiple of those of keys), D head dimension.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from grpo_ext.batching.packing import PackedGroup, PackLayout
from grpo_ext.forward import attention, shared_prefix

DIM, SCALE = 8, 0.3
PACKS: dict[str, list[tuple[int, list[int]]]] = {  # for each group its prompt and its completions, in tokens
    "ragged": [(7, [4, 1, 9]), (12, [6, 2]), (3, [11, 3, 5, 8])],
    "empty completions": [(6, [5, 0, 3]), (4, [0, 0]), (5, [0, 2])],
    "groups of one": [(9, [7]), (1, [1]), (2, [4])],
    "one group": [(20, [30, 2, 17])],
    "prompts alone": [(5, []), (8, [0])],
    "one token each": [(1, [1, 1]), (1, [1])],
    "filled up": [(4, [3, 2]), (7, [])],
}
HEADS = [(4, 4), (4, 2), (4, 1)]


def _sequences(
    query: torch.Tensor, key: torch.Tensor, cum_q: torch.Tensor, cum_k: torch.Tensor, max_q: int, max_k: int
) -> Iterator[tuple[slice, slice]]:
    heads, key_heads = query.size(1), key.size(1)
    assert heads % key_heads == 0
    assert max_q > 1 or heads == key_heads
    for cum, whole, longest in ((cum_q, query, max_q), (cum_k, key, max_k)):
        assert cum.dtype == torch.int32
        assert cum.is_contiguous()
        assert cum[0] == 0
        assert cum[-1] == whole.size(0)
        assert whole.stride(-1) == 1
        assert 0 < int(cum.diff().min()) <= int(cum.diff().max()) <= longest
    assert len(cum_q) == len(cum_k)
    for q, k in zip(itertools.pairwise(cum_q), itertools.pairwise(cum_k)):
        yield slice(*map(int, q)), slice(*map(int, k))


def _scores(
    query: torch.Tensor,
    key: torch.Tensor,
    causal: bool,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> torch.Tensor:
    """(H, queries, keys) of one sequence; the last query is at the last key, and sees so many keys on each side."""
    key = key.repeat_interleave(query.size(1) // key.size(1), dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * (query.size(-1) ** -0.5 if scale is None else scale)
    seen, shift = torch.ones(scores.shape[1:], dtype=torch.bool), key.size(0) - query.size(0)
    if causal or window_size_right is not None:
        seen = seen.tril(shift + (0 if causal else window_size_right))
    if window_size_left is not None:
        seen = seen.triu(shift - window_size_left)
    return scores.masked_fill(~seen, -torch.inf)


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_q: torch.Tensor,
    cum_k: torch.Tensor,
    max_q: int,
    max_k: int,
    dropout: float,
    causal: bool,
    return_debug_mask: bool,
    **options: Any,
) -> tuple[torch.Tensor, ...]:
    assert not dropout
    assert not return_debug_mask
    kind = torch.float64 if query.dtype == torch.float64 else torch.float32
    out, lse = torch.empty_like(query), torch.empty(query.size(1), query.size(0), dtype=kind)
    query, key, value = (x.double() for x in (query, key, value))
    for q, k in _sequences(query, key, cum_q, cum_k, max_q, max_k):
        scores = _scores(query[q], key[k], causal, **options)
        lse[:, q] = scores.logsumexp(-1)
        values = value[k].repeat_interleave(query.size(1) // key.size(1), dim=1)
        out[q] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    return out, lse, query.new_empty(2), query.new_empty(0), query.new_empty(0)


def backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cum_q: torch.Tensor,
    cum_k: torch.Tensor,
    max_q: int,
    max_k: int,
    dropout: float,
    causal: bool,
    rng_state: torch.Tensor,
    unused: torch.Tensor,
    **options: Any,
) -> tuple[torch.Tensor, ...]:
    assert not dropout
    assert lse.is_contiguous()
    factor = query.size(-1) ** -0.5 if options.get("scale") is None else options["scale"]
    assert grad.dtype == out.dtype == query.dtype
    grads = d_query, d_key, d_value = tuple(torch.empty_like(x) for x in (query, key, value))
    grad, query, key, value, out, lse = (x.double() for x in (grad, query, key, value, out, lse))
    for q, k in _sequences(query, key, cum_q, cum_k, max_q, max_k):
        repeats, heads = query.size(1) // key.size(1), key.size(1)
        keys, values = (x[k].repeat_interleave(repeats, dim=1) for x in (key, value))
        weights = torch.exp(_scores(query[q], key[k], causal, **options) - lse[:, q, None])
        toward = torch.einsum("qhd,khd->hqk", grad[q], values) - (grad[q] * out[q]).sum(-1).T[:, :, None]
        toward = weights * toward * factor
        d_query[q] = torch.einsum("hqk,khd->qhd", toward, keys)
        for whole, piece in (
            (d_key, torch.einsum("hqk,qhd->khd", toward, query[q])),
            (d_value, torch.einsum("hqk,qhd->khd", weights, grad[q])),
        ):
            whole[k] = piece.unflatten(1, (heads, repeats)).sum(2)
    return grads


def layout_of(groups: list[tuple[int, list[int]]]) -> PackLayout:
    at, packed = 0, []
    for prompt, completions in groups:
        ends = [at + prompt + sum(completions[: i + 1]) for i in range(len(completions))]
        ranges = tuple((end - n, end) for n, end in zip(completions, ends))
        packed.append(PackedGroup((at, at + prompt), ranges))
        at += prompt + sum(completions)
    return PackLayout(tuple(packed), at)


def states_of(layout: PackLayout, heads: tuple[int, int], dim: int = DIM, **options: Any) -> list[torch.Tensor]:
    """Query, key, value (1, H, N, D), as a model's linear layers give them."""
    torch.manual_seed(0)
    rows = [torch.randn(1, layout.tokens, h, dim, dtype=torch.float64) for h in (heads[0], heads[1], heads[1])]
    return [x.to(**options).transpose(1, 2).requires_grad_() for x in rows]


def dense(
    layout: PackLayout, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None = None
) -> torch.Tensor:
    """Every (query, key) pair of a group, masked."""
    mask = torch.zeros(layout.tokens, layout.tokens, dtype=torch.bool, device=query.device)
    for group in layout.groups:
        whole = slice(group.prompt[0], max(group.answers[1], group.prompt[1]))
        mask[whole, whole] = attention.visible_mask(group, window, query.device)
    key, value = (x.repeat_interleave(query.size(1) // key.size(1), dim=1) for x in (key, value))
    return ((query @ key.mT * SCALE).masked_fill(~mask, -torch.inf)).softmax(-1) @ value


def outcome(out: torch.Tensor, states: list[torch.Tensor]) -> list[torch.Tensor]:
    """The output, and the gradients of query, key and value for some loss."""
    weights = torch.sin(torch.arange(out.numel(), device=out.device)).view_as(out).to(out.dtype)
    return [out.detach(), *torch.autograd.grad((weights * out).sum(), states)]


def count_calls(monkeypatch: Any, forward: Any, backward: Any) -> list[str]:
    """The attention of packs calls these operators; the names of those called from now on."""
    made: list[str] = []
    for name, operator in (("_varlen", forward), ("_varlen_backward", backward)):

        def counted(*args: Any, name: str = name, operator: Any = operator, **options: Any) -> Any:
            made.append(name)
            return operator(*args, **options)

        monkeypatch.setattr(shared_prefix, name, counted)
    return made
