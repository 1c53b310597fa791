"""The numbers of a step: the counts that losses are divided by, statistics of the whole step, and logged values.

The entropy quantile and the MoE load-balancing loss are not sums over tokens. They become sums once the threshold and
the expert shares of the step are known, so these are measured first, in one pass without gradients per attempt.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..algorithms.exact import exact_sum
from ..algorithms.losses import StepCounts, entropy_threshold
from ..batching.micro_batches import Form, MicroBatch, StepSizes
from ..errors import PrecisionError
from ..rollouts.batch import RolloutBatch
from ..runtime.collectives import gather_lists, ragged_gather, stack_over_processes
from .cut_completion import CutCompletion

_Number = torch.Tensor | float


@dataclass
class StepMetrics:
    """Collects the logged values of a step; one reduction at the end covers all processes.

    Terms are summed exactly (`math.fsum`), so the digits depend neither on the order of micro-batches nor on the
    process that ran them. A name that only some processes added is reduced over what they added.
    """

    device: torch.device
    kinds: dict[str, str] = field(default_factory=dict)  # by name: "total", "mean", "highest" or "lowest"
    terms: list[tuple[str, _Number, _Number]] = field(default_factory=list)  # name, sum or extreme, number of things
    # not in a micro-batch of weight zero, or where another process has the same micro-batches, and counts them
    counted: bool = True

    def of_weight(self, weight: float) -> "StepMetrics":
        """The same step's, for a micro-batch of this weight: at weight zero only names are added."""
        return self if weight else replace(self, counted=False)

    def add_total(self, name: str, part: _Number) -> None:
        self._add("total", name, part, 0.0)

    def add(self, name: str, total: _Number, count: _Number) -> None:
        """The metric is the quotient of the sums over the step."""
        self._add("mean", name, total, count)

    def _add(self, kind: str, name: str, value: _Number, count: _Number) -> None:
        self.kinds[name] = kind
        if self.counted:
            self.terms.append((name, value.detach() if isinstance(value, torch.Tensor) else value, count))

    def add_tokens(self, values: Mapping[str, torch.Tensor], mask_S: torch.Tensor) -> None:
        """The means of values of tokens, (S,) each; together, because each operation takes a device about as long."""
        count = mask_S.sum()
        stacked = torch.stack([value.detach() for value in values.values()])
        for name, total in zip(values, (stacked * mask_S).sum(1), strict=True):
            self.add(name, total, count)

    def add_sequences(self, name: str, values_B1: torch.Tensor) -> None:
        self.add(name, values_B1.sum(), float(values_B1.size(0)))

    def add_extreme(self, name: str, values: torch.Tensor, lowest: bool = False) -> None:
        """NaN entries do not count; there may be none at all."""
        values = torch.nn.functional.pad(values, (0, 1), value=math.nan)
        if lowest:
            self._add("lowest", name, values.nan_to_num(nan=math.inf, posinf=math.inf).min(), 0.0)
        else:
            self._add("highest", name, values.nan_to_num(nan=-math.inf, neginf=-math.inf).max(), 0.0)

    def reduce(self) -> dict[str, float]:
        """The values to log, the same on every process; NaN where nothing was counted."""
        numbers = iter(self._on_host([number for _, *pair in self.terms for number in pair]))
        rows = [(name, next(numbers), next(numbers)) for name, *_ in self.terms]
        shares: list[tuple[dict[str, str], list[tuple[str, float, float]]]] = gather_lists([(self.kinds, rows)])
        kinds = {name: kind for share, _ in shares for name, kind in share.items()}
        columns: dict[str, list[tuple[float, float]]] = {name: [] for name in sorted(kinds)}
        for name, value, count in itertools.chain.from_iterable(rows for _, rows in shares):
            columns[name].append((value, count))
        return {name: _reduced(kinds[name], pairs) for name, pairs in columns.items()}

    def _on_host(self, values: Sequence[torch.Tensor | float]) -> list[float]:
        """Copy scalars from the device, all at once."""
        dtype = torch.float32 if self.device.type == "mps" else torch.float64  # which has no float64
        groups: dict[torch.dtype, dict[int, torch.Tensor]] = {}  # by place, since a conversion of each takes longer
        for place, value in enumerate(values):
            if isinstance(value, torch.Tensor):
                groups.setdefault(value.dtype, {})[place] = value.to(self.device)
        stacks = [torch.stack([*group.values()]).to(dtype) for group in groups.values()]
        sent = torch.cat(stacks).tolist() if stacks else []
        on_host = list(values)
        for place, number in zip(itertools.chain(*groups.values()), sent, strict=True):
            on_host[place] = number
        return [*map(float, on_host)]


def _reduced(kind: str, pairs: Sequence[tuple[float, float]]) -> float:
    values, counts = [value for value, _ in pairs], [count for _, count in pairs]
    if kind in ("highest", "lowest"):  # infinite where nothing was counted
        extreme = max(values, default=math.inf) if kind == "highest" else min(values, default=math.inf)
        return extreme if math.isfinite(extreme) else math.nan
    total, count = exact_sum(values), exact_sum(counts)
    return total if kind == "total" else total / count if count else math.nan


