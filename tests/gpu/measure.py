"""`make test-gpu`: tests that need a GPU, then seconds and memory of a step, in parts; one file of JSON.

What finds most comes first. A part has its share of the time, and what it leaves goes to those after it. The file is
written whole after each part and each run, so that a run that is cut short has said what it found. Differs from
`make bench`: bfloat16 autocast, one trainer on the device at a time, each with the largest micro-batch that fits.
`--toy` rehearses all of it at toy size on the CPU.
"""

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from grpo_ext.batching.sizes import geometry_of
from grpo_ext.errors import LaunchError
from grpo_ext.run.log import versions
from grpo_ext.tools import memory, plan
from grpo_ext.tools.stock import OURS, STOCK
from tests.bench.measuring import Worker, machine, spec_of
from tests.bench.shapes import MODELS, Shape, decoder

HALF_B, TOY_MODEL = MODELS["qwen2.5-0.5b"], decoder("qwen2", 512, 56, 64, 2, 14, 2)
ROUNDS = 3
LORA_RANK = 16  # trl's default


@dataclass(frozen=True)
class Run:
    """Steps of one trainer; `forward` is the form of ours, `rounded` is without `float32_weight_gradients`."""

    shape: Shape
    who: str
    forward: str | None = None
    rounded: bool = False

    @property
    def name(self) -> str:
        rounded = ", rounded weight gradients" if self.rounded else ""
        return f"{self.shape.name}: {self.who}" + (f", {self.forward}" if self.forward else "") + rounded


@dataclass(frozen=True)
class Part:
    """Runs, or without any the tests of this name in `tests.support.gpu.TEST_PARTS`."""

    name: str
    share: float  # of the time, relative to the other parts
    runs: tuple[Run, ...] = ()


FULL = Shape("full, long prompt", 1024, 128, 1024, groups=8, checkpointing=True)
LORA = Shape("LoRA, ragged answers", 128, 64, 1792, skewed=True, groups=8, checkpointing=True, lora=True)
SAMPLED = tuple(Shape(f"sampling, {8 * groups} rows", 64, 1, 128, groups=groups, sample=True) for groups in (8, 32))
TRAINERS = ((OURS, "packed"), (OURS, "packed", True), (STOCK,))
PARTS = (
    Part("head", 60),
    Part("kernels", 60),
    Part("dropout", 60),
    Part("sampling", 60),
    Part("bits", 90),
    Part("training", 220),
    Part("matrix", 180),
    Part("users", 190, tuple(Run(shape, *who) for shape in (FULL, LORA) for who in TRAINERS)),
    Part("generate", 120, tuple(Run(shape, who) for shape in SAMPLED for who in (OURS, STOCK))),
    Part("other forms", 70, (Run(FULL, OURS, "prefix"), Run(FULL, OURS, "padded"))),
    Part("flex attention", 150),
)


def toy(run: Run) -> Run:
    sizes = {"prompt": 16, "shortest": 4, "longest": 8, "groups": run.shape.groups // 4, "group": 4}
    return replace(run, shape=replace(run.shape, **sizes))


def one_device() -> None:
    """Leave the first of the visible devices: a trainer would use all of them."""
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]


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
            yield f"{name}: {now.get('not_finished', 'not measured before')}"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def write(path: Path, result: dict[str, Any]) -> None:
    """Replace the file in one step, so a reader or a kill never meets half of it."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    partial.replace(path)


def run_tests(part: str, is_toy: bool, seconds: float) -> dict[str, Any]:
    """What the tests of a part came to, also where it did not end in time."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results")
        results.touch()
        names = {"GRPO_EXT_GPU_RESULTS": str(results), "GRPO_EXT_GPU_PART": part, "GRPO_EXT_TOY": str(int(is_toy))}
        command = [sys.executable, "-m", "pytest", "-q", "--durations=5", "-p", "no:cacheprovider", "tests/gpu"]
        try:
            status = subprocess.run(command, env=os.environ | names, stdout=sys.stderr, timeout=seconds).returncode
        except subprocess.TimeoutExpired:
            status = None
        tests = [json.loads(line) for line in results.read_text().splitlines()]
    named = {kind: {t["test"]: t["reason"] for t in tests if t["outcome"] == kind} for kind in ("failed", "skipped")}
    passed = [t for t in tests if t["outcome"] == "passed"]
    figures = {t["test"]: t["figures"] for t in passed if t["figures"]}
    result = {"status": status, "passed": len(passed), **named, "figures": figures}
    if status is None:
        result["not_finished"] = "out of time"
    elif status != 0 and not named["failed"]:  # a crash, or a file that cannot be imported
        result["not_finished"] = f"pytest ended with status {status}"
    return result


