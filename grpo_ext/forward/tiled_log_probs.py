"""Log-probabilities and entropies of given tokens, from hidden states, without the logits of all positions.

Differs from TRL's kernel: plain torch on every device, float64 for float64, tiles that suit the device. The
language-model head (forward.lm_head) runs it inside a model's forward. Shapes: S positions, H hidden size, V
vocabulary, R x C one tile.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from .sampling_masks import SamplingMasks

# Rows and columns of a tile of logits. On the CPU 4 MiB in float32: above 32 MiB the C library maps and unmaps memory
# for every tile, and square tiles read the head and write its gradient least often. Accelerators run larger products
# faster (not measured). The columns do not depend on the number of rows: a row's sum rounds alike in every micro-batch
CPU_TILE, TILE = (1024, 1024), (1024, 32768)

_REMOVED = -1e30  # the logit of a removed token: its probability is 0, and unlike -inf, 0 times it is not NaN


@dataclass(frozen=True)
class LogitTransform:
    """`cap * tanh(scale * x / cap) / temperature` of the head's output x."""

    scale: float = 1.0
    cap: float | None = None  # None: no soft-capping
    temperature: float = 1.0
    vocabulary: int | None = None  # number of the head's rows that are tokens; None for all


def gathered(*parameters: Any) -> AbstractContextManager[Any]:
    """Inside, parameters that ZeRO-3 has partitioned are gathered."""
    if not is_deepspeed_zero3_enabled():
        return nullcontext()
    import deepspeed
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    # DeepSpeed itself partitions an embedding again that is gathered now (tied weights)
    known = [p for p in parameters if hasattr(p, "ds_status")]
    cut = [p for p in known if p.ds_status != ZeroParamStatus.AVAILABLE]
    return deepspeed.zero.GatheredParameters(cut) if cut else nullcontext()


