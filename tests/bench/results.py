"""What was measured of a shape: as tables, and as the file of `make bench --json`."""

import dataclasses
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import psutil
import torch
from rich.table import Table

from grpo_ext.run.log import versions
from grpo_ext.tools.stock import OURS, STOCK

from .shapes import PHASES, Shape


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
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "settings": dict(settings),
        "results": [dataclasses.asdict(r) | {"speed_up": r.speed_up} for r in results],
    }
    return json.loads(json.dumps(record, default=str))
