"""Whether a model takes a form, found out by trying: a few completions run in it and padded, and are compared inside.

Differs from TRL, which always pads. Stands before the first pack, or the first shared prefix, of a model
(forward.choice). What either could get wrong shows where tokens meet, so positions and what attends or mixes tokens in
every layer are compared, not only what comes out at the end, where a deep model in half precision has multiplied
rounding. How much rounding there is, is measured: the padded batch runs again with every module's output off by a unit
in the last place. Shapes: B completions, N tokens of the pack, C channels.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, cast

import torch

from ..batching.micro_batches import Form
from ..batching.packing import PackLayout, build_pack, group_runs
from ..runtime.out_of_memory import is_out_of_memory
from .attention import LAYOUT, TakesNoPacks
from .packed import score_packed
from .padded import score_padded
from .prefix import columns_of, score_prefix
from .prefix_cache import windows_of
from .quantised import EIGHT_BIT_UNIT, outlier_thresholds
from .rows import TokenRows

# a fault is a difference of more than this many times the rounding; healthy models reach 1.6 (measured in 600 starts),
# a planted fault 8 and more
LIMIT = 4.0
_ROWS = 8  # completions compared at most
_CHANNELS = 64  # of a module's output that are compared, at most
_DRAWS = 2  # the rounding is estimated from this many perturbed forwards
_ENOUGH = 32  # completion tokens; attention that is sharp hides a neighbour from a few


@dataclass(frozen=True)
class Trial:
    """What one process found out with a few completions.

    Attributes:
        refused: why the model takes no packs, as a sentence without its end; None where it ran one.
        difference: how packed and padded differ by more than rounding, as a sentence; None where they do not.
        shortage: the comparison did not fit into memory, as a sentence; None where it did.
        tokens: completion tokens that were compared.
        longest: tokens of the longest sequence that was compared.
        windows: sizes of the sliding windows that attention layers asked for.
    """

    refused: str | None = None
    difference: str | None = None
    shortage: str | None = None
    tokens: int = 0
    longest: int = 0
    windows: tuple[int, ...] = ()

    @property
    def untold(self) -> Trial:
        """The same of completions that could not have shown what a pack gets wrong."""
        return replace(self, tokens=0, longest=0)


@dataclass
class Evidence:
    """What all processes have seen of one model so far."""

    tokens: int = 0
    longest: int = 0
    windows: tuple[int, ...] = ()

    @property
    def settled(self) -> bool:
        """Whether enough was compared to run packs without looking again."""
        return self.tokens >= _ENOUGH and self.longer_than == 0

    @property
    def longer_than(self) -> int:
        """The window that no sequence has left so far: a longer one is worth looking at. 0 where there is none."""
        return min((w for w in self.windows if w >= self.longest), default=0) if self.tokens >= _ENOUGH else 0

    def add(self, trials: Sequence[Trial]) -> None:
        """Take in the trials of all processes."""
        self.tokens += sum(trial.tokens for trial in trials)
        self.longest = max(self.longest, *(trial.longest for trial in trials))
        self.windows += tuple(w for trial in trials for w in trial.windows if w not in self.windows)


def telling_rows(
    prompts_B: Sequence[int], completions_B: Sequence[int], same: Sequence[bool], longer_than: int
) -> slice | None:
    """Consecutive rows that can show what a pack gets wrong, None if there are none.

    Two completions of one prompt have a second token, which is the first one that the other could disturb, and a
    sequence is longer than `longer_than` tokens.

    Args:
        same: for each row but the first, whether its prompt is that of the row before.
    """
    for start in range(0, len(completions_B), _ROWS):
        stop = min(start + _ROWS, len(completions_B))
        groups = accumulate((int(not alike) for alike in same[start : stop - 1]), initial=0)
        long_ones = Counter(group for group, n in zip(groups, completions_B[start:stop]) if n > 1)
        neighbours = max(long_ones.values(), default=0) > 1
        if neighbours and max(map(sum, zip(prompts_B[start:stop], completions_B[start:stop]))) > longer_than:
            return slice(start, stop)
    return None


@dataclass
class _Record:
    """What modules have put out for some of the tokens of a forward, by name, call and place in the output.

    Attributes:
        tokens: their places in the flattened batch.
        shape: of the batch; what modules put out in another one is not kept.
    """

    tokens: torch.Tensor
    shape: tuple[int, int]
    values: dict[tuple[str, int, int], torch.Tensor] = field(default_factory=dict)

    def keep(self, name: str, output: Any) -> None:
        call = sum(key[0] == name and key[2] == 0 for key in self.values)
        for place, value in enumerate(output if isinstance(output, tuple) else (output,)):
            if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
                continue
            if value.dim() < 3 or value.shape[:2] != self.shape:
                continue
            real = torch.view_as_real(value) if value.is_complex() else value
            rows = real.flatten(0, 1).flatten(1)
            thin = rows[self.tokens.to(rows.device), :: -(-rows.size(1) // _CHANNELS)]
            self.values[name, call, place] = thin.to(torch.promote_types(thin.dtype, torch.float32))


@contextmanager
def _recording(modules: dict[str, torch.nn.Module], record: _Record) -> Iterator[None]:
    with ExitStack() as hooks:
        for name, module in modules.items():
            handle = module.register_forward_hook(lambda m, args, output, name=name: record.keep(name, output))
            hooks.callback(handle.remove)
        yield


@contextmanager
def _layouts(policy: Any) -> Iterator[list[PackLayout]]:
    """The layouts of the packs that run inside."""
    seen: list[PackLayout] = []

    def keep(module: Any, args: Any, kwargs: Any) -> None:
        seen.extend(value for name, value in kwargs.items() if name == LAYOUT)

    handle = policy.base_model.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


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
    """Inside, every module that holds no others puts out what it does, off by up to a unit in the last place."""
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


def _size(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt())


def compare(
    packed: dict[Any, torch.Tensor],
    padded: dict[Any, torch.Tensor],
    others: Sequence[dict[Any, torch.Tensor]],
    unit: float,
) -> list[tuple[Any, float]]:
    """At each place, how far packed and padded lie apart, in units of the rounding there.

    Args:
        others: the padded values, rounded otherwise.
        unit: relative rounding of one operation; there is at least that much.
    """
    found = []
    for place in [place for place in padded if place in packed and math.isfinite(_size(padded[place]))]:
        right = padded[place]
        # a value near the end of its type's range may leave it, rounded otherwise
        rounding = max(unit * _size(right), *(_size((other[place] - right).nan_to_num(0, 0, 0)) for other in others))
        error = _size(packed[place] - right)
        found.append((place, error / rounding if rounding else float("inf") if error else 0.0))
    return found


def try_pack(model: Callable[..., Any], policy: Any, rows: TokenRows) -> Trial:
    """Run some completions as a pack, and if the model takes it, compare with the padded batch.

    Every process runs the same number of forwards, whatever it finds, unless the model takes no packs or memory is
    short.

    Args:
        model: the model as the loop calls it.
        policy: the causal language model inside it.
    """
    with torch.no_grad():
        try:
            with _layouts(policy) as layouts:
                score_packed(model, policy, rows)
        except TakesNoPacks as error:
            return Trial(refused=str(error))
        except Exception as error:  # whatever a model does with what it does not expect
            return _failed(model, policy, rows, error, "a pack")
        readers = layouts[-1].readers
        places = {
            path: module
            for path, module in policy.named_modules()
            if module in readers or (path and not any(part.isdigit() for part in path.split(".")))
        }
        windows = tuple({window for window in readers.values() if window})
        pack = build_pack(rows.prompts_B, rows.completions_B, group_runs(rows.same_prompt), False)
        tokens = [t for group in pack.layout.groups for t in range(*group.answers)]
        source, shape = [pack.source_N[t] for t in tokens], (1, pack.layout.tokens)
        return _compared(model, policy, rows, _Way("packed", score_packed, places, windows, tokens, source, shape))


def try_prefix(
    model: Callable[..., Any], policy: Any, rows: TokenRows, checkpointing_kwargs: dict[str, Any] | None
) -> Trial:
    """As `try_pack`, in the prefix form.

    Args:
        checkpointing_kwargs: of gradient checkpointing, under which it is run too; None where training runs without.
    """
    config = policy.config.get_text_config(decoder=True)
    try:
        with torch.no_grad():
            plain = score_prefix(model, policy, rows).logps_S
        if checkpointing_kwargs is not None:
            with torch.enable_grad(), _checkpointing(policy, checkpointing_kwargs):
                again = score_prefix(model, policy, rows).logps_S.detach()
            if not torch.allclose(again, plain, rtol=1e-2, atol=1e-2, equal_nan=True):
                return Trial(refused=f"{type(policy).__name__} loses the cache under gradient checkpointing")
    except Exception as error:  # whatever a model does with what it does not expect
        return _failed(model, policy, rows, error, "completions after a cached prompt")
    columns = columns_of(max(rows.completions_B))
    places = {path: module for path, module in policy.named_modules() if _is_part_of_a_layer(path)}
    grid = [(row, t) for row, length in enumerate(rows.completions_B) for t in range(length - 1)]
    starts, tokens = rows.starts_B, [row * columns + t for row, t in grid]
    source, shape = [starts[row] + rows.prompts_B[row] + t for row, t in grid], (len(rows), columns)
    way = _Way("prefix", score_prefix, places, windows_of(config), tokens, source, shape)
    with torch.no_grad():
        return _compared(model, policy, rows, way)


def _is_part_of_a_layer(path: str) -> bool:
    """Whether a module stands directly in a layer, as what mixes tokens does, or in none."""
    parts = path.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    return bool(path) and numbers in ([], [len(parts) - 2])


@contextmanager
def _checkpointing(policy: Any, kwargs: dict[str, Any]) -> Iterator[None]:
    before = policy.is_gradient_checkpointing
    policy.gradient_checkpointing_enable(kwargs)
    try:
        yield
    finally:
        if not before:
            policy.gradient_checkpointing_disable()


def _failed(model: Callable[..., Any], policy: Any, rows: TokenRows, error: Exception, what: str) -> Trial:
    if is_out_of_memory(error):
        raise error
    with torch.no_grad():
        score_padded(model, policy, rows)  # a model that fails here too has another fault, which is its own
    first = next(iter(str(error).splitlines()), "")
    return Trial(refused=f"{type(policy).__name__} fails on {what} ({type(error).__name__}: {first})")


@dataclass(frozen=True)
class _Way:
    """A form that is compared with the padded one, and what is looked at.

    Attributes:
        form, score: its name, and the function that scores in it.
        places: the modules whose outputs are compared, by name.
        windows: sizes of the sliding windows.
        tokens: places of the tokens that are looked at, in the flattened batch of the form.
        source: places of the same tokens among those of all rows.
        shape: of the batch of the form.
    """

    form: Form
    score: Callable[..., Any]
    places: dict[str, torch.nn.Module]
    windows: tuple[int, ...]
    tokens: list[int]
    source: list[int]
    shape: tuple[int, int]


def _compared(model: Callable[..., Any], policy: Any, rows: TokenRows, way: _Way) -> Trial:
    unit = rounding_unit(policy, rows.ids_N.device)

    def run(score: Callable[..., Any], index: list[int], shape: tuple[int, int]) -> tuple[_Record, torch.Tensor]:
        record = _Record(torch.tensor(index, dtype=torch.long), shape)
        with _recording(way.places, record):
            logps = score(model, policy, rows).logps_S
        if not record.values:  # no module's output has one row per token
            record.values["the head", 0, 0] = logps[:, None].float()
        return record, logps

    mask = rows.padded()[1]
    column_N = mask.reshape(-1).nonzero().squeeze(1).tolist()  # of each token of the rows in the padded batch
    columns = [column_N[t] for t in way.source]
    tried, ours = run(way.score, way.tokens, way.shape)
    shape = (mask.size(0), mask.size(1))
    padded, theirs = run(score_padded, columns, shape)
    others = []
    for seed in range(_DRAWS):
        with _rounded_otherwise(policy, unit, seed):
            others.append(run(score_padded, columns, shape)[0].values)
    if not torch.isfinite(theirs).all():
        return Trial()  # nothing to compare with; such a loss is an error of its own
    longest, tokens = max(map(sum, zip(rows.prompts_B, rows.completions_B))), len(way.tokens)
    found = compare(tried.values, padded.values, others, unit) if tokens else []
    wrong = [(place, ratio) for place, ratio in found if not ratio <= LIMIT]
    if not wrong:
        return Trial(tokens=tokens, longest=longest, windows=way.windows)
    gap = float((ours - theirs).abs().float().mean())
    return Trial(
        difference=(
            f"{way.form} and padded log-probabilities of {type(policy).__name__} differ by {gap:.1e} on {len(rows)} "
            f"completions, and what {wrong[0][0][0]} puts out by {wrong[0][1]:.0f} times the rounding (it may by "
            f"{LIMIT:.0f}): the model does something between tokens that this form does not keep, such as ignoring "
            "position_ids"
        )
    )