class _Tiles:
    """Logits of one head, tile after tile in the same memory.

    Products are computed in the type of the hidden states, or autocast's; the rest in float32, or float64 for float64.
    """

    def __init__(
        self,
        hidden_SH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        transform: LogitTransform,
        dtype: torch.dtype,
        spare: int,
        masks: SamplingMasks | None = None,
    ) -> None:
        self.hidden_SH, self.weight_VH, self.bias_V, self.transform = hidden_SH.to(dtype), weight_VH, bias_V, transform
        self.masks = masks
        self.dtype, self.exact = dtype, torch.float64 if dtype == torch.float64 else torch.float32
        self.factor = transform.scale / transform.temperature
        self.vocabulary = min(weight_VH.size(0), transform.vocabulary or weight_VH.size(0))
        rows, columns = CPU_TILE if hidden_SH.device.type == "cpu" else TILE
        self.rows, self.columns = max(min(rows, hidden_SH.size(0)), 1), min(columns, self.vocabulary)
        size = self.rows * self.columns
        self._product = hidden_SH.new_empty(size, dtype=dtype)
        self._z = self._product if dtype == self.exact else hidden_SH.new_empty(size, dtype=self.exact)
        self._spare = [hidden_SH.new_empty(size, dtype=self.exact) for _ in range(spare)]

    def spare(self, which: int, like: torch.Tensor) -> torch.Tensor:
        return self._spare[which][: like.numel()].view_as(like)

    def __iter__(self) -> Iterator[tuple[slice, slice, torch.Tensor]]:
        """Yields rows, columns and the head's output (R, C), before soft-capping and scale."""
        for first in range(0, self.vocabulary, self.columns):
            columns = slice(first, min(first + self.columns, self.vocabulary))
            weight_CH = self.weight_VH[columns].to(self.dtype)
            bias_C = None if self.bias_V is None else self.bias_V[columns].to(self.dtype)
            self.weight_CH = weight_CH
            for start in range(0, self.hidden_SH.size(0), self.rows):
                rows = slice(start, min(start + self.rows, self.hidden_SH.size(0)))
                shape = (rows.stop - rows.start, columns.stop - columns.start)
                product = self._product[: shape[0] * shape[1]].view(shape)
                torch.mm(self.hidden_SH[rows], weight_CH.t(), out=product)
                if bias_C is not None:
                    product.add_(bias_C)
                if product.dtype != self.exact:
                    product = self._z[: shape[0] * shape[1]].view(shape).copy_(product)
                yield rows, columns, product

    def finish(
        self, x_RC: torch.Tensor, rows: slice, columns: slice, tanh_RC: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The logits over the temperature, in place; `tanh_RC` receives the capped ratio, for the backward pass."""
        cap = self.transform.cap
        if cap is not None:
            x_RC.mul_(self.transform.scale / cap).tanh_()
            if tanh_RC is not None:
                tanh_RC.copy_(x_RC)
            x_RC.mul_(cap / self.transform.temperature)
        elif self.factor != 1.0:
            x_RC.mul_(self.factor)
        return x_RC if self.masks is None else x_RC.masked_fill_(self.masks.removed(rows, columns), _REMOVED)


def _place(targets_S: torch.Tensor, rows: slice, columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether each row's target is among the columns, and its column there, or 0."""
    local = targets_S[rows] - columns.start
    inside = (local >= 0) & (local < columns.stop - columns.start)
    return inside, torch.where(inside, local, 0)


class TiledLogProbs(torch.autograd.Function):
    """Log-probabilities and entropies, (S,) in nats, float32, or float64 for float64 hidden states.

    The backward pass computes the tiles again; a gradient of second order is not supported.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_SH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_S: torch.Tensor,
        transform: LogitTransform,
        with_entropy: bool,
        masks: SamplingMasks | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ctx.set_materialize_grads(False)  # an entropy that is only logged costs nothing in the backward pass
        device = hidden_SH.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_SH.dtype
        tiles = _Tiles(hidden_SH, weight_VH, bias_V, transform, dtype, int(with_entropy), masks)
        top = hidden_SH.new_full((hidden_SH.size(0),), torch.finfo(tiles.exact).min, dtype=tiles.exact)
        total, weighted, chosen = (torch.zeros_like(top) for _ in range(3))
        for rows, columns, x_RC in tiles:
            z_RC = tiles.finish(x_RC, rows, columns)
            inside, local = _place(targets_S, rows, columns)
            chosen[rows] += torch.where(inside, z_RC.gather(1, local[:, None]).squeeze(1), 0)
            new = torch.maximum(top[rows], z_RC.amax(1))
            z_RC.sub_(new[:, None])
            lower = top[rows] - new
            rescale = lower.exp()
            if with_entropy:  # sums exp(z - top) * (z - top), which loses no digits where the logits are large
                e_RC = torch.exp(z_RC, out=tiles.spare(0, z_RC))
                here = z_RC.mul_(e_RC).nansum(1)  # counts 0 times -inf as 0; any other NaN is in `total` too
                weighted[rows] = (weighted[rows] + lower * total[rows]) * rescale + here
            else:
                e_RC = z_RC.exp_()
            total[rows] = total[rows] * rescale + e_RC.sum(1)
            top[rows] = new
        log_total = total.log()
        log_z, entropy = top + log_total, log_total - weighted / total if with_entropy else None
        ctx.save_for_backward(hidden_SH, weight_VH, bias_V, targets_S, log_z, entropy)
        ctx.dtype, ctx.transform, ctx.masks = dtype, transform, masks
        return chosen - top - log_total, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        saved = ctx.saved_tensors  # read only once: under checkpointing a second read fails
        with gathered(saved[1], saved[2]):
            grads = _backward(ctx, saved, *gradients)
        return *(None if g is None else g.to(x.dtype) for g, x in zip(grads, saved[:3], strict=True)), *[None] * 4


def _backward(
    ctx: Any, saved: tuple[Any, ...], up_S: torch.Tensor | None, entropy_up_S: torch.Tensor | None
) -> list[torch.Tensor | None]:
    """Gradients of hidden states, weight and bias, in float32 or float64; None where none is needed."""
    hidden_SH, weight_VH, bias_V, targets_S, log_z, entropy = saved
    capped = ctx.transform.cap is not None
    spare = (entropy_up_S is not None) + capped
    tiles = _Tiles(hidden_SH, weight_VH, bias_V, ctx.transform, ctx.dtype, spare, ctx.masks)
    exact = tiles.exact
    grads: list[torch.Tensor | None] = [
        torch.zeros_like(x, dtype=exact) if needed and x is not None else None
        for x, needed in zip((hidden_SH, weight_VH, bias_V), ctx.needs_input_grad[:3], strict=True)
    ]
    up = torch.zeros_like(log_z) if up_S is None else up_S.to(exact) * tiles.factor
    entropy_up, constant = None, up
    if entropy_up_S is not None and entropy is not None:
        entropy_up = entropy_up_S.to(exact) * tiles.factor
        constant = up + entropy_up * entropy
    left_SH = tiles.hidden_SH.to(exact)  # half precision is never summed in itself
    hidden, weight, bias = grads
    for rows, columns, x_RC in tiles:
        tanh_RC = tiles.spare(-1, x_RC) if capped else None
        z_RC = tiles.finish(x_RC, rows, columns, tanh_RC).sub_(log_z[rows, None])  # log p
        if entropy_up is None:
            z_RC.exp_().mul_(-constant[rows, None])
        else:  # -p * (up + entropy_up * (log p + entropy))
            p_RC = torch.exp(z_RC.clamp_(min=_REMOVED), out=tiles.spare(0, z_RC))
            torch.addcmul(-constant[rows, None], z_RC, -entropy_up[rows, None], out=z_RC).mul_(p_RC)
        inside, local = _place(targets_S, rows, columns)
        each = torch.arange(z_RC.size(0), device=z_RC.device)
        z_RC[each, local] += torch.where(inside, up[rows], 0)
        if tanh_RC is not None:
            z_RC.mul_(tanh_RC.square_().neg_().add_(1))
        if bias is not None:
            bias[columns] += z_RC.sum(0)
        if hidden is not None:
            hidden[rows].addmm_(z_RC, tiles.weight_CH.to(exact))
        if weight is not None:
            weight[columns].addmm_(z_RC.t(), left_SH[rows])
    return grads
