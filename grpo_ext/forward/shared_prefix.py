"""Flash attention of packs in parts: segments against themselves, completions against the prompt that they share.

Called by forward.attention: on the CPU for each group, with torch's flash kernel; on CUDA for a whole pack, with the
kernel for sequences of several lengths. Shapes: B batch, H heads, N tokens of the pack or group, n tokens of a part, D
head dimension.
"""

from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch.backends.cuda import SDPAParams, can_use_flash_attention

from ..batching.packing import PackedGroup, PackLayout, Range

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
# on CUDA: the operators below `torch.nn.attention.varlen`, whose own arguments change from version to version. Rows (n,
# H, D), log-sum-exp (H, n); key and value may have fewer heads
_varlen = torch.ops.aten._flash_attention_forward.default
_varlen_backward = torch.ops.aten._flash_attention_backward.default

_Sequences = list[tuple[Range, list[Range]]]  # the queries and the keys of each


class Part(NamedTuple):
    queries: slice | torch.Tensor
    keys: slice | torch.Tensor
    causal: bool  # a segment attends to itself; otherwise completions attend to their prompt
    # for several sequences: their bounds among the queries and among the keys (int32), and the longest of each
    bounds: tuple[torch.Tensor, torch.Tensor, int, int] | None = None
    window: int | None = None  # a query sees keys less than this many positions back


def parts_of(group: PackedGroup) -> list[Part]:
    """One call for each segment of a group, and one for all its completions; indices count from the group's start."""
    pairs = [*((tokens, tokens) for tokens in (group.prompt, *group.completions)), (group.answers, group.prompt)]
    pairs, first = [pair for pair in pairs if pair[0][1] > pair[0][0]], group.prompt[0]
    places = [(slice(q[0] - first, q[1] - first), slice(k[0] - first, k[1] - first)) for q, k in pairs]
    return [Part(queries, keys, causal=queries == keys) for queries, keys in places]


def joint_parts(layout: PackLayout, window: int | None) -> list[Part]:
    """Without a window: all segments, then the completions of all prompts. With one: all segments.

    A completion's keys are then the end of its prompt that the window reaches, and its own. Tensors on the CPU.
    """

    def part(sequences: _Sequences, causal: bool) -> Part:
        queries, keys = [[query] for query, _ in sequences], [key for _, key in sequences]
        bounds, longest, places = [], [], []
        for side in (queries, keys):
            lengths = [sum(stop - start for start, stop in ranges) for ranges in side]
            bounds.append(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32))
            longest.append(max(2, *lengths))  # with 1 and grouped heads the kernel reads 1 query of each sequence
            places.append(_place([tokens for ranges in side for tokens in ranges]))
        return Part(places[0], places[1], causal, (bounds[0], bounds[1], longest[0], longest[1]), window)

    segments: _Sequences = []
    answers: _Sequences = []
    for group in layout.groups:
        start, stop = group.prompt
        tail = [] if window is None else [(max(start, stop - window + 1), stop)]
        segments += [(group.prompt, [group.prompt])] if stop > start else []
        segments += [(tokens, [*tail, tokens]) for tokens in group.completions if tokens[1] > tokens[0]]
        answers += [(group.answers, [group.prompt])] if group.answers[1] > group.answers[0] else []
    parts = [part(segments, causal=True)]
    return [*parts, part(answers, causal=False)] if answers and window is None else parts


def _place(ranges: list[Range]) -> slice | torch.Tensor:
    """A slice if each range begins where the previous one ends."""
    if all(before[1] == after[0] for before, after in pairwise(ranges)):
        return slice(ranges[0][0], ranges[-1][1])
    return torch.cat([torch.arange(*tokens) for tokens in ranges])


