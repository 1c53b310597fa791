"""`grpo-ext bench`: ours against stock TRL, phase by phase, on the same rollouts.

Each trainer lives in a process of its own (tools.bench_worker) and does one optimizer step when it is told to; the
steps of the two alternate, so that a slow moment of the machine hits both, and only one of them is ever busy. Medians
over the rounds are compared, after a warm-up step of each.
"""

from __future__ import annotations

import dataclasses
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from ..errors import ConfigError

PHASES = ("rollout", "log-probs", "forward/backward", "optimizer")
OURS, STOCK = "grpo_ext", "TRL"


@dataclass(frozen=True)
class Shape:
    """What one optimizer step trains on.

    Attributes:
        prompt: tokens of each prompt.
        shortest, longest: tokens of the completions.
        skewed: exponential lengths (many short, few long) instead of uniform ones.
        groups, group: prompts per step, completions per prompt.
        without_variance: share of the groups whose rewards are all equal.
        lora, checkpointing: train an adapter, recompute activations.
        sample: time the sampling of completions instead of training on given ones.
    """

    name: str
    prompt: int
    shortest: int
    longest: int
    skewed: bool = False
    groups: int = 4
    group: int = 8
    without_variance: float = 0.0
    lora: bool = False
    checkpointing: bool = False
    sample: bool = False

    def lengths(self) -> list[list[int]]:
        """Completion lengths of every group, the same on every call."""
        source = random.Random(f"{self.name}:{self.longest}")

        def one() -> int:
            if not self.skewed:
                return source.randint(self.shortest, self.longest)
            return min(self.longest, self.shortest + int(source.expovariate(4 / self.longest)))

        return [[one() for _ in range(self.group)] for _ in range(self.groups)]


REFERENCE = (
    Shape("long prompt", 512, 32, 256),
    Shape("ragged answers", 64, 64, 768, skewed=True),
    Shape("half without variance", 512, 32, 256, without_variance=0.5),
    Shape("short everything", 16, 8, 16),
    Shape("long prompt, LoRA + checkpointing", 512, 32, 256, lora=True, checkpointing=True),
    Shape("rollout, ragged answers", 64, 1, 768, skewed=True, sample=True),
)

# 28 million weights: hidden 512, 8 layers, vocabulary 8192
REFERENCE_MODEL: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1280,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


def parse_shape(text: str) -> Shape:
    """A shape from text like `prompt=512,completions=32-256,group=8,groups=4,skewed,lora,checkpointing,sample`.

    Raises:
        ConfigError: unknown words or values.
    """
    values: dict[str, Any] = {"name": text}
    for word in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = word.partition("=")
        try:
            if key == "completions":
                low, _, high = value.partition("-")
                values |= {"shortest": int(low), "longest": int(high or low)}
            elif key in ("skewed", "lora", "checkpointing", "sample") and not value:
                values[key] = True
            elif key == "without_variance":
                values[key] = float(value)
            elif key in ("prompt", "group", "groups"):
                values[key] = int(value)
            elif key == "name":
                values[key] = value
            else:
                raise ValueError
        except ValueError:
            raise ConfigError(
                f"{word!r} in the shape {text!r} is unknown; use prompt=N, completions=N-N, group=N, groups=N, "
                "without_variance=0.5, name=..., skewed, lora, checkpointing, sample."
            ) from None
    if not {"prompt", "shortest"} <= values.keys():
        raise ConfigError(f"the shape {text!r} needs prompt=N and completions=N-N.")
    return Shape(**values)


class Worker:
    """A process that holds one trainer and runs a step when asked."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "grpo_ext.tools.bench_worker", json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.about = self._read()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the benchmark's worker ended with status {self.process.wait()}; see its message above")
        result: dict[str, Any] = json.loads(line)
        return result

    def step(self) -> dict[str, Any]:
        """Run one optimizer step (or sample one rollout); what it took."""
        assert self.process.stdin is not None
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()


@dataclass(frozen=True)
class Result:
    """Medians of one shape.

    Attributes:
        micro: completions per forward of each trainer, the best of those tried.
        seconds: for each trainer and phase.
        working_mib, peak_mib: peak memory of a step beyond the process with its model loaded (so with gradients,
            optimizer state and activations), and all of it.
        tokens: unique tokens of the completions and prompts that are trained on (or sampled).
        flops: multiply-adds times two that those tokens need, forward and backward.
        matmul: floating point operations per second of large matrix products on this machine.
    """

    shape: Shape
    micro: dict[str, int]
    seconds: dict[str, dict[str, float]]
    working_mib: dict[str, float]
    peak_mib: dict[str, float]
    tokens: dict[str, float]
    flops: float
    matmul: float
    rounds: int

    @property
    def speed_up(self) -> float:
        """Stock TRL's seconds per token over ours, in the phases that the shape is about."""
        names = PHASES[:1] if self.shape.sample else PHASES[1:]
        seconds = {who: sum(self.seconds[who][name] for name in names) for who in (OURS, STOCK)}
        return seconds[STOCK] / self.tokens[STOCK] / (seconds[OURS] / self.tokens[OURS])

    def matmul_share(self, who: str) -> float:
        """Share of the machine's matrix-product rate that the useful tokens of forward and backward reach."""
        return self.flops / self.seconds[who]["forward/backward"] / self.matmul