@dataclass
class StepContext:
    counts: StepCounts
    metrics: StepMetrics
    entropy_threshold: float | None = None  # of the tokens at the step's quantile, in nats
    expert_share: torch.Tensor | None = None  # how often each expert is chosen per row (a token in a layer), (E,)
    router_rows: float = 0  # tokens times layers, over all processes
    record: Callable[..., None] | None = None  # `StepRecord.add`, where the step is recorded
    # by their places in the step, this process's completions that are cut into pieces
    cuts: dict[int, CutCompletion] = field(default_factory=dict)


def loss_mask(inputs: Mapping[str, Any]) -> torch.Tensor:
    """1 on the completion tokens that carry loss: real, and written by the model."""
    mask: torch.Tensor = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask


def step_counts(tokens_B: Sequence[int], groups_B: Sequence[int]) -> StepCounts:
    by_group = dict.fromkeys(groups_B, 0)
    for group, tokens in zip(groups_B, tokens_B, strict=True):
        by_group[group] += tokens
    return StepCounts(len(tokens_B), sum(tokens_B), sum(tokens_B), by_group)


@dataclass(frozen=True)
class MicroBatchStatistics:
    part: MicroBatch
    entropies_S: torch.Tensor
    mask_S: torch.Tensor  # 1 on tokens that carry loss
    experts: tuple[torch.Tensor, torch.Tensor, int] | None = None  # of `router_statistics`


def count_step(rollout: RolloutBatch, metrics: StepMetrics) -> StepContext:
    """Count a step without a collective, because every process holds the whole step."""
    counts = step_counts([int(mask.sum()) for mask in rollout.loss_masks], rollout.groups)
    if rollout.items_per_token is not None:
        counts = replace(counts, items=counts.tokens * rollout.items_per_token)
    return StepContext(counts, metrics)


def set_statistics(context: StepContext, measured: Sequence[MicroBatchStatistics], top_entropy_quantile: float) -> None:
    """Set the entropy threshold and the expert shares of a step; a collective."""
    counted = [m for m in measured if m.part.weight and context.metrics.counted]
    if top_entropy_quantile < 1.0:
        local = [m.entropies_S[m.mask_S.bool()].float() for m in counted]
        everyone = ragged_gather(torch.cat(local) if local else measured[0].entropies_S.new_empty(0).float())
        if unknown := int(everyone.isnan().sum()):
            raise PrecisionError(
                f"top_entropy_quantile={top_entropy_quantile:g} compares the entropies of a step, and {unknown} of "
                f"{everyone.numel()} are NaN; look for logits that are NaN or inf, or set top_entropy_quantile=1."
            )
        context.entropy_threshold = threshold = entropy_threshold(everyone, top_entropy_quantile)
        tokens = int((everyone >= threshold).sum())
        context.counts = replace(context.counts, entropy_tokens=tokens)
    weight = float(context.metrics.counted)
    experts = [(m.part.weight * weight, m.experts) for m in measured if m.experts is not None]
    if experts:
        chosen = functools.reduce(torch.add, (chosen * weight for weight, (chosen, _, _) in experts))
        rows = sum(rows for weight, (_, _, rows) in experts if weight)
        totals = stack_over_processes(torch.cat([chosen, chosen.new_tensor([float(rows)])])).sum(0)
        context.router_rows = int(totals[-1])
        context.expert_share = totals[:-1] / max(context.router_rows, 1)


@dataclass(frozen=True)
class StepPlan:
    sizes: StepSizes  # of all completions of the step
    rows: Sequence[int]  # the completions that run, on all processes; the others add nothing to the step
    micro_batches: Sequence[MicroBatch]  # of this process
    form: Form

    def alone(self) -> list[MicroBatch]:
        """Each completion of this process that counts by itself, in the pieces that it is cut into."""
        parts = [(part, row) for part in self.micro_batches if part.weight for row in part.rows]
        return [part if part.piece is not None else MicroBatch((row,)) for part, row in parts]

    def token_counts(self) -> tuple[int, int, int]:
        """Unique tokens of the whole step; tokens that this process's forwards hold; and how many are padding."""
        parts = [(part.rows, part.piece) for part in self.micro_batches if part.weight]
        computed = real = sum(self.sizes.tokens(rows, self.form, piece) for rows, piece in parts)
        if self.form != "packed":
            alone = [((row,), piece) for rows, piece in parts for row in rows] if self.form == "padded" else parts
            real = sum(self.sizes.tokens(rows, "packed", piece) for rows, piece in alone)
        return self.sizes.tokens(self.rows, "packed"), computed, computed - real


def log_values(plan: StepPlan, metrics: StepMetrics, seconds: Mapping[str, float]) -> dict[str, float]:
    """Counts and sums are the same on every process; seconds (of phases) and rates are not."""
    useful, computed, padding = plan.token_counts()
    metrics.add_total("computed", float(computed))
    metrics.add_total("padding", float(padding))
    values = metrics.reduce()
    computed_anywhere, padding_anywhere = values.pop("computed"), values.pop("padding")
    duplicates = max(computed_anywhere - padding_anywhere - useful, 0.0)
    values["layout/padding_share"] = padding_anywhere / max(computed_anywhere, 1.0)
    values["layout/duplicate_share"] = duplicates / max(computed_anywhere, 1.0)
    values["layout/useful_tokens_per_second"] = useful / max(seconds.get("train", 0.0), 1e-9)
    return values | {f"time/{name}": value for name, value in seconds.items()}
