"""Where the time of a step goes, by phase: kernels, launches, copies, waits of the host, and a device without work.

0.5B's shape, 8 prompts with 8 completions of up to 1,024 tokens; and 32 tokens of sampling. After a warm-up each runs
twice, without the profiler and with it: the profiler adds a few microseconds to each launch, and the device is waited
for at both ends of a phase, so that what it does in between belongs to the phase. Idle time is to be read beside both
seconds. Without a GPU only operators are counted.
"""

import gc
import json
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import TrainerCallback

from grpo_ext.tools.stock import OURS
from tests.bench.measuring import spec_of
from tests.bench.shapes import Shape
from tests.bench.worker import make_trainer

from .results import FAILED, write
from .steps import MODELS, Run, toy

STEP = Run(Shape("8 x 8 x 1,024", 512, 128, 1024, groups=8, checkpointing=True), OURS)
SAMPLING = Run(Shape("sampling, 64 rows", 64, 32, 32, groups=8, sample=True), OURS)
PREFIX, EDGE = "phase: ", "edge of a phase"
KERNELS, COPIES, CALLS = ("kernel", "gpu_memset"), ("gpu_memcpy",), ("cuda_runtime", "cuda_driver")
COLUMNS = ("seconds", "busy", "idle", "launches", "kernels", "copies", "waits", "waited", "operators")
ON_DEVICE = ("busy", "idle")  # unknown where the profiler has nothing of a device
WARM, TIMED, PROFILED = range(3)  # steps
MOST = 12  # kernels that are named


def _wait() -> None:
    if torch.cuda.is_available():
        with record_function(EDGE):
            torch.cuda.synchronize()


@contextmanager
def phase(name: str) -> Iterator[None]:
    _wait()
    with record_function(PREFIX + name):
        yield
        _wait()


def mark(owner: Any, method: str, name: str) -> None:
    """Let a method's calls be a phase."""
    inner: Callable[..., Any] = getattr(owner, method)

    def marked(*args: Any, **kwargs: Any) -> Any:
        with phase(name):
            return inner(*args, **kwargs)

    setattr(owner, method, marked)


def new_profile() -> profile:
    return profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])])


def start_profiler() -> None:
    """Let the profiler begin with one kernel: its first use initialises what reports kernels, which takes seconds."""
    with new_profile():
        torch.ones(1, device="cuda" if torch.cuda.is_available() else "cpu").add(1)
        _wait()


def now() -> float:
    _wait()
    return time.perf_counter()


class Profiled(TrainerCallback):
    """Times the second step and profiles the third, from its first callback to its last."""

    def __init__(self) -> None:
        self.profile = new_profile()
        self.seconds: dict[str, float] = {}
        self.began = 0.0
        self.trainer: Any = None
        self.whole: Any = None
        self.optimizing: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == PROFILED:
            mark(self.trainer, "_prepare_inputs", "completions")
            mark(self.trainer, "_loss_of", "forward")
            mark(self.trainer, "_clip_grad_norm", "clipping")
            mark(self.trainer.accelerator, "backward", "backward")
            start_profiler()
            self.profile.start()
        self.began = now()
        if state.global_step == PROFILED:
            self.whole = phase("step")
            self.whole.__enter__()

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        if self.whole is not None:
            self.optimizing = phase("optimizer")
            self.optimizing.__enter__()

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        if self.whole is not None:
            self.optimizing.__exit__(None, None, None)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        ended = state.global_step - 1
        if ended == TIMED:
            self.seconds["without the profiler"] = now() - self.began
        elif ended == PROFILED:
            self.whole.__exit__(None, None, None)
            self.seconds["with the profiler"] = now() - self.began
            self.profile.stop()
            control.should_training_stop = True


Measured = tuple[list[dict[str, Any]], dict[str, float]]  # events, and seconds without and with the profiler


def profiled_step(run: Run, folder: str) -> Measured:
    """A training step."""
    spec = spec_of(run.shape, OURS, run.shape.groups * run.shape.group, MODELS[run.model], "float32", {"bf16": True})
    callback = Profiled()
    callback.trainer, _ = make_trainer(spec, run.shape, folder, callback)
    callback.trainer.train()
    return _events(callback.profile), callback.seconds


def profiled_sampling(run: Run, folder: str) -> Measured:
    """Sampling, after a warm-up."""
    spec = spec_of(run.shape, OURS, run.shape.groups * run.shape.group, MODELS[run.model], "float32", {"bf16": True})
    trainer, _ = make_trainer(spec, run.shape, folder, TrainerCallback())
    item = next(iter(trainer.get_train_dataloader()))
    trainer.model.train()

    def sample() -> float:
        start = now()
        trainer._prepare_inputs(item)
        trainer.args.seed += 1
        trainer._buffered_inputs = trainer._rollouts.current = None
        return now() - start

    sample()
    seconds = {"without the profiler": sample()}
    start_profiler()
    profiled = new_profile()
    profiled.start()
    with phase("sampling"):
        seconds["with the profiler"] = sample()
    profiled.stop()
    return _events(profiled), seconds


