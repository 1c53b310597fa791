"""The plan of an optimizer step: the completions of each process, and their micro-batches.

Differs from TRL: work is assigned by cost, not by count, and cut by tokens where a budget is set; the number of
micro-batches may differ between steps and processes. Runs once per step, before its first forward. A row is a
completion with its prompt; the rows of a group are neighbours and share their prompt. A step may hold part of a group.
A completion of several rows (forward.further_rows) is one row here, which `pieces` alone may cut.
"""

import itertools
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from .sizes import RowBatching, batch_key, ceil_div, even_slice

# a pack without padding; prompts once, then their completions, both padded; every completion with its prompt, padded
Form = Literal["packed", "prefix", "padded"]

Parts = list[list[int]]  # numbers of rows

BALANCED = 1.02  # groups are cut while the largest load is more than this many times the mean
BALANCED_WHOLE = 1.12  # with `whole_groups`; from two groups a process on, most steps cut none (simulated)
WORTH_CUTTING = 0.98  # a cut repeats a prompt, so it has to lower the largest load to this share


@dataclass(frozen=True)
class TokenCost:
    """Costs in training, in units of a token's pass through the layers without attention."""

    attention: float = 0.0  # of one (query, key) pair
    head: float = 0.0  # of one completion token in the language-model head

    def prompt(self, tokens: int) -> float:
        return tokens + self.attention * tokens**2 / 2

    def completion(self, tokens: int, prompt: int) -> float:
        """The cost without that of the prompt."""
        return tokens * (1 + self.head) + self.attention * tokens * (prompt + tokens / 2)


class RowSize(NamedTuple):
    """Tokens of one row of a completion that has several."""

    prompt: int
    after: int  # context after the prompt, and tokens of the completion
    shares: bool  # whether its prompt is that of the completion


@dataclass(frozen=True)
class StepSizes:
    groups_B: Sequence[int]  # number of the group of each completion
    prompts_B: Sequence[int]  # tokens of the prompt of each completion, equal within a group
    completions_B: Sequence[int]  # tokens of each completion; of one with several rows all but those of its prompt
    multiple: int = 1  # packs and the widths of padded batches are filled up to a multiple of this many tokens
    several_B: Sequence[Sequence[RowSize]] | None = None  # the rows of each completion; None: each has one

    def up(self, tokens: int) -> int:
        return ceil_div(tokens, self.multiple) * self.multiple

    def pieces(self, rows: Iterable[int]) -> Parts:
        """The rows, in order, cut where the group changes."""
        return [list(piece) for _, piece in itertools.groupby(sorted(rows), key=self.groups_B.__getitem__)]

    def joinable(self, rows: Iterable[int], batching: RowBatching) -> Parts:
        """The rows, in order, cut where neighbours may not share a padded batch."""
        parts = itertools.groupby(rows, key=lambda row: self._key(row, batching))
        return [list(part) for _, part in parts]

    def _key(self, row: int, batching: RowBatching) -> Hashable:
        several = self.several_B is not None and len(self.several_B[row]) > 1
        return batch_key("single" if several and batching != "any" else batching, self.lengths(row), row)

    def rows_of(self, row: int) -> Sequence[RowSize]:
        """The rows of one completion."""
        if self.several_B is None:
            return [RowSize(self.prompts_B[row], self.completions_B[row], True)]
        return self.several_B[row]

    def cut(self, row: int, layout: "MicroBatchLayout") -> "list[MicroBatch]":
        """Micro-batches of one completion: cut between its rows where they do not fit or may not share a batch."""
        sizes, parts = self.rows_of(row), list[range]()
        most = layout.max_tokens if layout.unit_rows is None else None
        for number in range(len(sizes)):
            start = parts[-1].start if parts else 0
            keys = {batch_key(layout.batching, sizes[n], n) for n in range(start, number + 1)}
            fits = most is None or self.tokens([row], layout.form, range(start, number + 1)) <= most
            if parts and fits and len(keys) == 1:
                parts[-1] = range(start, number + 1)
            else:
                parts.append(range(number, number + 1))
        return [MicroBatch((row,), piece=part if len(parts) > 1 else None) for part in parts]

    def lengths(self, row: int) -> tuple[int, int]:
        return self.prompts_B[row], self.completions_B[row]

    def load(self, rows: Iterable[int], cost: TokenCost) -> float:
        """The cost on one process: a prompt once per group, and the completions."""
        pieces = self.pieces(rows)
        prompts = sum(cost.prompt(self.prompts_B[piece[0]]) for piece in pieces)
        return prompts + sum(cost.completion(self.completions_B[r], self.prompts_B[r]) for p in pieces for r in p)

    def tokens(self, rows: Iterable[int], form: Form, piece: range | None = None) -> int:
        """The tokens of one forward: unique ones in a pack, all columns in the other forms.

        `piece`: only these rows of the one completion that it holds.
        """
        pairs = [(row, size) for row in rows for size in self.rows_of(row)]
        sizes = pairs if piece is None else pairs[piece.start : piece.stop]
        if not sizes:
            return 0
        prompts = {self.groups_B[row]: size.prompt for row, size in sizes if size.shares}
        others, after = [size.prompt for _, size in sizes if not size.shares], [size.after for _, size in sizes]
        if form == "packed":
            return self.up(sum(prompts.values()) + sum(others) + sum(after))
        prompt, completion = self.up(max(*prompts.values(), *others, 0)), self.up(max(after))
        of_prompts = len(prompts) + len(others) if form == "prefix" else len(sizes)
        return of_prompts * prompt + len(sizes) * completion

    def forward_rows(self, part: "MicroBatch") -> int:
        return sum(len(self.rows_of(row)) for row in part.rows) if part.piece is None else len(part.piece)


