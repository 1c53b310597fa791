"""The language-model head: log-probabilities and entropies of given tokens, computed in tiles, and its forward.

Differs from TRL's fused head: needs no Triton on any device, sees the scored positions only, works in float64 where
the model does, and knows the logits of more models. Called inside the policy's and the reference's forward. Shapes: S
scored positions, H hidden size, V vocabulary, R x C one tile.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch.distributed.tensor import DTensor
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.utils import ModelOutput

from ..compat import triton_head
from ..core.losses import load_balancing_loss, router_statistics
from ..errors import ModelError
from .architecture import experts_per_token

SCORE = "grpo_ext_score"  # keyword that carries a `Wanted` through the wrapped model to its forward

# Rows and columns of a tile of logits. On the CPU 4 MiB in float32: what is larger than 32 MiB is mapped and unmapped
# by the C library each time, and squares read the head and write its gradient least often. Accelerators want larger
# products; there not measured.
_CPU_TILE, _TILE = (1024, 1024), (1024, 32768)
_MOST_COLUMNS = 8192
_FACTORS = ("logit_scale", "output_multiplier", "lm_head_multiplier")
_DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
_UNREAD = ("mpt", "gemma3", "cohere2_vision")  # models that leave these settings of their configuration unread


@dataclass(frozen=True)
class LogitTransform:
    """What a model does to the output of its head: `cap * tanh(scale * x / cap) / temperature`.

    Attributes:
        scale: factor of the head's output.
        cap: soft-capping, None without.
        temperature: the logits are divided by it at the end.
        vocabulary: how many of the head's rows are tokens; None for all.
    """

    scale: float = 1.0
    cap: float | None = None
    temperature: float = 1.0
    vocabulary: int | None = None


def logit_transform(config: Any, temperature: float = 1.0) -> LogitTransform:
    """What the model of this configuration does to its logits, by the names that transformers' models use."""
    if config.model_type in _UNREAD:
        return LogitTransform(temperature=temperature)
    config = config.get_text_config()

    def first(names: tuple[str, ...]) -> float | None:
        return next((value for name in names if (value := getattr(config, name, None)) is not None), None)

    scale, divisor = first(_FACTORS), first(_DIVISORS)
    if scale is None and divisor is not None:
        scale = divisor if config.model_type == "hyperclovax" else 1 / divisor
    vocabulary = getattr(config, "unpadded_vocab_size", None)
    return LogitTransform(1.0 if scale is None else scale, first(_CAPS), temperature, vocabulary)


def gathered(*parameters: Any) -> AbstractContextManager[Any]:
    """Inside, the parameters are whole where ZeRO-3 has cut them."""
    if not is_deepspeed_zero3_enabled():
        return nullcontext()
    import deepspeed
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    # an embedding that is whole already (tied weights) is DeepSpeed's to cut again
    known = [p for p in parameters if hasattr(p, "ds_status")]
    cut = [p for p in known if p.ds_status != ZeroParamStatus.AVAILABLE]
    return deepspeed.zero.GatheredParameters(cut) if cut else nullcontext()


