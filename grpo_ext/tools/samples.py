"""The completions that the report shows: of TRL's tables, and of steps that were run again, with their tokens.

The tables are written with `log_completions=True`, the steps by `grpo-ext rerun`. Long texts are shown by their ends.
"""

import bisect
import contextlib
import heapq
import itertools
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet

STEP = "step.jsonl"  # of a step that was run again: a line about the step, then one for each completion

_BEST = 2  # completions of a rollout with the highest advantages, and as many with the lowest
_LARGEST = 16  # completions of a step that was run again
_CHARACTERS, _MESSAGES, _TOKENS = (1500, 500), (8, 4), (300, 100)  # what is shown: from the head, from the tail
STRENGTHS = (0.01, 0.05, 0.2, 0.5)  # a token's colour by the size of its change, as shares of the page's largest

Message = tuple[str, str]  # role, text


@dataclass
class Token:
    text: str
    values: str  # one a line
    trained: bool
    change: float  # the advantage times the change of the log-probability
    colour: str = ""  # class of the page: up1 to up4, down1 to down4


@dataclass
class Sample:
    values: dict[str, Any]
    prompt: list[Message]
    completion: list[Message]
    tokens: tuple[Sequence[Token], int, Sequence[Token]] = ((), 0, ())  # head, how many are left out, tail


def rollouts_of(folder: Path, steps: Collection[int]) -> dict[int, list[Sample]]:
    """Samples of the first, the middle and the last table that was written at one of `steps`, by step."""
    found = {int(digits[0]): path for path in folder.glob("completions/*.parquet") if (digits := re.findall(r"\d+", path.stem))}
    order = [step for step in sorted(found) if step in steps]
    rollouts = {}
    for step in sorted({order[place] for place in (0, len(order) // 2, -1)} if order else ()):
        with contextlib.suppress(OSError, ValueError, KeyError):  # a file that a kill has cut, or of another kind
            rows = pyarrow.parquet.read_table(found[step]).to_pylist()
            different = {hash(repr((row["prompt"], row["completion"]))): row for row in rows}.values()
            by_advantage = sorted(different, key=_advantage, reverse=True)
            rollouts[step] = list(map(_sample, [*by_advantage[:_BEST], *by_advantage[_BEST:][-_BEST:]]))
    return rollouts


def _advantage(row: Mapping[str, Any]) -> float:
    advantage = row["advantage"]
    return 0.0 if advantage is None or math.isnan(advantage) else advantage


def _sample(row: dict[str, Any]) -> Sample:
    prompt, completion = _messages(row.pop("prompt")), _messages(row.pop("completion"))
    del row["step"]
    return Sample({name: _value(cell) for name, cell in row.items()}, prompt, completion)


def _value(cell: Any) -> Any:
    return cell if isinstance(cell, (int, float)) else "-" if cell is None else _text(cell)


def _text(cell: Any) -> str:
    text = cell if isinstance(cell, str) else json.dumps(_known(cell), default=str, ensure_ascii=False)
    head, left, tail = _ends(text, _CHARACTERS)
    return f"{head}\n... {left:,} characters left out ...\n{tail}" if left else text


def _ends(items: Any, sizes: tuple[int, int]) -> tuple[Any, int, Any]:
    left = len(items) - sum(sizes)
    return (items[: sizes[0]], left, items[-sizes[1] :]) if left > 0 else (items, 0, items[:0])


def _known(value: Any) -> Any:
    """A value without what is None: in a table every mapping of a column has the keys of all."""
    if isinstance(value, Mapping):
        return {name: _known(part) for name, part in value.items() if part is not None}
    return list(map(_known, value)) if isinstance(value, list) else value


def _messages(cell: Any) -> list[Message]:
    """The messages of a conversation, which may be written as JSON; text is one message without a role."""
    if isinstance(cell, str) and cell.startswith("[{"):
        with contextlib.suppress(ValueError, RecursionError):  # text that only begins like JSON
            cell = json.loads(cell)
    if not (isinstance(cell, list) and all(isinstance(message, Mapping) and "role" in message for message in cell)):
        return [("", _text(cell))]
    head, left, tail = _ends(cell, _MESSAGES)
    between = [("", f"... {left:,} messages left out ...")] if left else []
    return [*map(_message, head), *between, *map(_message, tail)]


def _message(message: Mapping[str, Any]) -> Message:
    further = {name: value for name, value in message.items() if name not in ("role", "content") and value is not None}
    return str(message["role"]), "\n".join(_text(part) for part in (message.get("content"), further) if part)


def reruns_of(folder: Path) -> list[tuple[dict[str, Any], list[Sample]]]:
    """Every step of a run that was run again, or the one of a rerun's own folder: about the step, its samples."""
    reruns = []
    for path in (folder / STEP, *folder.glob(f"rerun/*/{STEP}")):
        lines = _lines(path)
        if about := next(lines, None):
            largest = heapq.nlargest(_LARGEST, lines, key=_size)
            reruns.append((about, list(map(_rerun_sample, largest))))
    tokens = [token for _, samples in reruns for sample in samples for token in (*sample.tokens[0], *sample.tokens[2])]
    largest_change = max((abs(token.change) for token in tokens), default=0.0)
    for token in tokens:
        if token.change and (strength := bisect.bisect(STRENGTHS, abs(token.change) / largest_change)):
            token.colour = f"{'up' if token.change > 0 else 'down'}{strength}"
    return sorted(reruns, key=lambda rerun: rerun[0]["step"])


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        for raw in file:
            with contextlib.suppress(ValueError):  # a line that a kill has cut
                yield json.loads(raw)


def _size(line: Mapping[str, Any]) -> float:
    """How much a completion weighs in its step: the norm of its gradient, else its share of the loss."""
    return line["gradient"]["norm"] if line["gradient"] else abs(line["share"] or 0.0)


def _rerun_sample(line: Mapping[str, Any]) -> Sample:
    advantage = "for each token" if isinstance(line["advantage"], list) else line["advantage"]
    gradient = {f"gradient's {name}": value for name, value in (line["gradient"] or {}).items()}
    about = {"row": line["prompt_row"], "generation": line["generation"], "answer": line["answer"], **line["rewards"]}
    values = {**about, "advantage": advantage, "share of the loss": line["share"], **gradient}
    columns = {name: column for name, column in line["tokens"].items() if column is not None}
    places = range(len(columns["ids"]))
    columns["advantage"] = line["advantage"] if advantage == "for each token" else [advantage for _ in places]
    head, left, tail = _ends(places, _TOKENS)
    tokens = [_token(place, columns) for place in (*head, *tail)]
    return Sample(
        {name: _value(value) for name, value in values.items()},
        _messages(line["prompt"]),
        [],
        (tokens[: len(head)], left, tokens[len(head) :]),
    )


def _token(place: int, columns: Mapping[str, Sequence[Any]]) -> Token:
    values = {name: column[place] for name, column in columns.items() if column[place] is not None}
    text, number, trained = values.pop("text"), values.pop("ids"), bool(values.pop("mask"))
    change = 0.0
    if trained and {"advantage", "training", "after"} <= values.keys():
        change = values["advantage"] * (values["after"] - values["training"])
    shown = (f"{name} {value:.4g}" for name, value in values.items())
    where = f"token {place}, id {number}" + ("" if trained else ", not trained on")
    return Token(text, "\n".join((where, *shown)), trained, change)
