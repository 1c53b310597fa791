"""The completions that the report shows: of TRL's tables, and of steps that were run again, with their tokens.

The tables are written with `log_completions=True`, the steps by `grpo-ext rerun`. What is long is shown by its ends.
"""

import bisect
import contextlib
import heapq
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet

from ..run.record import RERUNS, STEP, Line, lines_of

STRENGTHS = (0.01, 0.05, 0.2, 0.5)  # a token's colour by the size of its change, as shares of the page's largest

_BEST = 2  # completions of a rollout with the highest advantages, and as many with the lowest
_LARGEST = 16  # completions of a step that was run again
_CHARACTERS, _MESSAGES, _TOKENS = (1500, 500), (8, 4), (300, 100)  # shown from the head, from the tail

Ends = tuple[Sequence[Any], int, Sequence[Any]]  # head, how many are left out, tail


def rollouts_of(paths: Mapping[int, Path]) -> dict[int, list[Any]]:
    """Rows of the first, the middle and the last of these tables, by step."""
    rollouts, order = {}, [*paths]
    for step in dict.fromkeys(order[place] for place in (0, len(order) // 2, -1) if order):
        with contextlib.suppress(OSError, ValueError, KeyError):  # cut by a kill, or not TRL's
            rows = pyarrow.parquet.read_table(paths[step]).to_pylist()
            different = {hash(repr((row["prompt"], row["completion"]))): row for row in rows}.values()
            ranked = sorted(different, key=lambda row: row["advantage"] or 0.0, reverse=True)
            rollouts[step] = [*ranked[:_BEST], *ranked[_BEST:][-_BEST:]]
    return rollouts


def reruns_of(folder: Path) -> list[tuple[Line, list[Line]]]:
    """Every step of a run that was run again, or the one of a rerun's own folder: about the step, its completions.

    A completion has "shown", the ends of its tokens, each with its text, its values and a class for its colour.
    """
    reruns = []
    for path in (folder / STEP, *folder.glob(f"{RERUNS}/*/{STEP}")):
        if not path.is_file():
            continue
        lines = lines_of(path)
        if about := next(lines, None):
            reruns.append((about | {"folder": path.parent.name}, heapq.nlargest(_LARGEST, lines, key=_size)))
    changes = [(line, _changes(line)) for _, largest in reruns for line in largest]
    most = max((abs(change) for _, of_line in changes for change in of_line), default=0.0)
    for line, of_line in changes:
        head, left, tail = _ends_of(range(len(of_line)), _TOKENS)
        columns = line["tokens"] | line.get("cases", {})
        tokens = [(*_token(columns, place), _colour(of_line[place], most)) for place in (*head, *tail)]
        line["shown"] = tokens[: len(head)], left, tokens[len(head) :]
    return sorted(reruns, key=lambda rerun: (rerun[0]["step"], len(rerun[0]["folder"]), rerun[0]["folder"]))


def _size(line: Line) -> float:
    """How much a completion weighs in its step: the norm of its gradient, or its share of the loss."""
    return abs((line["gradient"]["norm"] if line["gradient"] else line["share"]) or 0.0)


def _changes(line: Line) -> list[float]:
    """The advantage times the change of the log-probability for each token, 0 where it is not trained on or unknown.

    The advantage becomes one of the token's values.
    """
    tokens, advantage = line["tokens"], line["advantage"]
    unknown = [None] * len(tokens["ids"])
    tokens["advantage"] = advantage if isinstance(advantage, list) else [advantage for _ in unknown]
    names = ("advantage", "after", "training", "mask")
    rows = zip(*(tokens.get(name) or unknown for name in names), strict=True)
    return [0.0 if None in row or not row[3] else row[0] * (row[1] - row[2]) for row in rows]


def _colour(change: float, most: float) -> str:
    strength = bisect.bisect(STRENGTHS, abs(change) / most) if change else 0
    return f"{'up' if change > 0 else 'down'}{strength}" if strength else ""


def _token(tokens: Mapping[str, Sequence[Any] | None], place: int) -> tuple[str, str, bool]:
    """Its text, its values on a line each, whether it is trained on."""
    values = {name: column[place] for name, column in tokens.items() if column is not None}
    text, number, trained = values.pop("text"), values.pop("ids"), bool(values.pop("mask", True))
    known = (f"{name} {shown(value)}" for name, value in values.items() if value is not None)
    return text, "\n".join((f"token {place}, id {number}", *known)), trained


def _ends_of(items: Any, sizes: tuple[int, int]) -> Ends:
    left = len(items) - sum(sizes)
    return (items[: sizes[0]], left, items[-sizes[1] :]) if left > 0 else (items, 0, items[:0])


def messages_of(cell: Any) -> Ends:
    """The messages of a conversation, which may be written as JSON; text is a message without a role."""
    if isinstance(cell, str) and cell.startswith("[{"):
        with contextlib.suppress(ValueError, RecursionError):  # text that only begins like JSON
            cell = json.loads(cell)
    are_messages = isinstance(cell, list) and all(isinstance(part, dict) and "role" in part for part in cell)
    return _ends_of([_known(part) for part in cell] if are_messages else [{"content": cell}], _MESSAGES)


def _known(value: Any) -> Any:
    """A value without what is None: in a table every mapping of a column has the keys of all."""
    if isinstance(value, dict):
        return {name: _known(part) for name, part in value.items() if part is not None}
    return list(map(_known, value)) if isinstance(value, list) else value


def shown(value: Any) -> str:
    """A number with four digits, text by its ends, anything else as JSON."""
    if value is None:
        return "-"
    if isinstance(value, (int, float)):
        return f"{value:,.0f}" if abs(value) >= 10000 else f"{value:.4g}"
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    head, left, tail = _ends_of(text, _CHARACTERS)
    return f"{head}\n... {left:,} characters left out ...\n{tail}" if left else text
