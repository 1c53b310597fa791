"""Steps of a trainer in a process of its own (tests/bench/worker.py): seconds by phase, and memory.

Ours cuts a micro-batch that does not fit by itself, stock TRL is started again with half of it.
"""

import dataclasses
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import AutoConfig

from grpo_ext.batching.sizes import geometry_of
from grpo_ext.errors import LaunchError
from grpo_ext.tools import memory, plan
from grpo_ext.tools.stock import OURS
from tests.bench.measuring import Worker, spec_of
from tests.bench.shapes import MODELS as REAL
from tests.bench.shapes import Shape, decoder

from .results import DONE, FAILED, LATE, OF_SAMPLING, RUNNING, TOO_LARGE, WAITING, of_memory, reason_in, worst

ROUNDS = 3
BATCHED = "use_transformers_continuous_batching"
LORA_RANK = 16  # trl's default
WARM_UP_TOKENS = 8  # of a completion, the first time that a process samples
BUSY_MIB = 2048  # beyond a process's context: something else has memory of the device
QWEN3 = {  # hidden, inner, layers, heads, heads of keys
    "qwen3-0.6b": (1024, 3072, 28, 16, 8),
    "qwen3-1.7b": (2048, 6144, 28, 16, 8),
    "qwen3-4b": (2560, 9728, 36, 32, 8),
}
MODELS = {
    **REAL,
    **{name: decoder("qwen3", 151936, *sizes, positions=40960) | {"head_dim": 128} for name, sizes in QWEN3.items()},
    "toy": decoder("qwen2", 512, 56, 64, 2, 14, 2),
}


@dataclass(frozen=True)
class Run:
    """Steps of one trainer."""

    shape: Shape
    who: str
    note: str = ""  # what sets it apart from other runs of the shape and trainer
    options: Mapping[str, Any] = field(default_factory=dict)
    model: str = "qwen2.5-0.5b"
    micro: int | None = None  # completions of a micro-batch; None: as many as fit
    rounds: int = ROUNDS
    warm_up: int = 1  # steps before those that count
    published: Mapping[str, Any] = field(default_factory=dict)  # figures of others for this workload

    @property
    def name(self) -> str:
        return f"{self.shape.name}: {self.who}" + (f", {self.note}" if self.note else "")


