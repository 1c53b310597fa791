"""Compares a form of the forward with padding: a few completions run both ways, and modules have to agree.

Differs from TRL, which always pads. Runs before a model's first pack or first shared prefix (forward.choice). Every
layer's attention and mixers are compared, and positions, because there tokens meet. Log-probabilities alone do not
suffice: in half precision a deep model multiplies rounding until it hides ignored positions. The rounding is measured:
the padded batch runs again with every module's output off by a unit in the last place. Shapes: B completions, N tokens
of the pack, C channels.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import torch

from ..batching.micro_batches import Form
from ..batching.packing import Pack
from ..runtime.out_of_memory import is_out_of_memory
from .attention import TakesNoPacks
from .forms import columns_of, pack_of, score_packed, score_padded, score_prefix
from .lm_head import Scores
from .quantised import EIGHT_BIT_UNIT, outlier_thresholds
from .rows import TokenRows

# a fault is a difference of more than this many times the rounding; healthy models reach 1.6 (600 starts), a planted
# fault 8 and more
LIMIT = 4.0
_ROWS = 8  # completions compared at most
_CHANNELS = 64  # of a module's output that are compared, at most
_DRAWS = 2  # the rounding is estimated from this many perturbed forwards

Outputs = dict[tuple[str, int, int], torch.Tensor]  # of modules, by name, call and place in what the call returns


@dataclass(frozen=True)
class Trial:
    """The result of one comparison on one process.

    Attributes:
        refused: why the model does not run the form, as a sentence without its end; None if it does.
        shortage: that the comparison did not fit into memory, as a sentence; None if it did.
        tokens: completion tokens compared that can show a fault.
    """

    refused: str | None = None
    shortage: str | None = None
    tokens: int = 0


def discriminating_rows(completions_B: Sequence[int], same: Sequence[bool]) -> slice | None:
    """Consecutive rows that can show a fault; None if there are none.

    Two completions of one prompt need a second token, the first that the other could disturb.

    Args:
        same: for each row but the first, whether its prompt is that of the row before.
    """
    for start in range(0, len(completions_B), _ROWS):
        stop = min(start + _ROWS, len(completions_B))
        groups = accumulate((int(not alike) for alike in same[start : stop - 1]), initial=0)
        long_ones = Counter(group for group, n in zip(groups, completions_B[start:stop]) if n > 1)
        if max(long_ones.values(), default=0) > 1:
            return slice(start, stop)
    return None


# ---- One comparison -------------------------------------------------------------------------------------------------


def try_form(
    form: Form,
    model: Callable[..., Any],
    policy: Any,
    rows: TokenRows,
    checkpointing_kwargs: dict[str, Any] | None = None,
) -> Trial:
    """Run some completions in a form and padded, and compare the outputs of modules.

    Every process runs the same number of forwards, unless the model refuses or memory is short.

    Args:
        model: the model as the loop calls it.
        policy: the causal language model inside it.
        checkpointing_kwargs: of gradient checkpointing, under which layers may drop a cache; None without.
    """
    pack = pack_of(rows) if form == "packed" else None
    score: Callable[..., Scores] = score_prefix if pack is None else functools.partial(score_packed, pack=pack)
    reason = _why_refused(score, model, policy, rows, None if pack is not None else checkpointing_kwargs)
    if reason is not None:
        return Trial(refused=reason)
    tokens, source, shape = _compared_tokens(rows, pack)
    mask = rows.padded()[1]
    column_N = mask.reshape(-1).nonzero().squeeze(1).tolist()  # of each token of the rows in the padded batch
    padded = score_padded, [column_N[token] for token in source], (mask.size(0), mask.size(1))
    run = functools.partial(_outputs, model, policy, rows, _compared_modules(policy, pack))
    with torch.no_grad():
        (ours, logps), (right, padded_logps) = run(score, tokens, shape), run(*padded)
        unit, others = rounding_unit(policy, rows.ids_N.device), []
        for seed in range(_DRAWS):
            with _rounded_otherwise(policy, unit, seed):
                others.append(run(*padded)[0])
    if not torch.isfinite(padded_logps).all():
        return Trial()  # nothing to compare with; a loss that is not finite is an error of its own
    ratios = compare(ours, right, others, unit) if tokens else []
    wrong = next(((place, ratio) for (place, *_), ratio in ratios if not ratio <= LIMIT), None)
    if wrong is None:
        return Trial(tokens=len(tokens))
    gap = float((logps - padded_logps).abs().float().mean())
    return Trial(
        refused=f"{form} and padded log-probabilities of {type(policy).__name__} differ by {gap:.1e} on {len(rows)} "
        f"completions, and the output of {wrong[0]} by {wrong[1]:.0f} times the rounding (at most {LIMIT:.0f} is "
        "rounding): the model does something between tokens that this form does not keep, such as ignoring position_ids"
    )


def _why_refused(
    score: Callable[..., Scores],
    model: Callable[..., Any],
    policy: Any,
    rows: TokenRows,
    checkpointing_kwargs: dict[str, Any] | None,
) -> str | None:
    """Why a model does not run a form, found by running it; None if it does."""
    name = type(policy).__name__
    try:
        with torch.no_grad():
            plain = score(model, policy, rows).logps_S
        if checkpointing_kwargs is not None:
            with torch.enable_grad(), _checkpointing(policy, checkpointing_kwargs):
                again = score(model, policy, rows).logps_S.detach()
            if not torch.allclose(again, plain, rtol=1e-2, atol=1e-2, equal_nan=True):
                return f"{name} loses the cache under gradient checkpointing"
    except TakesNoPacks as error:
        return str(error)
    except Exception as error:  # whatever a model does with what it does not expect
        if is_out_of_memory(error):
            raise
        with torch.no_grad():
            score_padded(model, policy, rows)  # a model that fails here too has a fault of its own
        what = "completions after a cached prompt" if score is score_prefix else "a pack"
        return f"{name} fails on {what} ({type(error).__name__}: {next(iter(str(error).splitlines()), '')})"
    return None


@contextmanager
def _checkpointing(policy: Any, kwargs: dict[str, Any]) -> Iterator[None]:
    before = policy.is_gradient_checkpointing
    policy.gradient_checkpointing_enable(kwargs)
    try:
        yield
    finally:
        if not before:
            policy.gradient_checkpointing_disable()


def _compared_tokens(rows: TokenRows, pack: Pack | None) -> tuple[list[int], list[int], tuple[int, int]]:
    """Places of completion tokens in the flattened batch of a form and among the tokens of the rows; the batch's shape.

    Args:
        pack: of the packed form; None for the prefix form, whose batch is that of the completions.
    """
    if pack is not None:
        tokens = [token for group in pack.layout.groups for token in range(*group.answers)]
        return tokens, [pack.source_N[token] for token in tokens], (1, pack.layout.tokens)
    columns, starts = columns_of(max(rows.completions_B)), rows.starts_B
    grid = [(row, t) for row, length in enumerate(rows.completions_B) for t in range(length - 1)]
    source = [starts[row] + rows.prompts_B[row] + t for row, t in grid]
    return [row * columns + t for row, t in grid], source, (len(rows), columns)


def _compared_modules(policy: Any, pack: Pack | None) -> dict[str, torch.nn.Module]:
    """The modules outside of layers, and in each layer those that read the pack, or, without one, all that it has."""

    def is_compared(path: str, module: torch.nn.Module) -> bool:
        parts = path.split(".")
        layers = [place for place, part in enumerate(parts) if part.isdigit()]
        mixes = layers == [len(parts) - 2] if pack is None else module in pack.layout.readers
        return bool(path) and (not layers or mixes)

    return {path: module for path, module in policy.named_modules() if is_compared(path, module)}


def _outputs(
    model: Callable[..., Any],
    policy: Any,
    rows: TokenRows,
    modules: Mapping[str, torch.nn.Module],
    score: Callable[..., Scores],
    tokens: Sequence[int],
    shape: tuple[int, int],
) -> tuple[Outputs, torch.Tensor]:
    """What modules put out for some tokens of a forward, and the log-probabilities.

    Args:
        tokens: their places in the flattened batch.
        shape: of the batch; outputs of another shape are left out.
    """
    index, values = torch.tensor(tokens, dtype=torch.long), Outputs()

    def keep(module: Any, args: Any, output: Any, name: str) -> None:
        call = sum(key[0] == name and key[2] == 0 for key in values)
        for place, value in enumerate(output if isinstance(output, tuple) else (output,)):
            if _is_batch(value, shape):
                real = torch.view_as_real(value) if value.is_complex() else value
                channels = real.flatten(0, 1).flatten(1)
                thin = channels[index.to(real.device), :: -(-channels.size(1) // _CHANNELS)]
                values[name, call, place] = thin.to(torch.promote_types(thin.dtype, torch.float32))

    with ExitStack() as hooks:
        for name, module in modules.items():
            hooks.callback(module.register_forward_hook(functools.partial(keep, name=name)).remove)
        logps = score(model, policy, rows).logps_S
    if not values:  # no module's output has one row per token
        values["the head", 0, 0] = logps[:, None].float()
    return values, logps


def _is_batch(value: Any, shape: tuple[int, int]) -> bool:
    """Whether a module's output is numbers for every token of a batch."""
    numbers = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
    return numbers and value.dim() >= 3 and value.shape[:2] == shape


