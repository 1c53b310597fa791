"""`make bench`: ours against stock TRL, phase by phase, on the same rollouts.

Each trainer lives in a process of its own (worker.py) and does one optimizer step when it is told to; the
steps of the two alternate, so that a slow moment of the machine hits both, and only one of them is ever busy. Medians
over the rounds are compared, after a warm-up step of each.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import IO, Any

from rich.table import Table

from grpo_ext.errors import ConfigError, LaunchError
from grpo_ext.tools.stock import OURS, STOCK

MOST = 8192  # padded tokens of a micro-batch that is tried; larger ones of the reference model fill the memory
MICRO = (1, 2, 4, 8, 16, 32)  # micro-batch sizes that are tried where none are named
AS_GOOD = 1.03  # a micro-batch size is as good as the fastest if it takes no more than this times its seconds
PHASES = ("rollout", "log-probs", "forward/backward", "optimizer")


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
        whole: sample, and train on what was sampled.
        model: name of the model in `MODELS`, where none is asked for.
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
    whole: bool = False
    model: str = "reference"

    @property
    def samples(self) -> bool:
        """Whether completions are sampled, and so end where they end."""
        return self.sample or self.whole

    @property
    def phases(self) -> tuple[str, ...]:
        """What it is about."""
        return PHASES if self.whole else PHASES[:1] if self.sample else PHASES[1:]

    def lengths(self) -> list[list[int]]:
        """Completion lengths of every group, the same on every call."""
        source = random.Random(f"{self.name}:{self.longest}")

        def one() -> int:
            if not self.skewed:
                return source.randint(self.shortest, self.longest)
            return min(self.longest, self.shortest + int(source.expovariate(1 / (self.longest / 4))))

        return [[one() for _ in range(self.group)] for _ in range(self.groups)]


REFERENCE = (
    Shape("long prompt", 512, 32, 256),
    Shape("ragged answers", 64, 64, 768, skewed=True),
    Shape("half without variance", 512, 32, 256, without_variance=0.5),
    Shape("short everything", 16, 8, 16),
    Shape("long prompt, LoRA + checkpointing", 512, 32, 256, lora=True, checkpointing=True),
    Shape("rollout, ragged answers", 64, 1, 768, skewed=True, sample=True),
    Shape("real vocabulary, whole step", 40, 1, 45, groups=8, whole=True, model="smollm2-135m"),
)

# a quarter of an hour: half the groups, one phase each, and the micro-batches that were fastest in the long form, of
# stock TRL and of ours
SHORT = {
    Shape("long prompt, 2 groups", 512, 32, 256, groups=2): (2, 8),
    Shape("ragged answers, 2 groups", 64, 64, 768, skewed=True, groups=2): (1, 4),
    Shape("short everything", 16, 8, 16): (32, 32),
    Shape("rollout, ragged answers, 2 groups", 64, 1, 384, skewed=True, groups=2, sample=True): (16, 16),
    Shape("real vocabulary, 2 groups", 40, 1, 45, groups=2, whole=True, model="smollm2-135m"): (8, 16),
}

MODELS: dict[str, dict[str, Any]] = {
    "reference": {  # 28 million weights
        "model_type": "qwen2",
        "vocab_size": 8192,
        "hidden_size": 512,
        "intermediate_size": 1280,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
    "smollm2-135m": {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
}


def parse_shape(text: str) -> Shape:
    """A shape from text like `prompt=512,completions=32-256,group=8,groups=4,skewed,lora,checkpointing,sample`.

    Raises:
        ConfigError: unknown words or values.
    """
    values: dict[str, Any] = {"name": text}
    kinds = {"prompt": int, "group": int, "groups": int, "without_variance": float, "name": str}
    for word in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = word.partition("=")
        try:
            if key == "completions":
                low, _, high = value.partition("-")
                values |= {"shortest": int(low), "longest": int(high or low)}
            elif key in ("skewed", "lora", "checkpointing", "sample", "whole") and not value:
                values[key] = True
            else:
                values[key] = kinds[key](value)
        except (KeyError, ValueError):
            raise ConfigError(
                f"{word!r} in the shape {text!r} is unknown; use prompt=N, completions=N-N, group=N, groups=N, "
                "without_variance=0.5, name=..., skewed, lora, checkpointing, sample, whole."
            ) from None
    if not {"prompt", "shortest"} <= values.keys():
        raise ConfigError(f"the shape {text!r} needs prompt=N and completions=N-N.")
    return Shape(**values)


class Worker:
    """A process that holds one trainer and runs a step when asked.

    Args:
        seconds: how long it may live.
        errors: a file for what it says.
    """

    def __init__(self, spec: dict[str, Any], seconds: float | None = None, errors: IO[str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.bench.worker", json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        if seconds is not None:
            end = threading.Timer(seconds, self.process.kill)
            end.daemon = True
            end.start()
        self.about = self._read()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise LaunchError(f"the benchmark's worker ended with status {self.process.wait()}; see its message above")
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
        with self.process:  # waits, and closes the pipes
            self.process.kill()


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
        seconds = {who: sum(self.seconds[who][name] for name in self.shape.phases) for who in (OURS, STOCK)}
        return seconds[STOCK] / self.tokens[STOCK] / (seconds[OURS] / self.tokens[OURS])

    def matmul_share(self, who: str) -> float:
        """Share of the machine's matrix-product rate that the useful tokens of forward and backward reach."""
        return self.flops / self.seconds[who]["forward/backward"] / self.matmul