def toy(run: Run) -> Run:
    """The same run at toy size."""
    shape = run.shape
    sizes = {
        "prompt": min(shape.prompt, 16),
        "shortest": 8 if shape.shortest == shape.longest else 4,
        "longest": 8,
        "groups": max(shape.groups // 4, 1),
        "group": min(shape.group, 4),
    }
    small = replace(shape, **sizes)
    micro = None if run.micro is None else min(run.micro, small.groups * small.group)
    # else continuous batching takes half of the machine's memory for its keys and values
    cache = {"transformers_continuous_batching_config": {"num_blocks": 64, "max_batch_tokens": 64}}
    options = {**run.options, **(cache if BATCHED in run.options else {})}
    return replace(run, shape=small, model="toy", micro=micro, options=options)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run_steps(
    runs: list[Run], ratios: Mapping[str, tuple[str, str]], device_mib: float | None, seconds: float, save: Callable
) -> None:
    """Fill in what the runs came to, within these seconds; `save` takes the part after every run."""
    shapes = [dataclasses.asdict(shape) for shape in {run.shape: None for run in runs}]
    outcomes: dict[str, dict[str, Any]] = {run.name: {"status": WAITING} for run in runs}
    part: dict[str, Any] = {"status": RUNNING, "shapes": shapes, "runs": outcomes, "ratios": {}}
    end = time.monotonic() + seconds
    for done, run in enumerate(runs):
        left = end - time.monotonic()
        allowed = min(left, 1.5 * left / (len(runs) - done))
        outcomes[run.name] = measure(run, time.monotonic() + allowed, device_mib)
        measured = {name: values["seconds"] for name, values in outcomes.items() if values["status"] == DONE}
        pairs = {name: pair for name, pair in ratios.items() if measured.keys() >= {*pair}}
        part["ratios"] = {name: measured[one] / measured[other] for name, (one, other) in pairs.items()}
        save(part)
    part["status"] = worst([values["status"] for values in outcomes.values()])
    if part["status"] != DONE:
        part["reason"] = "; ".join(f"{name}: {one['reason']}" for name, one in outcomes.items() if "reason" in one)
    save(part)


def measure(run: Run, end: float, device_mib: float | None) -> dict[str, Any]:
    """Medians of the steps, at the micro-batch that is asked for or the largest that fits."""
    model, rows = MODELS[run.model], run.shape.groups * run.shape.group
    options = {"bf16": True, **run.options}
    more = {"warm_up_tokens": WARM_UP_TOKENS} if run.shape.sample and run.warm_up else {}
    result: dict[str, Any] = {"published": dict(run.published)} if run.published else {}
    trains = run.who == OURS and not run.shape.samples
    if trains and run.micro is not None:  # before anything is loaded
        result["planned_mib"] = planned_mib(run.shape, "packed", run.micro, model)
        if device_mib is not None and result["planned_mib"] > device_mib:
            reason = f"plan expects {result['planned_mib']:.0f} MiB, and the device has {device_mib:.0f}"
            return result | {"status": TOO_LARGE, "reason": reason}
    # all rows are sampled together, whatever a micro-batch has
    halves = [rows] if run.shape.samples else [rows >> n for n in range(rows.bit_length())]
    sizes = halves if run.micro is None else [run.micro]
    for micro in sizes:
        spec = spec_of(run.shape, run.who, micro, model, "float32", options) | more
        about, steps, error = _steps(run, spec, end)
        fits = error is None or not of_memory(error) or time.monotonic() > end
        if fits or micro == sizes[-1]:
            break
        say(f"{run.name}: {micro} completions do not fit")
    if "in_use_mib" in about:  # another process takes memory and time
        result["in_use_mib"] = about["in_use_mib"]
        if about["in_use_mib"] > BUSY_MIB:
            say(f"warning: {run.name} started with {about['in_use_mib']:.0f} MiB of the device in use")
    if len(steps) > run.warm_up:
        micro, form = steps[-1].get("micro", micro), steps[-1].get("form", "padded")
        result |= summary(steps[run.warm_up :], run.shape.sample) | {"form": form, "micro_batch": micro}
        if trains:
            result["planned_mib"] = planned_mib(run.shape, form, micro, model)
    if error is None:
        result["status"] = DONE
    else:
        late = time.monotonic() > end
        result["status"] = LATE if late else FAILED if fits else TOO_LARGE
        result["reason"] = "out of time" if late else error
    say(f"{run.name}: {result}")
    return result


def _steps(run: Run, spec: dict[str, Any], end: float) -> tuple[dict[str, Any], list[dict[str, Any]], str | None]:
    """What the process says of itself, what each step took, and the error that ended them."""
    about: dict[str, Any] = {}
    steps: list[dict[str, Any]] = []
    with tempfile.TemporaryFile("w+") as errors:
        try:
            with closing(Worker(spec, max(end - time.monotonic(), 1), errors)) as worker:
                about = worker.about
                for _ in range(run.warm_up + run.rounds):
                    steps.append(worker.step())
        except (LaunchError, OSError) as error:  # it ended, or was ended
            errors.seek(0)
            return about, steps, reason_in(errors.read()) or str(error)
    return about, steps, None


def planned_mib(shape: Shape, form: Any, micro: int, model: dict[str, Any]) -> float:
    """What `grpo-ext plan` foresees for training with these micro-batches."""
    sizes = {"global_batch_size": shape.groups * shape.group, "num_generations": shape.group}
    geometry = geometry_of(sizes | {"per_device_train_batch_size": micro}, 1)
    tokens = plan.largest_micro_batch(geometry, shape.prompt, shape.longest, form, None)
    layout = memory.MemoryLayout("ddp", 1, tokens, sampled_tokens=0, checkpointing=shape.checkpointing)
    rank = LORA_RANK if shape.lora else None
    return memory.memory_of(plan.sizes_of(AutoConfig.for_model(**model), lora_rank=rank), layout)["training"] / 2**20


def summary(steps: list[dict[str, Any]], is_sampling: bool = False) -> dict[str, Any]:
    """Medians. `seconds` are those of a whole step, as others give them, or those of sampling alone."""
    phases = {name: statistics.median(step["seconds"][name] for step in steps) for name in steps[0]["seconds"]}
    seconds = phases["rollout"] if is_sampling else statistics.median(step["wall"] for step in steps)
    peaks = {
        name: statistics.median(step[name] for step in steps)
        for name in ("peak_mib", "working_mib", "peak_reserved_mib")
        if name in steps[0]
    }
    numerics = {name: steps[-1][name] for name in OF_SAMPLING if name in steps[-1]}
    rate = steps[0]["tokens"] / seconds
    return {"steps": len(steps), "seconds": seconds, "phases": phases, "tokens_per_second": rate, **peaks, **numerics}