@dataclass(frozen=True)
class MicroBatch:
    """Rows of the step that run in one forward. A filler, which keeps the collectives aligned, has weight 0."""

    rows: tuple[int, ...]
    weight: float = 1.0
    piece: range | None = None  # which rows of its one completion it runs, where the others run in other micro-batches


@dataclass(frozen=True)
class MicroBatchLayout:
    """The layout of a step on processes and micro-batches; it does not change the update."""

    max_rows: int  # completions per micro-batch
    max_tokens: int | None = None  # per micro-batch
    form: Form = "padded"
    batching: RowBatching = "any"  # of a model that padding changes, in the padded form
    cost: TokenCost = field(default_factory=TokenCost)  # by which groups are assigned to processes
    unit_rows: int | None = None  # completions per canonical unit, the micro-batch then; None: cut by the sizes above
    whole_groups: bool = False  # cut few groups: each part of one rounds the gradient of the prompt
    processes: int = 1
    rank: int = 0
    equal_counts: bool = False  # all processes run as many micro-batches, because these may hold collectives


def plan_step(sizes: StepSizes, rows: Sequence[int], layout: MicroBatchLayout) -> list[MicroBatch]:
    """The micro-batches of this process, of the `rows` that add something to the step; a plan needs no collective."""
    shortest = min(range(len(sizes.completions_B)), key=lambda row: sizes.completions_B[row])
    if layout.unit_rows is not None:  # units go to processes whole; each runs them in order
        units = canonical_units(sizes, rows, layout.unit_rows if layout.batching == "any" else 1)
        numbers = _longest_first([sizes.load(unit, layout.cost) for unit in units], layout.processes)
        parts = [[units[number] for number in sorted(mine)] for mine in numbers]
    else:
        assigned = enumerate(assign_rows(sizes, rows, layout))
        needed = range(layout.processes) if layout.equal_counts else [layout.rank]
        parts = [_cut(sizes, mine, layout) if rank in needed else [] for rank, mine in assigned]
    cut = [[m for part in of_one for m in _whole_or_pieces(sizes, part, layout)] for of_one in parts]
    mine = cut[layout.rank]
    # a process without completions needs one filler: the collectives need a gradient of every parameter
    most = max(1, *map(len, cut)) if layout.equal_counts else 1
    filler = MicroBatch((shortest,), weight=0.0, piece=range(1) if len(sizes.rows_of(shortest)) > 1 else None)
    return mine + [filler] * (most - len(mine))


def _whole_or_pieces(sizes: StepSizes, part: Sequence[int], layout: MicroBatchLayout) -> list[MicroBatch]:
    return sizes.cut(part[0], layout) if len(part) == 1 else [MicroBatch(tuple(part))]


def _cut(sizes: StepSizes, rows: Sequence[int], layout: MicroBatchLayout) -> Parts:
    """Cut rows, the largest micro-batch first: the others reuse its memory, and a shortage shows at once."""
    parts: Parts = []
    for joinable in sizes.joinable(sorted(rows, key=sizes.lengths), layout.batching):
        if layout.max_tokens is None:
            parts += cut_by_count(sizes, joinable, layout.max_rows)
        else:
            parts += cut_by_tokens(sizes, joinable, layout)
    return sorted(parts, key=lambda part: -sizes.tokens(part, layout.form))


def assign_rows(sizes: StepSizes, rows: Sequence[int], layout: MicroBatchLayout) -> Parts:
    """The rows of each process, in order, by cost: the slowest does little more than the mean; one may get none.

    The longest group goes to the least loaded process first. Where loads stay uneven (few groups, many processes),
    completions move to the least loaded process, which runs their prompt again.
    """
    cost, processes = layout.cost, layout.processes
    pieces = sizes.pieces(rows)
    numbers = _longest_first([sizes.load(piece, cost) for piece in pieces], processes)
    assigned = [sorted(row for number in of_process for row in pieces[number]) for of_process in numbers]
    loads = [sizes.load(part, cost) for part in assigned]
    for _ in range(8 * processes):
        high, low = loads.index(max(loads)), loads.index(min(loads))
        if loads[high] <= (BALANCED_WHOLE if layout.whole_groups else BALANCED) * sum(loads) / processes:
            break
        moved = _rows_to_move(sizes, cost, assigned[high], assigned[low])
        if not moved:
            break
        assigned[high] = [row for row in assigned[high] if row not in moved]
        assigned[low] = sorted([*assigned[low], *moved])
        loads[high], loads[low] = sizes.load(assigned[high], cost), sizes.load(assigned[low], cost)
    return assigned