def takes_varlen(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether the flash kernel for sequences of several lengths supports these states: half precision on CUDA."""
    if query.device.type != "cuda" or torch.version.hip or query.size(-1) % 8:  # AMD's log-sum-exp differs
        return False
    grouped = query.size(1) != key.size(1)
    return can_use_flash_attention(SDPAParams(query, key, value, None, 0.0, True, grouped))


def _options(part: Part, scale: float | None) -> tuple[bool, dict[str, Any]]:
    """Whether the kernel masks causally, and its keyword arguments, as in `varlen_attn`."""
    if part.window is None:
        return part.causal, {"scale": scale}
    return False, {"scale": scale, "window_size_left": part.window - 1, "window_size_right": 0}


def _attend(part: Part, states: tuple[torch.Tensor, ...], scale: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (B, H, n, D) and log-sum-exp (B, H, n)."""
    if part.bounds is None:
        return _flash(*states, 0.0, part.causal, scale=scale)
    causal, options = _options(part, scale)
    out, lse = _varlen(*(x[0].transpose(0, 1) for x in states), *part.bounds, 0.0, causal, False, **options)[:2]
    return out.transpose(0, 1)[None], lse[None]


def _attend_backward(part: Part, states: tuple[torch.Tensor, ...], scale: float | None) -> tuple[torch.Tensor, ...]:
    """Gradients of query, key, value from the output's gradient, these three, output, log-sum-exp."""
    if part.bounds is None:
        return _flash_backward(*states, 0.0, part.causal, scale=scale)
    causal, options = _options(part, scale)
    *rows, lse = states
    rows = [x[0].transpose(0, 1) for x in rows]
    unused = lse.new_empty(0)  # the random state of dropout
    # the kernel assumes a contiguous log-sum-exp, and does not check
    grads = _varlen_backward(*rows, lse[0].contiguous(), *part.bounds, 0.0, causal, unused, unused, **options)
    return tuple(x.transpose(0, 1)[None] for x in grads)


class SharedPrefixAttention(torch.autograd.Function):
    """Flash attention of a whole pack, in parts joined by their log-sum-exp.

    A completion attends to its prompt and to itself; two softmaxes over disjoint keys join exactly (Dao et al., arXiv
    2205.14135, section 3.1). Given the joint output and log-sum-exp, the kernel's backward computes each part's
    gradients. Autograd would not: the kernels' backward ignores the gradient of the log-sum-exp.
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, parts: list[Part], scale: float | None
    ) -> torch.Tensor:
        batch, heads, tokens, dim = query.shape
        out = query.new_empty(tokens, batch, heads, dim).permute(1, 2, 0, 3)
        # the kernel's log-sum-exp is float32 for half precision
        kind = torch.float64 if query.dtype == torch.float64 else torch.float32
        lse = torch.empty(tokens, batch, heads, dtype=kind, device=query.device).permute(1, 2, 0)
        for part in parts:  # a token's own segment comes before its prompt
            rows = part.queries
            states = query[:, :, rows], key[:, :, part.keys], value[:, :, part.keys]
            result, result_lse = _attend(part, states, scale)
            result_lse = result_lse.permute(2, 0, 1).contiguous().permute(1, 2, 0)
            if not part.causal:
                joint = torch.logaddexp(lse[:, :, rows], result_lse)
                share = torch.exp(result_lse - joint).unsqueeze(-1)
                result, result_lse = torch.lerp(out[:, :, rows].to(kind), result.to(kind), share).to(out.dtype), joint
            out[:, :, rows], lse[:, :, rows] = result, result_lse
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.parts, ctx.scale = parts, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        grads = tuple(torch.zeros_like(x) for x in (query, key, value))
        for part in ctx.parts:
            rows, keys = part.queries, part.keys
            states = grad[:, :, rows], query[:, :, rows], key[:, :, keys], value[:, :, keys], out[:, :, rows]
            pieces = _attend_backward(part, (*states, lse[:, :, rows]), ctx.scale)
            for whole, place, piece in zip(grads, (rows, keys, keys), pieces, strict=True):
                if isinstance(place, slice):
                    whole[:, :, place].add_(piece)
                else:  # in float32: under a window many completions add to the last tokens of their prompt
                    whole.copy_(whole.to(lse.dtype).index_add_(2, place, piece.to(lse.dtype)))
        return (*grads, None, None)