def _events(profiled: profile) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiled.export_chrome_trace(str(path))
        return [event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]


def by_phase(events: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The columns of each phase, from a trace's events (microseconds); `rest` is what a step has outside of phases."""
    spans = [(e["ts"], e["ts"] + e["dur"], e["name"]) for e in events if e.get("cat") == "user_annotation"]
    edges = [(start, end) for start, end, name in spans if name == EDGE]
    phases: dict[str, Counter[str]] = defaultdict(Counter)
    steps = [(start, end) for start, end, name in spans if name == PREFIX + "step"]
    for start, end, name in spans:
        if not name.startswith(PREFIX):
            continue
        columns = _columns((e for e in events if start <= e["ts"] < end), end - start, edges)
        name = name.removeprefix(PREFIX)
        phases["rest" if name == "step" else name].update(columns)
        if name != "step" and any(first <= start < last for first, last in steps):
            phases["rest"].subtract(columns)
    columns_known = COLUMNS if of_device(events) else [column for column in COLUMNS if column not in ON_DEVICE]
    return {name: {column: counts[column] for column in columns_known} for name, counts in phases.items()}


def of_device(events: Iterable[dict[str, Any]]) -> bool:
    """Whether the profiler has kernels at all."""
    return any(event.get("cat") in KERNELS for event in events)


def _columns(events: Iterable[dict[str, Any]], length: float, edges: Sequence[tuple[float, float]]) -> dict[str, float]:
    counts: Counter[str] = Counter()
    work = []
    for event in events:
        kind, name, start = event.get("cat"), event["name"], event["ts"]
        end = start + event["dur"]
        if kind in KERNELS or kind in COPIES:
            work.append((start, end))
            counts["kernels" if kind in KERNELS else "copies"] += 1
        elif kind in CALLS and "Synchronize" in name and not any(a <= start < b for a, b in edges):
            counts["waits"] += 1
            counts["waited"] += event["dur"] / 1e6
        elif kind in CALLS and "Launch" in name:
            counts["launches"] += 1
        elif kind == "cpu_op":
            counts["operators"] += 1
    busy = covered(work) / 1e6
    return {**counts, "seconds": length / 1e6, "busy": busy, "idle": length / 1e6 - busy}


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of what intervals cover together."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total


def longest_kernels(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The kernels (without a GPU: operators) that take most of the time."""
    events = [event for event in events if event.get("cat") in (*KERNELS, *COPIES, "cpu_op")]
    on_device = [event for event in events if event["cat"] != "cpu_op"]
    seconds, count = Counter[str](), Counter[str]()
    for event in on_device or events:
        seconds[event["name"]] += event["dur"] / 1e6
        count[event["name"]] += 1
    return [{"name": name, "seconds": value, "count": count[name]} for name, value in seconds.most_common(MOST)]


def as_table(phases: dict[str, dict[str, float]]) -> list[str]:
    """The phases as the lines of a Markdown table; seconds in milliseconds."""
    lines = ["| phase | " + " | ".join(COLUMNS) + " |", "|---|" + "---|" * len(COLUMNS)]
    timed = ("seconds", "busy", "idle", "waited")
    for name, values in phases.items():
        cells = (
            "-" if c not in values else f"{1e3 * values[c]:.1f} ms" if c in timed else f"{values[c]:.0f}"
            for c in COLUMNS
        )
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def without_kernels(name: str, events: Iterable[dict[str, Any]], on_gpu: bool) -> dict[str, str]:
    """A status and a reason where the profiler of a GPU reports no kernel, so the device would look idle."""
    if not on_gpu or of_device(events):
        return {}
    return {"status": FAILED, "reason": f"the profile of the {name} has no kernels: CUPTI did not start"}


def main(file: Path, is_toy: bool) -> None:
    figures: dict[str, Any] = {"seconds": {}, "phases": {}, "longest": {}}
    failure: dict[str, str] = {}
    for name, run, profiled in (("step", STEP, profiled_step), ("sampling", SAMPLING, profiled_sampling)):
        run = toy(run) if is_toy else run
        with tempfile.TemporaryDirectory() as folder:
            events, figures["seconds"][name] = profiled(run, folder)
        failure |= without_kernels(name, events, torch.cuda.is_available())
        figures["phases"] |= by_phase(events)
        figures["longest"][name] = longest_kernels(events)
        figures["table"] = as_table(figures["phases"])
        write(file, {"figures": figures, **failure})
        gc.collect()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[3] == "1")
