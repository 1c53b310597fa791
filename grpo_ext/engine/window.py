"""The window: all forward and backward work of one optimizer step on one process.

Differs from the Trainer's own accumulation: the loop outside sees one batch per optimizer step, so the number of
micro-batches may differ between steps and processes. Stands between the rollout batch and the optimizer step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from accelerate.utils import gather as equal_gather
from accelerate.utils.memory import clear_device_cache

from ..core.geometry import even_share
from ..core.micro_batches import (
    StepSizes,
    TokenCost,
    canonical_units,
    cut_by_count,
    cut_by_tokens,
    deal_rows,
    deal_units,
)
from .collectives import max_over_processes, ragged_gather, sum_over_processes
from .gradients import NativeGradients
from .loss_scaler import deepspeed_minimum
from .memory import WindowOutOfMemory, is_out_of_memory


@dataclass(frozen=True)
class MicroBatch:
    """Rows of the step that one forward sees. `weight` is 0 where a process only keeps the collectives aligned."""

    rows: tuple[int, ...]
    weight: float = 1.0


@dataclass(frozen=True)
class Layout:
    """How a step is laid onto processes and micro-batches; nothing here changes the update.

    Attributes:
        max_rows: completions per micro-batch.
        max_tokens: tokens per micro-batch, or None.
        packed: whether a prompt counts once for its completions (a pack) or every row has all columns of its batch.
        cost: what a token costs, to deal groups by; None deals equal counts.
        unit_rows: completions per canonical unit, which is then the micro-batch; None cuts by the sizes above.
    """

    max_rows: int
    max_tokens: int | None = None
    packed: bool = False
    cost: TokenCost | None = None
    unit_rows: int | None = None


def fill_up(parts: Sequence[Sequence[int]], at_least: int = 1, filler: int = 0) -> list[MicroBatch]:
    """Micro-batches of the given rows, filled up to `at_least` with micro-batches of weight zero.

    An empty share needs one: the gradient of every parameter has to exist for the collectives. Sharded models gather
    in every forward, so there all processes need the same number.
    """
    planned = [MicroBatch(tuple(part)) for part in parts]
    return planned + [MicroBatch((filler,), weight=0.0)] * (at_least - len(planned))


def clear_cache_every(steps: int | None, step: int) -> None:
    """Honour `torch_empty_cache_steps`: free the device's cache every so many optimizer steps."""
    if steps is not None and step % steps == 0:
        clear_device_cache()


def shards_parameters(accelerator: Accelerator) -> bool:
    """Whether a forward is itself a collective (FSDP, DeepSpeed), so that all processes need the same number."""
    return accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)


def plan_window(accelerator: Accelerator, sizes: StepSizes, rows: Sequence[int], layout: Layout) -> list[MicroBatch]:
    """This process's micro-batches of a step.

    Every process plans for all from the lengths, so no collective is needed.

    Args:
        rows: the rows of the step that are run; the others add nothing to it.
    """
    processes, rank = accelerator.num_processes, accelerator.process_index
    filler = min(range(len(sizes.completions_B)), key=lambda row: sizes.completions_B[row])
    if layout.unit_rows is not None:
        units = canonical_units(sizes, rows, layout.unit_rows)
        return fill_up(deal_units(sizes, units, processes, layout.cost or TokenCost())[rank], 1, filler)
    if layout.cost is None or processes == 1:
        shares = [[rows[i] for i in even_share(len(rows), processes, rank)] for rank in range(processes)]
    else:
        shares = deal_rows(sizes, rows, processes, layout.cost)
    own = _cut(sizes, shares[rank], layout)
    most = max(len(_cut(sizes, share, layout)) for share in shares) if shards_parameters(accelerator) else 1
    return fill_up(own, max(most, 1), filler)


def _cut(sizes: StepSizes, rows: Sequence[int], layout: Layout) -> list[list[int]]:
    """Largest first: what it frees holds all that follow, and memory that does not suffice shows at once."""
    if layout.max_tokens is None:
        parts = cut_by_count(sizes, rows, layout.max_rows)
    else:
        parts = cut_by_tokens(sizes, rows, layout.max_rows, layout.max_tokens, layout.packed)
    return sorted(parts, key=lambda part: -sizes.tokens(part, layout.packed))


@contextmanager
def survivable(accelerator: Accelerator, discard: Callable[[], None] | None) -> Iterator[None]:
    """What runs inside may run out of memory; afterwards all processes know. It must hold no collective.

    Args:
        discard: throws away what was done, on every process; None where a forward is itself a collective, so that the
            others could not be told: there the error goes on as it is.

    Raises:
        WindowOutOfMemory: on every process, where one of them failed.
    """
    if discard is None:
        yield
        return
    reason = None
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).splitlines()[0]  # the error itself would keep the tensors of its frames
    if max_over_processes(int(reason is not None), accelerator.device):
        discard()
        raise WindowOutOfMemory(reason or "another process ran out of memory")


def run_window(
    accelerator: Accelerator,
    model: torch.nn.Module,
    gradients: NativeGradients | None,
    micro_batches: Sequence[MicroBatch],
    loss_of: Callable[[MicroBatch], torch.Tensor],
) -> None:
    """Forward and backward over the micro-batches inside Accelerate's `accumulate`; then one sum over the processes.

    Args:
        gradients: how gradients are added up; None where the engine (FSDP, DeepSpeed) does it, in its last backward.

    Raises:
        WindowOutOfMemory: on every process, with the gradients thrown away.
        PrecisionError: in bitwise mode, gradients that are not finite or out of range.
    """
    if gradients is None:
        _run_sharded(accelerator, model, micro_batches, loss_of)
        return
    # more than there are, so that none synchronises; a power of two, so that dividing by it is exact
    count = 1 << len(micro_batches).bit_length()
    accelerator.gradient_accumulation_steps = count
    accelerator.step = 0
    with survivable(accelerator, gradients.discard):
        gradients.start()
        try:
            for micro_batch in micro_batches:
                with accelerator.accumulate(model):
                    accelerator.backward(loss_of(micro_batch) * count)
        finally:
            gradients.stop()
            accelerator.gradient_accumulation_steps = 1
    terms = torch.tensor(float(len(micro_batches)), device=accelerator.device)
    gradients.finish(int(sum_over_processes(terms)))
    accelerator.sync_gradients = True  # the optimizer may step


