"""Measures shapes: grpo_ext against stock TRL, phase by phase, on the same rollouts; as tables and as JSON.

Each trainer lives in a process of its own (worker.py) and does one optimizer step when it is told to; the
steps of the two alternate, so that a slow moment of the machine hits both, and only one of them is ever busy. Medians
over the rounds are compared, after a warm-up step of each.
"""

import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import IO, Any

import psutil
import torch
from rich.table import Table
from torch.utils.benchmark import Timer

from grpo_ext.errors import ConfigError, LaunchError
from grpo_ext.run.log import versions
from grpo_ext.tools.stock import OURS, STOCK

from .shapes import PHASES, Shape

MOST = 8192  # padded tokens of a micro-batch that is tried; larger ones of the reference model fill the memory
MICRO = (1, 2, 4, 8, 16, 32)  # micro-batch sizes that are tried where none are named
AS_GOOD = 1.03  # a micro-batch size is as good as the fastest if it takes no more than this times its seconds


@dataclass(frozen=True)
class Result:
    """Medians of one shape; dictionaries are by trainer."""

    shape: Shape
    micro: dict[str, int]  # completions per forward, the best of those tried
    seconds: dict[str, dict[str, float]]  # and by phase
    working_mib: dict[str, float]  # peak of a step beyond the process with its model: gradients, optimizer, activations
    peak_mib: dict[str, float]  # all of it
    tokens: dict[str, float]  # unique tokens of the completions and prompts that are trained on (or sampled)
    flops: float  # multiply-adds times two that those tokens need, forward and backward
    matmul: float  # floating point operations per second of large matrix products on this machine
    rounds: int

    @property
    def speed_up(self) -> float:
        """Stock TRL's seconds per token over ours, in the phases that the shape is about."""
        seconds = {who: sum(self.seconds[who][name] for name in self.shape.phases) for who in (OURS, STOCK)}
        return seconds[STOCK] / self.tokens[STOCK] / (seconds[OURS] / self.tokens[OURS])

    def matmul_share(self, who: str) -> float:
        """Share of the machine's matrix-product rate that the useful tokens of forward and backward reach."""
        return self.flops / self.seconds[who]["forward/backward"] / self.matmul


def as_tables(results: Sequence[Result]) -> list[Table]:
    """The results for people: one row a shape and trainer, then the comparison."""
    phases = Table(title="Seconds per step (median)")
    for name in ("shape", "trainer", "micro-batch", *PHASES, "tokens/s", "working memory", "peak memory"):
        phases.add_column(name, justify="left" if name in ("shape", "trainer") else "right")
    for r in results:
        for who in (STOCK, OURS):
            seconds = r.seconds[who]
            phases.add_row(
                r.shape.name if who == STOCK else "",
                who,
                str(r.micro[who]),
                *(f"{seconds[p]:.3f}" if seconds[p] else "-" for p in PHASES),
                f"{r.tokens[who] / max(sum(seconds.values()), 1e-9):.0f}",
                f"{r.working_mib[who]:.0f} MiB",
                f"{r.peak_mib[who]:.0f} MiB",
            )
    compared = Table(title="grpo_ext against TRL")
    for name in ("shape", "speed-up", "working memory", "peak memory", "useful matmul share", "bound (s)"):
        compared.add_column(name, justify="left" if name == "shape" else "right")
    for r in results:
        share = "-" if r.shape.samples else f"{r.matmul_share(STOCK):.0%} -> {r.matmul_share(OURS):.0%}"
        compared.add_row(
            r.shape.name,
            f"{r.speed_up:.2f}x",
            f"{r.working_mib[OURS] / max(r.working_mib[STOCK], 1):.2f}x",
            f"{r.peak_mib[OURS] / r.peak_mib[STOCK]:.2f}x",
            share,
            "-" if r.shape.samples else f"{r.flops / r.matmul:.2f}",
        )
    return [phases, compared]


