"""The file that `python -m tests.gpu.measure` writes: how it is written, what it holds, and two of them compared.

`problems` is its schema. Whatever ended a run early, each chosen part has a status, and a reason unless it is done.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

FORMAT = 2
DONE, FAILED, LATE = "done", "failed", "out of time"
TOO_LARGE, NOT_RUN = "does not fit", "not run"
# of a part whose turn has not come, and of one that runs: what a killed measurement leaves
WAITING, RUNNING = "waiting", "running"
STATUSES = (DONE, FAILED, LATE, TOO_LARGE, NOT_RUN, WAITING, RUNNING)  # of several the worst is the part's
WORST_FIRST = (FAILED, LATE, TOO_LARGE, NOT_RUN)
UNFINISHED = (FAILED, LATE, WAITING, RUNNING)  # with these the exit status is 1

NUMBER = (int, float)
Kinds = Mapping[str, type | tuple[type, ...]]
TOP: Kinds = {"format": int, "toy": bool, "machine": dict, "versions": dict, "seconds": NUMBER, "parts": dict}
PART: Kinds = {"status": str, "share": NUMBER, "seconds": NUMBER}
OF_TESTS: Kinds = {"passed": int, "failed": dict, "skipped": dict, "figures": dict}
# of runs of steps (`runs`), and of a script (`figures`)
MORE: Kinds = {"reason": str, "shapes": list, "runs": dict, "ratios": dict, **OF_TESTS}
RUN: Kinds = {"status": str}
MEASURED: Kinds = {
    **{"steps": int, "seconds": NUMBER, "phases": dict, "tokens_per_second": NUMBER},
    **{"peak_mib": NUMBER, "working_mib": NUMBER, "form": str, "micro_batch": int},
}
MORE_OF_RUN: Kinds = {**MEASURED, "reason": str, "planned_mib": NUMBER, "published": dict}


def write(path: Path, result: Mapping[str, Any]) -> None:
    """Replace the file in one step, so a reader or a kill never meets half of it."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    partial.replace(path)


def worst(statuses: list[str]) -> str:
    return next((status for status in WORST_FIRST if status in statuses), DONE)


def reason_in(errors: str) -> str:
    """The line of a process's errors that says why it ended: the last one of an exception, or the last one at all."""
    lines = errors.strip().splitlines() or [""]
    of_memory = [line for line in lines if "out of memory" in line.lower()]
    exceptions = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Exit)\b", line)]
    return (of_memory or exceptions or lines)[-1]


def problems(result: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each thing that does not belong in such a file, or is missing."""
    yield from _of_kinds("the file", result, TOP, {})
    if result.get("format") != FORMAT:
        yield f"the file has format {result.get('format')!r}, not {FORMAT}"
    for name, part in result.get("parts", {}).items():
        yield from _of_kinds(name, part, PART, MORE)
        yield from _of_status(name, part)
        if part.get("status") == DONE and not part.keys() & {"runs", "figures"}:
            yield f"{name} is done and has neither runs nor figures"
        for run, values in part.get("runs", {}).items():
            yield from _of_kinds(run, values, RUN | MEASURED if values.get("status") == DONE else RUN, MORE_OF_RUN)
            yield from _of_status(run, values)


def _of_kinds(name: str, values: Mapping[str, Any], needed: Kinds, more: Kinds) -> Iterator[str]:
    for key, kind in needed.items():
        if key not in values:
            yield f"{name} has no {key!r}"
        elif not isinstance(values[key], kind):
            yield f"{name} has {key!r} as {type(values[key]).__name__}"
    for key in values.keys() - needed.keys():
        if key not in more:
            yield f"{name} has an unknown {key!r}"
        elif not isinstance(values[key], more[key]):
            yield f"{name} has {key!r} as {type(values[key]).__name__}"


def _of_status(name: str, values: Mapping[str, Any]) -> Iterator[str]:
    status = values.get("status")
    if status not in STATUSES:
        yield f"{name} has status {status!r}, which is not one of {', '.join(STATUSES)}"
    elif (status not in (DONE, WAITING, RUNNING)) != ("reason" in values):
        yield f"{name} has status {status!r} and " + ("a reason" if "reason" in values else "no reason")


def compare(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """Two results, line by line: tests that fail in one of them, and seconds and memory of each run."""
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