def measure(run: Run, model: dict[str, Any], end: float) -> dict[str, Any]:
    """Medians of a trainer's steps at the largest micro-batch that fits; `not_finished` says what went wrong.

    Ours cuts a micro-batch that does not fit by itself, stock TRL is started again with half of it.
    """
    options = {"bf16": True} | ({"forward": run.forward} if run.forward else {})
    options |= {"float32_weight_gradients": False} if run.rounded else {}
    rows = run.shape.groups * run.shape.group
    result: dict[str, Any] = {}
    for micro in (rows >> n for n in range(rows.bit_length())):
        spec = spec_of(run.shape, run.who, micro, model, "float32", options)
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
                    say(f"{run.name}: {micro} completions do not fit")
                    continue
        break
    if len(steps) > 1:
        micro, form = steps[-1].get("micro", micro), steps[-1].get("form", "padded")
        result |= summary(steps[1:]) | {"form": form, "micro_batch": micro}
        if run.who == OURS and not run.shape.samples:
            result["planned_mib"] = planned_mib(run.shape, form, micro, model)
    if len(steps) == 1 + ROUNDS:
        result.pop("not_finished", None)
    say(f"{run.name}: {result}")
    return result


def planned_mib(shape: Shape, form: Any, micro: int, model: dict[str, Any]) -> float:
    """What `grpo-ext plan` foresees for training with these micro-batches."""
    sizes = {"global_batch_size": shape.groups * shape.group, "num_generations": shape.group}
    geometry = geometry_of(sizes | {"per_device_train_batch_size": micro}, 1)
    tokens = plan.largest_micro_batch(geometry, shape.prompt, shape.longest, form, None)
    layout = memory.MemoryLayout("ddp", 1, tokens, sampled_tokens=0, checkpointing=shape.checkpointing)
    rank = LORA_RANK if shape.lora else None
    return memory.memory_of(plan.sizes_of(AutoConfig.for_model(**model), lora_rank=rank), layout)["training"] / 2**20


def summary(steps: list[dict[str, Any]]) -> dict[str, Any]:
    phases = {name: statistics.median(step["seconds"][name] for step in steps) for name in steps[0]["seconds"]}
    seconds = statistics.median(sum(step["seconds"].values()) for step in steps)
    memory = {name: statistics.median(step[name] for step in steps) for name in ("peak_mib", "working_mib")}
    rate = steps[0]["tokens"] / seconds
    return {"steps": len(steps), "seconds": seconds, "phases": phases, "tokens_per_second": rate, **memory}


def run_part(part: Part, is_toy: bool, seconds: float, result: dict[str, Any], save: Callable[[], None]) -> None:
    """Fill in what a part came to, within these seconds; `save` after every run."""
    if not part.runs:
        result |= run_tests(part.name, is_toy, seconds)
        return
    model, runs = (TOY_MODEL, list(map(toy, part.runs))) if is_toy else (HALF_B, list(part.runs))
    result |= {"shapes": [dataclasses.asdict(shape) for shape in {run.shape: None for run in runs}], "runs": {}}
    end = time.monotonic() + seconds
    for done, run in enumerate(runs):
        left = end - time.monotonic()
        result["runs"][run.name] = measure(run, model, time.monotonic() + min(left, 1.5 * left / (len(runs) - done)))
        save()
    if late := [name for name, one in result["runs"].items() if "not_finished" in one]:
        result["not_finished"] = ", ".join(late)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--toy", action="store_true", help="toy sizes on the CPU")
    parser.add_argument("--seconds", type=float, default=1200, help="budget of all parts together")
    names = [part.name for part in PARTS]
    parser.add_argument("--parts", nargs="+", choices=names, default=names, metavar="PART", help=", ".join(names))
    parser.add_argument(
        "--output",
        type=Path,
        default=Path(os.environ.get("OUT", "."), "gpu.json"),
        help="the file (default: gpu.json in $OUT)",
    )
    parser.add_argument("--compare", type=Path, metavar="JSON", help="an earlier result, to compare this one with")
    options = parser.parse_args()
    earlier = None if options.compare is None else json.loads(options.compare.read_text())
    parts = [part for part in PARTS if part.name in options.parts]
    os.environ["HF_HUB_OFFLINE"] = "1"
    if options.toy:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    else:
        one_device()
    start = time.monotonic()
    waiting = [part.name for part in parts]
    result: dict[str, Any] = {
        "machine": machine(),
        "versions": versions(),
        "model": TOY_MODEL if options.toy else HALF_B,
    }
    result |= {"parts": {}, "not_finished": waiting}
    if result["machine"]["gpu"] is None and not options.toy:
        parser.error("there is no CUDA device; --toy rehearses on the CPU")

    def save() -> None:
        write(options.output, result | {"seconds": time.monotonic() - start})

    for number, part in enumerate(parts):
        left, begin = start + options.seconds - time.monotonic(), time.monotonic()
        seconds = max(left * part.share / sum(after.share for after in parts[number:]), 0.1)
        outcome = result["parts"][part.name] = {}
        run_part(part, options.toy, seconds, outcome, save)
        outcome["seconds"] = time.monotonic() - begin
        if "not_finished" not in outcome:
            waiting.remove(part.name)
        save()
    for line in compare(earlier, result) if earlier is not None else ():
        say(line)
    failed = [test for part in result["parts"].values() for test in part.get("failed", ())]
    say(f"{len(failed)} failed, not finished: {', '.join(waiting) or 'nothing'}; see {options.output}")
    return int(bool(waiting or failed))


if __name__ == "__main__":
    sys.exit(main())
