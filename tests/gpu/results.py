"""The file that `python -m tests.gpu.measure` writes: how it is written, what it holds, and two of them compared.

`problems` is its schema. Whatever ended a run early, each chosen part has a status, and a reason unless it is done.
"""

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

FORMAT = 3
DONE, FAILED, LATE = "done", "failed", "out of time"
TOO_LARGE, NOT_RUN = "does not fit", "not run"
# of a part whose turn has not come, and of one that runs: what a killed measurement leaves
WAITING, RUNNING = "waiting", "running"
STATUSES = (DONE, FAILED, LATE, TOO_LARGE, NOT_RUN, WAITING, RUNNING)  # of several the worst is the part's
WORST_FIRST = (FAILED, LATE, TOO_LARGE, NOT_RUN)
UNFINISHED = (FAILED, LATE, WAITING, RUNNING)  # with these the exit status is 1

NUMBER = (int, float)
NOT_ENDED = "it did not end in"
TAIL = 2000  # characters of a process's errors that stay in the file
Kinds = Mapping[str, type | tuple[type, ...]]
TOP: Kinds = {"format": int, "toy": bool, "machine": dict, "versions": dict, "seconds": NUMBER, "parts": dict}
PART: Kinds = {"status": str, "share": NUMBER, "seconds": NUMBER}
OF_TESTS: Kinds = {"passed": int, "failed": dict, "skipped": dict, "figures": dict}
# of runs of steps (`runs`), and of a script (`figures`); `errors` are the ends of processes' errors
MORE: Kinds = {"reason": str, "errors": dict, "shapes": list, "runs": dict, "ratios": dict, **OF_TESTS}
RUN: Kinds = {"status": str}
MEASURED: Kinds = {
    **{"steps": int, "seconds": NUMBER, "phases": dict, "tokens_per_second": NUMBER},
    **{"peak_mib": NUMBER, "working_mib": NUMBER, "form": str, "micro_batch": int},
}
ON_A_GPU: Kinds = {"peak_reserved_mib": NUMBER, "in_use_mib": NUMBER}
OF_SAMPLING: Kinds = {"attention": str, "weights": str}
MORE_OF_RUN: Kinds = {
    **{**MEASURED, **ON_A_GPU, **OF_SAMPLING},
    **{"reason": str, "planned_mib": NUMBER, "published": dict},
}
# dictionaries whose values are numbers alone; `published` also has the source
OF_NUMBERS = ("ratios", "phases")


def write(path: Path, result: Mapping[str, Any]) -> None:
    """Replace the file in one step, so a reader or a kill never meets half of it."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(_finite(result), indent=1, allow_nan=False) + "\n")
    partial.replace(path)


def _finite(value: Any) -> Any:
    """The value with None for numbers that JSON does not have."""
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_part(path: Path) -> dict[str, Any]:
    """What a script has written of its part by now."""
    return dict(json.loads(path.read_text())) if path.exists() else {}


def of_failures(failures: Mapping[str, str]) -> dict[str, str]:
    """The status and the reason of a part, from the reasons by name of what failed or was not in time."""
    if not failures:
        return {}
    late = all(reason.startswith(NOT_ENDED) for reason in failures.values())
    reason = "; ".join(f"{name}: {reason}" for name, reason in failures.items())
    return {"status": LATE if late else FAILED, "reason": reason}


def worst(statuses: list[str]) -> str:
    return next((status for status in WORST_FIRST if status in statuses), DONE)


def reason_in(errors: str) -> str:
    """Why a process ended: the last exception with the lines of its message, or the last line of its errors."""
    # torch puts the rank before each line of an exception
    lines = [re.sub(r"^\[rank\d+\]: ?", "", line) for line in errors.strip().splitlines()] or [""]
    starts = [n for n, line in enumerate(lines) if re.match(r"[\w.]+(Error|Exception|Exit)\b", line)]
    if not starts:
        return lines[-1]
    message = itertools.takewhile(lambda line: line and not line.startswith("["), lines[starts[-1] :])
    return "\n".join(message)[:TAIL]


def not_ended(seconds: float) -> str:
    """The reason of a process that was ended because its time was over."""
    return f"{NOT_ENDED} {seconds:.0f} s"


def of_memory(reason: str) -> bool:
    """Whether the exception itself, and not a line before or after it, says that memory ended."""
    return "out of memory" in reason.partition("\n")[0].lower()


def problems(result: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each thing that does not belong in such a file, or is missing."""
    yield from _of_kinds("the file", result, TOP, {})
    if result.get("format") != FORMAT:
        yield f"the file has format {result.get('format')!r}, not {FORMAT}"
    for name, part in result.get("parts", {}).items():
        yield from _of_kinds(name, part, PART, MORE)
        yield from _of_status(name, part)
        if part.get("status") in (DONE, RUNNING) and not part.keys() & {"runs", "figures"}:
            yield f"{name} is {part['status']} and has neither runs nor figures"
        yield from _of_figures(f"figures of {name}", part.get("figures", {}))
        for run, values in part.get("runs", {}).items():
            yield from _of_kinds(run, values, RUN | MEASURED if values.get("status") == DONE else RUN, MORE_OF_RUN)
            yield from _of_status(run, values)