def matmul_rate(device: str, dtype: str) -> float:
    """Floating point operations per second of large matrix products, the best of a few."""
    import torch
    from torch.utils.benchmark import Timer

    a = torch.randn(2048, 2048, device=device, dtype=getattr(torch, dtype))
    timer = Timer("a @ a", globals={"a": a}, num_threads=torch.get_num_threads())
    return 2 * 2048**3 / min(timer.timeit(3).mean for _ in range(12))


def spec_of(
    shape: Shape, who: str, micro: int, model: Any, dtype: str, options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What a worker is told; `options` go to GRPOConfig and trl's ModelConfig, as far as the trainer has them."""
    shared = {"shape": dataclasses.asdict(shape), "model": model, "dtype": dtype}
    return {**shared, "who": who, "micro": micro, "options": dict(options or {})}


def _best_micro(
    shape: Shape,
    who: str,
    sizes: Sequence[int],
    model: Any,
    dtype: str,
    say: Callable[[str], Any],
    options: Mapping[str, Any] | None = None,
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


def _alternate(
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
    return {name: found[1:] for name, found in steps.items()}, {name: w.about for name, w in workers.items()}


def run_shape(
    shape: Shape,
    model: Any,
    rounds: int,
    micros: Mapping[str, Sequence[int]],
    dtype: str,
    say: Callable[[str], Any],
    options: Mapping[str, Any] | None = None,
) -> Result:
    """Measure one shape, ours and stock in turn.

    Args:
        model: a model id or path, or a configuration as a dictionary (random weights).
        micros: micro-batch sizes to choose the fastest of, for each trainer.
        dtype: of the weights, float32 or bfloat16.
        options: settings of a run, by the names of GRPOConfig and trl's ModelConfig.
    """
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    micro = {who: _best_micro(shape, who, micros[who], model, dtype, say, options) for who in (STOCK, OURS)}
    settings = options or {}
    computed = "float16" if settings.get("fp16") else "bfloat16" if settings.get("bf16") else dtype
    matmul = matmul_rate(device, computed)
    specs = {who: spec_of(shape, who, micro[who], model, dtype, options) for who in (STOCK, OURS)}
    steps, about = _alternate(specs, rounds, lambda text: say(f"{shape.name}: {text}"))
    return Result(
        shape,
        micro,
        {who: {p: statistics.median(s["seconds"][p] for s in steps[who]) for p in PHASES} for who in specs},
        {who: statistics.median(s["working_mib"] for s in steps[who]) for who in specs},
        {who: statistics.median(s["peak_mib"] for s in steps[who]) for who in specs},
        {who: statistics.fmean(s["tokens"] for s in steps[who]) for who in specs},
        about[OURS]["flops"],
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


def record_of(results: Sequence[Result], settings: Mapping[str, Any]) -> dict[str, Any]:
    """All figures as plain values, with when, on what, with what and how they were measured."""
    import torch

    from grpo_ext.run.manifest import versions

    found = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": {
            "system": platform.platform(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
        "versions": versions(),
        "settings": dict(settings),
        "results": [dataclasses.asdict(r) | {"speed_up": r.speed_up} for r in results],
    }
    return json.loads(json.dumps(found, default=str))