def _longest_first(costs: Sequence[float], processes: int) -> Parts:
    """The items of each process, in the order assigned (Graham 1969, LPT)."""
    loads = [0.0] * processes
    assigned: Parts = [[] for _ in range(processes)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        process = loads.index(min(loads))
        assigned[process].append(index)
        loads[process] += costs[index]
    return assigned


def _rows_to_move(sizes: StepSizes, cost: TokenCost, high: Sequence[int], low: Sequence[int]) -> set[int]:
    """The completions of one group whose move makes the loads most even."""
    load_high, load_low = sizes.load(high, cost), sizes.load(low, cost)
    groups_low = {sizes.groups_B[row] for row in low}
    best, result = load_high * WORTH_CUTTING, set[int]()
    for piece in sizes.pieces(high):
        prompt = cost.prompt(sizes.prompts_B[piece[0]])
        second_prompt = 0.0 if sizes.groups_B[piece[0]] in groups_low else prompt
        row_cost = {row: cost.completion(sizes.completions_B[row], sizes.prompts_B[row]) for row in piece}
        moved, total = set[int](), 0.0
        for row in sorted(piece, key=lambda r: -row_cost[r]):
            if total + row_cost[row] <= (load_high - load_low - second_prompt) / 2:
                moved.add(row)
                total += row_cost[row]
        freed = total + (prompt if len(moved) == len(piece) else 0.0)
        highest = max(load_high - freed, load_low + total + second_prompt)
        if moved and highest < best:
            best, result = highest, moved
    return result


def canonical_units(sizes: StepSizes, rows: Sequence[int], unit_rows: int) -> Parts:
    """Units of at most `unit_rows` completions of a group, as even as possible; they depend only on the data."""
    units: Parts = []
    for piece in sizes.pieces(rows):
        count = ceil_div(len(piece), unit_rows)
        units += [[piece[i] for i in even_slice(len(piece), count, number)] for number in range(count)]
    return units


def cut_by_count(sizes: StepSizes, rows: Sequence[int], max_rows: int) -> Parts:
    """Cut into the fewest micro-batches of at most `max_rows`, in order, between groups if possible."""
    rows = sorted(rows)
    group_ends = set(itertools.accumulate(map(len, sizes.pieces(rows))))
    count = ceil_div(len(rows), max_rows)
    result, start = [], 0
    for number in range(count):
        left, after = len(rows) - start, count - number - 1
        fewest, most = max(left - after * max_rows, 1), min(max_rows, left - after)
        even = len(even_slice(left, after + 1, 0))
        ends = [n for n in range(fewest, most + 1) if start + n in group_ends]
        size = min(ends, key=lambda n: (abs(n - even), n)) if ends else min(max(even, fewest), most)
        result.append(rows[start : start + size])
        start += size
    return result


def cut_by_tokens(sizes: StepSizes, rows: Sequence[int], layout: MicroBatchLayout) -> Parts:
    """Cut into few micro-batches, each as full as possible; a row that exceeds the budget runs alone.

    Rows of a group stay together where they share the prompt, and rows of similar length where they are padded.
    """

    def longest_first(row: int) -> tuple[int, int]:
        return -sizes.prompts_B[row] - sizes.completions_B[row], row

    pieces = [[row] for row in rows] if layout.form == "padded" else sizes.pieces(rows)
    pieces = sorted((sorted(piece, key=longest_first) for piece in pieces), key=lambda piece: longest_first(piece[0]))
    if not layout.whole_groups:
        pieces = [[row] for piece in pieces for row in piece]
    return [sorted(part) for part in filled(sizes, pieces, layout.max_rows, layout.max_tokens, layout.form)]


def filled(sizes: StepSizes, pieces: Iterable[list[int]], max_rows: int, max_tokens: int | None, form: Form) -> Parts:
    """Consecutive pieces within the limits; a piece that exceeds a limit is cut into rows."""

    def fits(part: list[int]) -> bool:
        return len(part) <= max_rows and (max_tokens is None or sizes.tokens(part, form) <= max_tokens)

    result: Parts = []
    for piece in pieces:
        for part in [piece] if fits(piece) else [[row] for row in piece]:
            if result and fits(grown := [*result[-1], *part]):
                result[-1] = grown
            else:
                result.append(part)
    return result