def _of_kinds(name: str, values: Mapping[str, Any], needed: Kinds, more: Kinds) -> Iterator[str]:
    for key, kind in needed.items():
        if key not in values:
            yield f"{name} has no {key!r}"
        else:
            yield from _of_kind(name, key, values[key], kind)
    for key in values.keys() - needed.keys():
        if key not in more:
            yield f"{name} has an unknown {key!r}"
        else:
            yield from _of_kind(name, key, values[key], more[key])


def _of_kind(name: str, key: str, value: Any, kind: type | tuple[type, ...]) -> Iterator[str]:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        yield f"{name} has {key!r} as {type(value).__name__}"
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{name} has {key!r} as {value}"
    elif key in OF_NUMBERS:
        for one, number in value.items():
            yield from _of_kind(f"{key} of {name}", one, number, NUMBER)
    elif key == "published":
        for one, number in value.items():
            yield from _of_kind(f"{key} of {name}", one, number, str if one == "source" else NUMBER)


def _of_figures(name: str, figures: Any) -> Iterator[str]:
    """Figures are numbers and text, in dictionaries and lists; None is a number that JSON does not have."""
    if isinstance(figures, Mapping | list | tuple):
        pairs = figures.items() if isinstance(figures, Mapping) else enumerate(figures)
        for key, value in pairs:
            yield from _of_figures(f"{key!r} in {name}", value)
    elif isinstance(figures, float) and not math.isfinite(figures):
        yield f"{name} is {figures}"
    elif figures is not None and not isinstance(figures, int | float | str):
        yield f"{name} is of type {type(figures).__name__}"


def _of_status(name: str, values: Mapping[str, Any]) -> Iterator[str]:
    status = values.get("status")
    if status not in STATUSES:
        yield f"{name} has status {status!r}, which is not one of {', '.join(STATUSES)}"
    elif (status not in (DONE, WAITING, RUNNING)) != ("reason" in values):
        yield f"{name} has status {status!r} and " + ("a reason" if "reason" in values else "no reason")


def compare(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """Two results, line by line: tests that fail in one of them, and seconds and memory of each run."""
    if before["format"] != after["format"]:
        yield f"formats {before['format']} and {after['format']}: seconds may leave out other parts of a step"
    both = before["parts"].keys() & after["parts"].keys()

    def failed(result: dict[str, Any]) -> set[str]:
        return {test for name in both for test in result["parts"][name].get("failed", ())}

    def runs(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
        return {name: run for part in result["parts"].values() for name, run in part.get("runs", {}).items()}

    for when, one, other in (("no longer fails", before, after), ("fails now", after, before)):
        for test in sorted(failed(one) - failed(other)):
            yield f"{when}: {test}"
    for name, now in runs(after).items():
        then = runs(before).get(name, {})
        if "seconds" in now and "seconds" in then:
            ratio, memory = now["seconds"] / then["seconds"], now["peak_mib"] / max(then["peak_mib"], 1)
            yield f"{name}: {now['seconds']:.3f} s, {ratio:.2f} times before; memory {memory:.2f} times"
        else:
            yield f"{name}: {now.get('reason', 'not measured before')}"
