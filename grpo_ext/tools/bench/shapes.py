"""`grpo-ext bench`: ours against stock TRL, phase by phase, on the same rollouts.

Each trainer lives in a process of its own (worker.py) and does one optimizer step when it is told to; the
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
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import IO, Any

from rich.table import Table

from ...batching.micro_batches import StepSizes, TokenCost, assign_rows
from ...batching.sizes import even_slice, group_numbers
from ...errors import ConfigError, LaunchError
from ..stock import OURS, STOCK

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
        skewed: exponential lengths (many short, few long) instead of uniform ones; mean: of the exponential, where it
            is not a quarter of the longest.
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
    mean: int | None = None

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
            return min(self.longest, self.shortest + int(source.expovariate(1 / (self.mean or self.longest / 4))))

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
            [sys.executable, "-m", "grpo_ext.tools.bench.worker", json.dumps(spec)],
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
    given = options or {}
    computed = "float16" if given.get("fp16") else "bfloat16" if given.get("bf16") else dtype
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


@dataclass(frozen=True)
class Part:
    """One optimisation: the shape that shows it, and the settings with and without it."""

    name: str
    shape: str
    without: Mapping[str, Any]
    given: Mapping[str, Any] = field(default_factory=dict)


PARTS = (
    Part("packs", "long prompt", {"forward": "padded"}),
    Part("skip_zero_contribution", "half without variance", {"skip_zero_contribution": False}),
    Part("micro_batch_tokens=1024", "ragged answers", {}, {"micro_batch_tokens": 1024}),
    Part("compact_rollouts", "rollout, ragged answers", {"compact_rollouts": False}),
)


@dataclass(frozen=True)
class PartResult:
    """Medians with and without a part: seconds per token of its phases, peak memory beyond the loaded model."""

    part: Part
    seconds: tuple[float, float]
    working_mib: tuple[float, float]

    @property
    def speed_up(self) -> float:
        """Seconds without over seconds with it."""
        return self.seconds[1] / self.seconds[0]


def run_part(
    part: Part, shape: Shape, model: Any, rounds: int, micro: int, dtype: str, say: Callable[[str], Any]
) -> PartResult:
    """Measure one part, with and without in turn, in processes of their own."""
    specs = {
        "with": spec_of(shape, OURS, micro, model, dtype, part.given),
        "without": spec_of(shape, OURS, micro, model, dtype, part.without),
    }
    steps, _ = _alternate(specs, rounds, lambda text: say(f"{part.name}: {text}"))

    def seconds(name: str) -> float:
        tokens = statistics.fmean(s["tokens"] for s in steps[name])
        return statistics.median(sum(s["seconds"][p] for p in shape.phases) for s in steps[name]) / tokens

    def memory(name: str) -> float:
        return statistics.median(s["working_mib"] for s in steps[name])

    return PartResult(part, (seconds("with"), seconds("without")), (memory("with"), memory("without")))


def balance(shape: Shape, processes: int, cost: TokenCost) -> tuple[float, float]:
    """Largest load over the mean, when groups are assigned by cost and by count (planned, not run)."""
    rows = range(shape.groups * shape.group)
    lengths = [length for group in shape.lengths() for length in group]
    sizes = StepSizes(group_numbers(len(rows), shape.group), [shape.prompt] * len(rows), lengths)
    by_count = [even_slice(len(rows), processes, rank) for rank in range(processes)]

    def spread(assigned: Iterable[Sequence[int]]) -> float:
        loads = [sizes.load(mine, cost) for mine in assigned]
        return max(loads) * processes / sum(loads)

    return spread(assign_rows(sizes, rows, processes, cost)), spread(by_count)


def parts_tables(results: Sequence[PartResult], shapes: Sequence[Shape], cost: TokenCost) -> list[Table]:
    """What each part buys, for people."""
    parts = Table(title="grpo_ext with and without one part (medians)")
    for name in ("part", "shape", "ms per token", "without it", "speed-up", "working memory", "without it"):
        parts.add_column(name, justify="left" if name in ("part", "shape") else "right")
    for r in results:
        seconds = [f"{1000 * s:.3f}" for s in r.seconds]
        memory = [f"{m:.0f} MiB" for m in r.working_mib]
        parts.add_row(r.part.name, r.part.shape, *seconds, f"{r.speed_up:.2f}x", *memory)
    assigned = Table(title="balance_by_cost: the largest load over the mean, planned")
    for name in ("shape", "processes", "by cost", "by count"):
        assigned.add_column(name, justify="left" if name == "shape" else "right")
    for shape in shapes:
        for processes in (2, 3, 4):
            assigned.add_row(shape.name, str(processes), *(f"{value:.3f}" for value in balance(shape, processes, cost)))
    return [parts, assigned]


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
