"""`make test-gpu`: the tests that need a GPU, then seconds and memory of a step; one JSON, whatever did not finish.

Differs from `make bench`: half precision, one trainer on the device at a time, each with the largest micro-batch
that fits, and a time budget. `--toy` rehearses all of it at toy size on the CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from grpo_ext.errors import LaunchError
from grpo_ext.run.log import versions
from grpo_ext.tools.stock import OURS, STOCK
from tests.bench.measuring import Worker, spec_of
from tests.bench.results import machine
from tests.bench.shapes import MODELS, Shape, decoder

HALF_B, TOY_MODEL = MODELS["qwen2.5-0.5b"], decoder("qwen2", 512, 56, 64, 2, 14, 2)
SHAPES = (
    Shape("long prompt", 1024, 128, 1024, groups=8),
    Shape("ragged answers", 128, 64, 1792, skewed=True, groups=8),
)
TOY_SHAPES = (Shape("toy", 16, 4, 8, groups=2, group=4),)
TRAINERS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"{OURS}, {form}": (OURS, {"forward": form}) for form in ("packed", "prefix", "padded")},
    STOCK: (STOCK, {}),
}
TESTS_SHARE = 0.45  # of the time
ROUNDS = 3


def one_device() -> None:
    """Leave the first of the visible devices: a trainer would use all of them."""
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]


def compare(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """Two results, line by line: tests that fail in one of them, and seconds and memory of each trainer."""
    for when, one, other in (("no longer fails", before, after), ("fails now", after, before)):
        for test in sorted(set(one["tests"]["failed"]) - set(other["tests"]["failed"])):
            yield f"{when}: {test}"
    for shape, trainers in after["bench"].items():
        for trainer, now in trainers.items():
            then = before["bench"].get(shape, {}).get(trainer, {})
            if "seconds" in now and "seconds" in then:
                ratio, memory = now["seconds"] / then["seconds"], now["peak_mib"] / max(then["peak_mib"], 1)
                yield f"{shape}, {trainer}: {now['seconds']:.3f} s, {ratio:.2f} times before; memory {memory:.2f} times"
            else:
                yield f"{shape}, {trainer}: {now.get('not_finished', 'not measured before')}"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run_tests(toy: bool, seconds: float) -> dict[str, Any]:
    """What the tests came to, also those of a run that did not end in time."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results")
        results.touch()
        environment = os.environ | {"GRPO_EXT_GPU_RESULTS": str(results), "GRPO_EXT_TOY": str(int(toy))}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu"]
        try:
            status = subprocess.run(command, env=environment, stdout=sys.stderr, timeout=seconds).returncode
        except subprocess.TimeoutExpired:
            status = None
        tests = [json.loads(line) for line in results.read_text().splitlines()]
    named = {kind: {t["test"]: t["reason"] for t in tests if t["outcome"] == kind} for kind in ("failed", "skipped")}
    passed = [t for t in tests if t["outcome"] == "passed"]
    figures = {t["test"]: t["figures"] for t in passed if t["figures"]}
    return {"status": status, "passed": len(passed), **named, "figures": figures}


def measure(shape: Shape, trainer: str, model: Any, most: int, end: float) -> dict[str, Any]:
    """Medians of a trainer's steps at the largest micro-batch that fits; `not_finished` says what went wrong.

    Ours cuts a micro-batch that does not fit by itself, stock TRL is started again with half of it.

    Args:
        most: completions of a micro-batch that may fit.
    """
    who, options = TRAINERS[trainer]
    rows = shape.groups * shape.group
    result: dict[str, Any] = {}
    for micro in (rows >> n for n in range(rows.bit_length()) if rows >> n <= most):
        spec = spec_of(shape, who, micro, model, "bfloat16", options)
        steps: list[dict[str, Any]] = []
        with tempfile.TemporaryFile("w+") as errors:
            try:
                with closing(Worker(spec, max(end - time.monotonic(), 1), errors)) as worker:
                    for _ in range(1 + ROUNDS):
                        steps.append(worker.step())
            except (LaunchError, OSError) as error:  # it ended, or was ended
                errors.seek(0)
                text = errors.read()
                reason = (text.strip().splitlines() or [str(error)])[-1]
                late = time.monotonic() > end
                result["not_finished"] = "out of time" if late else reason
                if not late and "out of memory" in text.lower() and micro > 1:
                    say(f"{shape.name}, {trainer}: {micro} completions do not fit")
                    continue
        break
    if len(steps) > 1:
        result |= summary(steps[1:])
        result |= {"form": steps[-1].get("form", "padded"), "micro_batch": steps[-1].get("micro", micro)}
    if len(steps) == 1 + ROUNDS:
        result.pop("not_finished", None)
    say(f"{shape.name}, {trainer}: {result}")
    return result


def summary(steps: list[dict[str, Any]]) -> dict[str, Any]:
    phases = {name: statistics.median(step["seconds"][name] for step in steps) for name in steps[0]["seconds"]}
    seconds = statistics.median(sum(step["seconds"].values()) for step in steps)
    memory = {name: statistics.median(step[name] for step in steps) for name in ("peak_mib", "working_mib")}
    rate = steps[0]["tokens"] / seconds
    return {"steps": len(steps), "seconds": seconds, "phases": phases, "tokens_per_second": rate, **memory}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--toy", action="store_true", help="toy sizes on the CPU")
    parser.add_argument("--seconds", type=float, default=440, help="budget for tests and bench together")
    parser.add_argument("--compare", type=Path, metavar="JSON", help="an earlier result, to compare this one with")
    options = parser.parse_args()
    earlier = None if options.compare is None else json.loads(options.compare.read_text())
    if options.toy:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    else:
        one_device()
    start = time.monotonic()
    result: dict[str, Any] = {"machine": machine(), "versions": versions()}
    if result["machine"]["gpu"] is None and not options.toy:
        parser.error("there is no CUDA device; --toy rehearses on the CPU")
    result["tests"] = run_tests(options.toy, TESTS_SHARE * options.seconds)
    model, shapes = (TOY_MODEL, TOY_SHAPES) if options.toy else (HALF_B, SHAPES)
    result |= {"model": model, "shapes": [dataclasses.asdict(shape) for shape in shapes], "bench": {}}
    runs = [(shape, trainer) for shape in shapes for trainer in TRAINERS]
    for done, (shape, trainer) in enumerate(runs):
        left, to_do = start + options.seconds - time.monotonic(), len(runs) - done
        end = time.monotonic() + min(left, 1.5 * left / to_do)
        of_shape = result["bench"].setdefault(shape.name, {})
        padded = of_shape.get(f"{OURS}, padded", {}).get("micro_batch", shape.groups * shape.group)
        most = 2 * padded if trainer == STOCK else shape.groups * shape.group
        of_shape[trainer] = measure(shape, trainer, model, most, end)
    late = [f"{s.name}: {t}" for s, t in runs if "not_finished" in result["bench"][s.name][t]]
    result["not_finished"] = (["tests"] if result["tests"]["status"] is None else []) + late
    result["seconds"] = time.monotonic() - start
    print(json.dumps(result, indent=1))
    for line in compare(earlier, result) if earlier is not None else ():
        say(line)
    return int(bool(result["not_finished"] or result["tests"]["status"]))


if __name__ == "__main__":
    sys.exit(main())