def machine() -> dict[str, Any]:
    """The kind of machine, without its name."""
    return {
        "system": platform.system(),
        "processor": platform.machine(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _cpu() -> str:
    try:  # what platform.processor() leaves empty on Linux
        with open("/proc/cpuinfo") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def record_of(results: Sequence[Result], settings: Mapping[str, Any]) -> dict[str, Any]:
    """All figures as plain values, with when, on what, with what and how they were measured."""
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "settings": dict(settings),
        "results": [dataclasses.asdict(r) | {"speed_up": r.speed_up} for r in results],
    }
    return json.loads(json.dumps(record, default=str))


class Worker:
    """A process that holds one trainer and runs a step when asked; it lives for `seconds`, and writes to `errors`."""

    def __init__(self, spec: dict[str, Any], seconds: float | None = None, errors: IO[str] | None = None) -> None:
        command = [sys.executable, "-m", "tests.bench.worker", json.dumps(spec)]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
        self.process = subprocess.Popen(command, text=True, **pipes)
        if seconds is not None:
            end = threading.Timer(seconds, self.process.kill)
            end.daemon = True
            end.start()
        self.about = self._read()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        if line := self.process.stdout.readline():
            return dict(json.loads(line))
        raise LaunchError(f"the benchmark's worker ended with status {self.process.wait()}; see its message above")

    def step(self) -> dict[str, Any]:
        """Run one optimizer step (or sample one rollout); what it took."""
        assert self.process.stdin is not None
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        return self._read()

    def close(self) -> None:
        with self.process:  # waits, and closes the pipes
            self.process.kill()


def matmul_rate(device: str, dtype: str) -> float:
    """Floating point operations per second of large matrix products, the best of a few."""
    a = torch.randn(2048, 2048, device=device, dtype=getattr(torch, dtype))
    timer = Timer("a @ a", globals={"a": a}, num_threads=torch.get_num_threads())
    return 2 * 2048**3 / min(timer.timeit(3).mean for _ in range(12))


def spec_of(shape: Shape, who: str, micro: int, model: Any, dtype: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """What a worker is told; `options` go to GRPOConfig and trl's ModelConfig, as far as the trainer has them."""
    shared = {"shape": dataclasses.asdict(shape), "model": model, "dtype": dtype}
    return {**shared, "who": who, "micro": micro, "options": {**options}}


def fastest_micro(
    shape: Shape,
    who: str,
    sizes: Sequence[int],
    model: Any,
    dtype: str,
    say: Callable[[str], Any],
    options: Mapping[str, Any],
) -> int:
    """The fastest micro-batch size, by the faster of two steps; the smallest of those that are as good as that."""
    rows = shape.groups * shape.group
    dividing = sorted({min(size, rows) for size in sizes if who == OURS or rows % min(size, rows) == 0})
    if not dividing:
        raise ConfigError(
            f"{who} cannot run {rows} completions with micro-batches of {', '.join(map(str, sizes))}: it needs a size "
            f"that divides them; add one of {', '.join(str(n) for n in range(1, rows + 1) if rows % n == 0)}."
        )
    width = shape.prompt + shape.longest
    usable = [size for size in dividing if size == dividing[0] or size * width <= MOST]
    if len(usable) == 1 or shape.sample:
        return usable[-1]
    seconds = {}
    for size in usable:
        with closing(Worker(spec_of(shape, who, size, model, dtype, options))) as worker:
            worker.step()
            seconds[size] = min(sum(worker.step()["seconds"].values()) for _ in range(2))
        say(f"{shape.name}: {who} with micro-batches of {size}: {seconds[size]:.2f} s")
    return next(size for size in usable if seconds[size] <= AS_GOOD * min(seconds.values()))


def alternate(
    specs: Mapping[str, dict[str, Any]], rounds: int, say: Callable[[str], Any]
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, Any]]:
    """Steps of several trainers in turn, after a warm-up step of each; and what they said of themselves."""
    steps: dict[str, list[dict[str, Any]]] = {name: [] for name in specs}
    with ExitStack() as stack:
        workers = {name: stack.enter_context(closing(Worker(spec))) for name, spec in specs.items()}
        for number in range(rounds + 1):
            for name in list(specs)[:: 1 if number % 2 else -1]:
                steps[name].append(workers[name].step())
            say(f"round {number} of {rounds}" + (" (warm-up)" if number == 0 else ""))
    return {name: taken[1:] for name, taken in steps.items()}, {name: w.about for name, w in workers.items()}


def run_shape(
    shape: Shape,
    model: Any,  # an id or path, or a configuration as a dictionary (random weights)
    rounds: int,
    micros: Mapping[str, Sequence[int]],  # micro-batch sizes to choose the fastest of, for each trainer
    dtype: str,  # of the weights, float32 or bfloat16
    say: Callable[[str], Any],
    options: Mapping[str, Any],  # settings of a run, by the names of GRPOConfig and trl's ModelConfig
) -> Result:
    """Measure one shape, ours and stock in turn."""
    micro = {who: fastest_micro(shape, who, micros[who], model, dtype, say, options) for who in (STOCK, OURS)}
    computed = "float16" if options.get("fp16") else "bfloat16" if options.get("bf16") else dtype
    matmul = matmul_rate("cuda" if torch.cuda.is_available() else "cpu", computed)
    specs = {who: spec_of(shape, who, micro[who], model, dtype, options) for who in (STOCK, OURS)}
    steps, about = alternate(specs, rounds, lambda text: say(f"{shape.name}: {text}"))

    def medians(name: str) -> dict[str, float]:
        return {who: statistics.median(step[name] for step in steps[who]) for who in specs}

    return Result(
        shape,
        micro,
        {who: {p: statistics.median(s["seconds"][p] for s in steps[who]) for p in PHASES} for who in specs},
        medians("working_mib"),
        medians("peak_mib"),
        {who: statistics.fmean(s["tokens"] for s in steps[who]) for who in specs},
        about[OURS]["flops"],
        matmul,
        rounds,
    )