class _Tiles:
    """Logits of one head, tile after tile in the same memory.

    Products are computed in the type of the hidden states, or autocast's; all else in float32, or float64 for float64.
    """

    def __init__(
        self,
        hidden_SH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        transform: LogitTransform,
        dtype: torch.dtype,
        spare: int,
    ) -> None:
        self.hidden_SH, self.weight_VH, self.bias_V, self.transform = hidden_SH.to(dtype), weight_VH, bias_V, transform
        self.dtype, self.exact = dtype, torch.float64 if dtype == torch.float64 else torch.float32
        self.factor = transform.scale / transform.temperature
        self.vocabulary = min(weight_VH.size(0), transform.vocabulary or weight_VH.size(0))
        rows, columns = _CPU_TILE if hidden_SH.device.type == "cpu" else _TILE
        self.rows, self.columns = max(min(rows, hidden_SH.size(0)), 1), min(columns, self.vocabulary)
        if self.rows < rows:  # few rows leave room for more columns
            self.columns = min(rows * columns // self.rows, max(columns, _MOST_COLUMNS), self.vocabulary)
        size = self.rows * self.columns
        self._product = hidden_SH.new_empty(size, dtype=dtype)
        self._z = self._product if dtype == self.exact else hidden_SH.new_empty(size, dtype=self.exact)
        self._spare = [hidden_SH.new_empty(size, dtype=self.exact) for _ in range(spare)]

    def spare(self, which: int, like: torch.Tensor) -> torch.Tensor:
        """Further memory of a tile's size."""
        return self._spare[which][: like.numel()].view_as(like)

    def __iter__(self) -> Iterator[tuple[slice, slice, torch.Tensor]]:
        """Rows, columns and (R, C) what the head makes of them, before soft-capping and scale."""
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

    def finish(self, x_RC: torch.Tensor, tanh_RC: torch.Tensor | None = None) -> torch.Tensor:
        """Logits divided by the temperature, in place; `tanh_RC` takes the capped ratio, for the backward pass."""
        cap = self.transform.cap
        if cap is None:
            return x_RC if self.factor == 1.0 else x_RC.mul_(self.factor)
        x_RC.mul_(self.transform.scale / cap).tanh_()
        if tanh_RC is not None:
            tanh_RC.copy_(x_RC)
        return x_RC.mul_(cap / self.transform.temperature)


def _place(targets_S: torch.Tensor, rows: slice, columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """For each row of a tile: whether its target is among the columns, and at which of them (0 where it is not)."""
    local = targets_S[rows] - columns.start
    inside = (local >= 0) & (local < columns.stop - columns.start)
    return inside, torch.where(inside, local, 0)


class _TiledLogProbs(torch.autograd.Function):
    """Log-probability of each target, and the entropy; the backward pass computes the tiles again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_SH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_S: torch.Tensor,
        transform: LogitTransform,
        with_entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ctx.set_materialize_grads(False)  # an entropy that is only logged costs nothing in the backward pass
        device = hidden_SH.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_SH.dtype
        tiles = _Tiles(hidden_SH, weight_VH, bias_V, transform, dtype, spare=int(with_entropy))
        top = hidden_SH.new_full((hidden_SH.size(0),), torch.finfo(tiles.exact).min, dtype=tiles.exact)
        total, weighted, chosen = (torch.zeros_like(top) for _ in range(3))
        for rows, columns, x_RC in tiles:
            z_RC = tiles.finish(x_RC)
            inside, local = _place(targets_S, rows, columns)
            chosen[rows] += torch.where(inside, z_RC.gather(1, local[:, None]).squeeze(1), 0)
            new = torch.maximum(top[rows], z_RC.amax(1))
            z_RC.sub_(new[:, None])
            lower = top[rows] - new
            rescale = lower.exp()
            if with_entropy:  # of exp(z - top) * (z - top), which loses no digits where the logits are large
                e_RC = torch.exp(z_RC, out=tiles.spare(0, z_RC))
                here = z_RC.mul_(e_RC).sum(1)
                weighted[rows] = (weighted[rows] + lower * total[rows]) * rescale + here
            else:
                e_RC = z_RC.exp_()
            total[rows] = total[rows] * rescale + e_RC.sum(1)
            top[rows] = new
        log_total = total.log()
        log_z, entropy = top + log_total, log_total - weighted / total if with_entropy else None
        ctx.save_for_backward(hidden_SH, weight_VH, bias_V, targets_S, log_z, entropy)
        ctx.dtype, ctx.transform = dtype, transform
        return chosen - top - log_total, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden_SH, weight_VH, bias_V, targets_S, log_z, entropy = ctx.saved_tensors
        with gathered(weight_VH, bias_V):
            found = _backward(ctx, hidden_SH, weight_VH, bias_V, targets_S, log_z, entropy, *gradients)
        inputs = (hidden_SH, weight_VH, bias_V)
        return *(None if g is None else g.to(x.dtype) for g, x in zip(found, inputs)), None, None, None


def _backward(
    ctx: Any,
    hidden_SH: torch.Tensor,
    weight_VH: torch.Tensor,
    bias_V: torch.Tensor | None,
    targets_S: torch.Tensor,
    log_z: torch.Tensor,
    entropy: torch.Tensor | None,
    up_S: torch.Tensor | None,
    entropy_up_S: torch.Tensor | None,
) -> list[torch.Tensor | None]:
    """Gradients of hidden states, weight and bias, in float32 or float64; None where none is needed."""
    capped = ctx.transform.cap is not None
    tiles = _Tiles(hidden_SH, weight_VH, bias_V, ctx.transform, ctx.dtype, (entropy_up_S is not None) + capped)
    exact = tiles.exact
    found: list[torch.Tensor | None] = [
        torch.zeros_like(x, dtype=exact) if needed and x is not None else None
        for x, needed in zip((hidden_SH, weight_VH, bias_V), ctx.needs_input_grad)
    ]
    up = torch.zeros_like(log_z) if up_S is None else up_S.to(exact) * tiles.factor
    entropy_up, constant = None, up
    if entropy_up_S is not None and entropy is not None:
        entropy_up = entropy_up_S.to(exact) * tiles.factor
        constant = up + entropy_up * entropy
    left_SH = tiles.hidden_SH if _adds_exactly(tiles.hidden_SH) else tiles.hidden_SH.to(exact)
    for rows, columns, x_RC in tiles:
        tanh_RC = tiles.spare(-1, x_RC) if capped else None
        z_RC = tiles.finish(x_RC, tanh_RC).sub_(log_z[rows, None])  # log p
        if entropy_up is None:
            z_RC.exp_().mul_(-constant[rows, None])
        else:  # -p * (up + entropy_up * (log p + entropy))
            p_RC = torch.exp(z_RC, out=tiles.spare(0, z_RC))
            torch.addcmul(-constant[rows, None], z_RC, -entropy_up[rows, None], out=z_RC).mul_(p_RC)
        inside, local = _place(targets_S, rows, columns)
        each = torch.arange(z_RC.size(0), device=z_RC.device)
        z_RC[each, local] += torch.where(inside, up[rows], 0)
        if tanh_RC is not None:
            z_RC.mul_(tanh_RC.square_().neg_().add_(1))
        _add_products(found, tiles, left_SH, rows, columns, z_RC)
    return found


def _adds_exactly(tensor: torch.Tensor) -> bool:
    """Whether this device adds products of half precision in float32."""
    return tensor.device.type == "cuda" and tensor.dtype in (torch.float16, torch.bfloat16)


def _add_products(
    found: list[torch.Tensor | None],
    tiles: _Tiles,
    left_SH: torch.Tensor,
    rows: slice,
    columns: slice,
    gradient_RC: torch.Tensor,
) -> None:
    """Add what a tile's gradient gives hidden states, weight and bias; half precision is never summed in itself."""
    hidden, weight, bias = found
    if bias is not None:
        bias[columns] += gradient_RC.sum(0)
    if _adds_exactly(left_SH):
        gradient_RC = gradient_RC.to(left_SH.dtype)
        for total, a, b in (
            (None if hidden is None else hidden[rows], gradient_RC, tiles.weight_CH),
            (None if weight is None else weight[columns], gradient_RC.t(), left_SH[rows]),
        ):
            if total is not None:
                torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
        return
    if hidden is not None:
        hidden[rows].addmm_(gradient_RC, tiles.weight_CH.to(tiles.exact))
    if weight is not None:
        weight[columns].addmm_(gradient_RC.t(), left_SH[rows])


def log_probs(
    hidden_SH: torch.Tensor,
    weight_VH: torch.Tensor,
    bias_V: torch.Tensor | None,
    targets_S: torch.Tensor,
    transform: LogitTransform,
    with_entropy: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probabilities (S,) of the targets and entropies (S,), in nats, without the logits of all positions.

    In float32, or float64 for float64 hidden states; a gradient of second order is not supported.
    """
    whole = transform.vocabulary is None or transform.vocabulary >= weight_VH.size(0)
    if hidden_SH.device.type == "cuda" and hidden_SH.dtype != torch.float64 and whole and triton_head() is not None:
        outputs = ("log_probs", "entropy") if with_entropy else ("log_probs",)
        kernel: Any = triton_head()
        settings = (transform.temperature, _TILE[1], transform.cap, transform.scale, outputs)
        return kernel(hidden_SH, weight_VH, bias_V, targets_S, *settings)[:2]
    return _TiledLogProbs.apply(hidden_SH, weight_VH, bias_V, targets_S, transform, with_entropy)


class RouterOutput(NamedTuple):
    """Router logits of one forward, one (tokens, E) tensor per layer, and how often each token counts (B, L).

    That is the attention mask of a padded batch; in a pack a prompt counts once for each of its completions.
    """

    logits: tuple[torch.Tensor, ...]
    counts_BL: torch.Tensor

    def aux_loss(self, top_k: int) -> torch.Tensor:
        """The load-balancing loss of this forward on its own."""
        chosen, probs, rows = router_statistics(self.logits, self.counts_BL, top_k)
        return load_balancing_loss(probs, (chosen / max(rows, 1)).to(probs), probs.numel(), rows)


class RouterRequest:
    """Takes the router's output of one forward; given as `compute_aux_loss`, which it is a true value of."""

    output: RouterOutput | None = None


class Wanted:
    """What a forward is to score; a plain class, because FSDP copies dataclasses among a forward's arguments.

    Attributes:
        predictor_S: positions in the flattened input whose hidden states predict the targets.
        targets_S: the tokens to score.
        entropy, router: whether entropies and a MoE model's router logits are wanted too.
    """

    def __init__(
        self, predictor_S: torch.Tensor, targets_S: torch.Tensor, entropy: bool = True, router: bool = False
    ) -> None:
        self.predictor_S, self.targets_S, self.entropy, self.router = predictor_S, targets_S, entropy, router


@dataclass
class ScoredOutput(ModelOutput):
    """What a model with this head returns: (S,) for a `Wanted`, the shape of the labels for TRL's call."""

    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    aux_loss: torch.Tensor | None = None
    router_logits: tuple[torch.Tensor, ...] | None = None
    router_counts: torch.Tensor | None = None


def _backbone(model: Any) -> Any:
    """The part of a causal language model that comes before its head; the model itself where it has none."""
    return model.base_model if model.base_model is not model else getattr(model, "model", model)


def refuse_unknown_head(model: Any) -> None:
    """Refuse a model whose logits are not made of its backbone's hidden states by one linear layer.

    Raises:
        ModelError: names what else there is.
    """
    backbone, head = _backbone(model), model.get_output_embeddings()
    if backbone is model or head is None:
        raise ModelError(
            f"{type(model).__name__} has no backbone with a linear language-model head after it; such a model cannot "
            "be scored. Use a causal language model of transformers."
        )
    if isinstance(head, BaseTunerLayer):
        raise ModelError(
            f"the adapter reaches the language-model head of {type(model).__name__}, and scoring reads the head's own "
            "weight: leave the head out of target_modules, or train it whole with modules_to_save=['lm_head']."
        )
    known = {id(p) for part in (backbone, head) for p in part.parameters()}
    further = [name for name, parameter in model.named_parameters() if id(parameter) not in known]
    if further:
        raise ModelError(
            f"{type(model).__name__} has more than a linear layer between its hidden states and its logits "
            f"({', '.join(further[:4])}), which scoring would leave out. Use a model with a plain language-model head."
        )


def _unbound(forward: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def install(model: Any, temperature: float, cast_to_fp32: bool = False) -> None:
    """Let the forward of `model` score tokens through this head, beside what it does already.

    Called with `grpo_ext_score=Wanted(...)` or TRL's `fused_lm_head=True`, it returns a `ScoredOutput`; otherwise it
    is the forward it was. To be called before anything wraps the model.

    Args:
        model: the causal language model, under PEFT the one inside.
        temperature: the logits are divided by it.
        cast_to_fp32: compute the head in float32, outside autocast.
    """
    transform = logit_transform(model.config, temperature)
    below = getattr(model.forward, "__func__", None)  # not bound: a deep copy of the model runs its own weights
    if below is None:
        below = functools.partial(_unbound, model.forward)

    @functools.wraps(type(model).forward)  # `generate` checks its arguments against this signature
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        wanted, fused = kwargs.pop(SCORE, None), kwargs.pop("fused_lm_head", False)
        if wanted is None and not fused:
            return below(self, *args, **kwargs)
        labels, shifted = kwargs.pop("labels", None), kwargs.pop("shift_labels", None)
        kwargs.pop("num_items_in_batch", None)
        run = functools.partial(_run, self, transform, cast_to_fp32)
        if wanted is not None:
            return run(wanted, *args, **kwargs)
        return _as_trl(run, experts_per_token(self), labels, shifted, *args, **kwargs)

    model.forward = types.MethodType(forward, model)


def _whole(parameter: Any) -> Any:
    """A parameter that FSDP2 has cut, put together; any other as it is."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def _run(
    model: Any, transform: LogitTransform, cast_to_fp32: bool, wanted: Wanted, *args: Any, **kwargs: Any
) -> ScoredOutput:
    if wanted.router:
        kwargs["output_router_logits"] = True
    output = _backbone(model)(*args, **{**kwargs, "use_cache": False})
    hidden, head = output.last_hidden_state, model.get_output_embeddings()  # PEFT and FSDP replace the head later
    hidden_SH = hidden.reshape(-1, hidden.size(-1))[wanted.predictor_S.to(hidden.device)]
    weight, bias = _whole(head.weight), _whole(getattr(head, "bias", None))
    hidden_SH = hidden_SH.to(weight.device)  # `device_map` may put the head elsewhere
    precision: AbstractContextManager[Any] = nullcontext()
    if cast_to_fp32:
        hidden_SH = hidden_SH.float()
        precision = torch.autocast(hidden_SH.device.type, enabled=False)
    with precision, gathered(weight, bias):
        targets = wanted.targets_S.to(weight.device)
        logps, entropy = log_probs(hidden_SH, weight, bias, targets, transform, wanted.entropy)
    return ScoredOutput(logps, entropy, None, output.router_logits if wanted.router else None)


def _as_trl(
    run: Callable[..., ScoredOutput],
    top_k: int,
    labels: torch.Tensor | None,
    shifted: torch.Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> ScoredOutput:
    """Answer TRL's call: values in the shape of the shifted labels, 0 where a label is -100."""
    if shifted is None:
        assert labels is not None
        labels_BT = labels[:, 1:]
        scored = torch.nn.functional.pad(labels_BT != -100, (0, 1))
    else:
        labels_BT = shifted
        scored = shifted != -100
    mask = labels_BT != -100
    predictor_S = scored.reshape(-1).nonzero().squeeze(1)
    router = bool(kwargs.get("output_router_logits"))
    output = run(Wanted(predictor_S, labels_BT[mask], router=router), *args, **kwargs)
    for name in ("log_probs", "entropy"):
        # connected to the model also where nothing is scored, so that every process can run its backward pass
        output[name] = output[name].new_zeros(mask.shape).masked_scatter(mask.to(output[name].device), output[name])
    if output.router_logits is not None:
        counts = kwargs.get("attention_mask")
        output.router_counts = counts = torch.ones_like(scored) if counts is None else counts
        output.aux_loss = RouterOutput(output.router_logits, counts).aux_loss(top_k)
    return output