# ---- The rounding ---------------------------------------------------------------------------------------------------


def _unit(kind: torch.dtype) -> float:
    """Rounding of one operation, relative. Sums of float32 and float64 are rounded term by term, so a few units."""
    eps = torch.finfo(kind).eps
    return eps / 2 if kind.itemsize <= 2 else eps * 8


def rounding_unit(policy: Any, device: torch.device) -> float:
    """Relative rounding of the coarsest arithmetic that a model's settings name."""
    kinds = {p.dtype for p in policy.parameters() if p.is_floating_point()}
    kinds |= {kind for m in policy.modules() if isinstance(kind := getattr(m, "compute_dtype", None), torch.dtype)}
    if torch.is_autocast_enabled(device.type):
        kinds.add(torch.get_autocast_dtype(device.type))
    backends: tuple[Any, ...] = (torch.backends, torch.backends.cuda.matmul, cast(Any, torch.backends.mkldnn).matmul)
    products = {backend.fp32_precision for backend in backends}
    shortcuts = [size for name, size in (("tf32", 2.0**-11), ("bf16", 2.0**-9)) if name in products]
    if outlier_thresholds(policy):
        shortcuts.append(EIGHT_BIT_UNIT)
    return max([*map(_unit, kinds), *shortcuts])


@contextmanager
def _rounded_otherwise(policy: Any, unit: float, seed: int) -> Iterator[None]:
    """Inside, the output of every module without children is off by up to a unit in the last place."""
    generators: dict[torch.device, torch.Generator] = {}

    def disturb(module: Any, args: Any, output: Any) -> Any:
        if not isinstance(output, torch.Tensor) or not output.is_floating_point():
            return output
        if output.device not in generators:
            generators[output.device] = torch.Generator(output.device).manual_seed(seed)
        wide = torch.promote_types(output.dtype, torch.float32)
        size = max(unit, _unit(output.dtype))
        draw = torch.rand(output.shape, generator=generators[output.device], device=output.device, dtype=wide)
        return (output.to(wide) * (1 + size * (2 * draw - 1))).to(output.dtype)

    with ExitStack() as hooks:
        for module in policy.modules():
            if next(module.children(), None) is None:
                hooks.callback(module.register_forward_hook(disturb).remove)
        yield


def compare(
    tried: Mapping[Any, torch.Tensor],
    padded: Mapping[Any, torch.Tensor],
    others: Sequence[Mapping[Any, torch.Tensor]],
    unit: float,
) -> list[tuple[Any, float]]:
    """At each place, the difference of a form from padding, in units of the rounding there.

    Args:
        others: the padded values, rounded otherwise.
        unit: relative rounding of one operation, the least that a place is taken to have.
    """

    def size(values: torch.Tensor) -> float:
        return float(values.square().mean().sqrt())

    ratios = []
    for place in [place for place in padded if place in tried and math.isfinite(size(padded[place]))]:
        right = padded[place]
        # a value near the end of its type's range may leave it, rounded otherwise
        rounding = max(unit * size(right), *(size((other[place] - right).nan_to_num(0, 0, 0)) for other in others))
        error = size(tried[place] - right)
        ratios.append((place, error / rounding if rounding else float("inf") if error else 0.0))
    return ratios