def _run_sharded(
    accelerator: Accelerator,
    model: torch.nn.Module,
    micro_batches: Sequence[MicroBatch],
    loss_of: Callable[[MicroBatch], torch.Tensor],
) -> None:
    """The window of an engine that reduces gradients in the backward pass.

    `accelerator.backward` divides by the number of micro-batches (not under DeepSpeed) and the engine averages over
    processes; the scale takes both back, because the weights already are those of the whole step.
    """
    count = len(micro_batches)
    deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
    scale = accelerator.num_processes * (1 if deepspeed else count)
    options = {"scale_wrt_gas": False} if deepspeed else {}
    accelerator.gradient_accumulation_steps = count
    accelerator.step = 0
    try:
        for micro_batch in micro_batches:
            with accelerator.accumulate(model), deepspeed_minimum():
                accelerator.backward(loss_of(micro_batch) * scale, **options)
    finally:
        accelerator.gradient_accumulation_steps = 1


@dataclass
class StepMeter:
    """Adds up what the logs show over the micro-batches of a step; one reduction at the end makes it step-wide.

    What the micro-batches add is kept apart and summed exactly rounded at the end (`math.fsum`), so that neither the
    order of the micro-batches nor the process that ran them shows in the digits. Every process has to add the same
    names, micro-batches of weight zero included.
    """

    device: torch.device
    totals: set[str] = field(default_factory=set)
    terms: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    highs: dict[str, torch.Tensor] = field(default_factory=dict)
    lowest: set[str] = field(default_factory=set)

    @property
    def dtype(self) -> torch.dtype:
        """float64, or float32 on the one kind of device that has no float64."""
        return torch.float32 if self.device.type == "mps" else torch.float64

    def add_total(self, name: str, part: torch.Tensor, weight: float) -> None:
        """Add a part of a step-wide total, such as the loss."""
        self.totals.add(name)
        self.add(name, part, 0.0, weight)

    def add_number(self, name: str, value: float) -> None:
        """Add a process's part of a step-wide total that is no tensor."""
        self.add_total(name, torch.tensor(float(value)), 1.0)

    def add(self, name: str, total: torch.Tensor, count: torch.Tensor | float, weight: float = 1.0) -> None:
        """Add a sum and the number of things summed; the metric is their quotient over the step."""
        pair = torch.stack([total.detach().to(self.dtype), torch.as_tensor(count, device=total.device).to(self.dtype)])
        self.terms.append((name, pair.to(self.device) * weight))

    def add_tokens(self, name: str, values_BT: torch.Tensor, mask_BT: torch.Tensor, weight: float) -> None:
        """Add token values under a mask; the metric is their mean over the step's tokens."""
        self.add(name, (values_BT * mask_BT).sum(), mask_BT.sum(), weight)

    def add_sequences(self, name: str, values_B1: torch.Tensor, weight: float) -> None:
        """Add one value per sequence; the metric is their mean over the step's completions."""
        self.add(name, values_B1.sum(), float(values_B1.size(0)), weight)

    def add_extreme(self, name: str, values: torch.Tensor, weight: float, lowest: bool = False) -> None:
        """Keep the largest (or lowest) of values over the step; NaN entries do not count."""
        signed = (-values if lowest else values).detach().to(self.dtype)
        if weight == 0.0:
            signed = torch.full_like(signed, -math.inf)
        high = torch.nan_to_num(signed, nan=-math.inf, neginf=-math.inf).max().to(self.device)
        self.highs[name] = torch.maximum(self.highs[name], high) if name in self.highs else high
        if lowest:
            self.lowest.add(name)

    def reduce(self) -> dict[str, float]:
        """Step-wide values, the same on every process; NaN where nothing was counted."""
        result: dict[str, float] = {}
        names = sorted({name for name, _ in self.terms})
        if names:
            number = {name: float(i) for i, name in enumerate(names)}
            index = torch.tensor([[number[name]] for name, _ in self.terms], dtype=self.dtype, device=self.device)
            rows = torch.cat([index, torch.stack([pair for _, pair in self.terms])], dim=1)
            sums: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
            for which, total, count in ragged_gather(rows).tolist():
                sums[names[int(which)]].append((total, count))
            for name, pairs in sums.items():
                total, count = (exact_sum(column) for column in zip(*pairs))
                result[name] = total if name in self.totals else total / count if count else math.nan
        if self.highs:
            names = sorted(self.highs)
            best = equal_gather(torch.stack([self.highs[n] for n in names])[None]).max(0).values.tolist()
            for name, value in zip(names, best):
                result[name] = math.nan if value == -math.inf else -value if name in self.lowest else value
        return result


def exact_sum(values: Sequence[float]) -> float:
    """The sum, rounded once, so that the order does not matter; also where terms are not finite."""
    if all(math.isfinite(value) for value in values):
        return math.fsum(values)
    return math.nan if any(v != v for v in values) or {math.inf, -math.inf} <= set(values) else max(values, key=abs)