def matmul_rate(device: str, dtype: str) -> float:
    """Floating point operations per second of large matrix products, the best of a few."""
    import torch

    a = torch.randn(2048, 2048, device=device, dtype=getattr(torch, dtype))
    best = 0.0
    for _ in range(12):
        start = time.perf_counter()
        for _ in range(3):
            a @ a
        if device == "cuda":
            torch.cuda.synchronize()
        best = max(best, 3 * 2 * 2048**3 / (time.perf_counter() - start))
    return best


def _spec(shape: Shape, who: str, micro: int, model: Any, dtype: str) -> dict[str, Any]:
    return {"shape": dataclasses.asdict(shape), "who": who, "micro": micro, "model": model, "dtype": dtype}


def _best_micro(shape: Shape, who: str, sizes: Sequence[int], model: Any, dtype: str, say: Callable[[str], Any]) -> int:
    """The fastest micro-batch size, by the second step of each."""
    usable = sorted({size for size in sizes if (shape.groups * shape.group) % size == 0})
    if len(usable) == 1 or shape.sample:
        return usable[-1]
    seconds = {}
    for size in usable:
        worker = Worker(_spec(shape, who, size, model, dtype))
        try:
            worker.step()
            seconds[size] = sum(worker.step()["seconds"].values())
        finally:
            worker.close()
        say(f"{shape.name}: {who} with micro-batches of {size}: {seconds[size]:.2f} s")
    return min(usable, key=lambda size: seconds[size])


def run_shape(
    shape: Shape, model: Any, rounds: int, micros: Mapping[str, Sequence[int]], dtype: str, say: Callable[[str], Any]
) -> Result:
    """Measure one shape, ours and stock in turn.

    Args:
        model: a model id or path, or a configuration as a dictionary (random weights).
        micros: micro-batch sizes to choose the fastest of, for each trainer.
    """
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    micro = {who: _best_micro(shape, who, micros[who], model, dtype, say) for who in (STOCK, OURS)}
    matmul = matmul_rate(device, dtype)
    workers = {who: Worker(_spec(shape, who, micro[who], model, dtype)) for who in (STOCK, OURS)}
    steps: dict[str, list[dict[str, Any]]] = {STOCK: [], OURS: []}
    try:
        for number in range(rounds + 1):
            for who in (STOCK, OURS) if number % 2 else (OURS, STOCK):
                steps[who].append(workers[who].step())
            say(f"{shape.name}: round {number} of {rounds}" + (" (warm-up)" if number == 0 else ""))
    finally:
        for worker in workers.values():
            worker.close()

    def median(who: str, get: Callable[[dict[str, Any]], float]) -> float:
        return statistics.median(get(step) for step in steps[who][1:])

    both = (STOCK, OURS)
    return Result(
        shape,
        micro,
        {who: {p: median(who, lambda s, p=p: s["seconds"][p]) for p in PHASES} for who in both},  # type: ignore[misc]
        {who: median(who, lambda s: s["working_mib"]) for who in both},
        {who: median(who, lambda s: s["peak_mib"]) for who in both},
        {who: statistics.fmean(s["tokens"] for s in steps[who][1:]) for who in both},
        workers[OURS].about["flops"],
        matmul,
        rounds,
    )


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
    compared = Table(title="grpo_ext against TRL, both at their best micro-batch size")
    for name in ("shape", "speed-up", "working memory", "peak memory", "useful matmul share", "bound (s)"):
        compared.add_column(name, justify="left" if name == "shape" else "right")
    for r in results:
        share = "-" if r.shape.sample else f"{r.matmul_share(STOCK):.0%} -> {r.matmul_share(OURS):.0%}"
        compared.add_row(
            r.shape.name,
            f"{r.speed_up:.2f}x",
            f"{r.working_mib[OURS] / max(r.working_mib[STOCK], 1):.2f}x",
            f"{r.peak_mib[OURS] / r.peak_mib[STOCK]:.2f}x",
            share,
            "-" if r.shape.sample else f"{r.flops / r.matmul:.2f}",
        )
    return [phases, compared]


def write_json(results: Sequence[Result], path: Path) -> None:
    """All figures, for machines."""
    rows = [dataclasses.asdict(r) | {"speed_up": r.speed_up} for r in results]
    path.write_text(json.dumps(rows, indent=1) + "\n")


def write_plot(results: Sequence[Result], path: Path) -> None:
    """Seconds per step of both, stacked by phase.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise ConfigError("the plot needs matplotlib; install it with `pip install grpo_ext[plot]`.") from None
    figure, axes = pyplot.subplots(1, len(results), figsize=(2.6 * len(results), 4), squeeze=False)
    colours = ("tab:blue", "tab:orange", "tab:green", "tab:red")
    for axis, r in zip(axes[0], results):
        for bar, who in enumerate((STOCK, OURS)):
            bottom = 0.0
            for colour, phase in zip(colours, PHASES):
                seconds = r.seconds[who][phase]
                axis.bar(bar, seconds, bottom=bottom, color=colour, label=phase if bar == 0 else None)
                bottom += seconds
        axis.set_xticks([0, 1], [STOCK, OURS])
        axis.set_title(f"{r.shape.name}\n{r.speed_up:.1f}x", fontsize=8)
    axes[0][0].set_ylabel("seconds per step")
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
