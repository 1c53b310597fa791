"""`grpo-ext check`: trains a few steps under several hardware splits and reports whether each learned the same.

The run is that of recipes/grpo.py without output and evaluation, and in float32 unless the settings name another
precision. Stock TRL under the same splits (`against="trl"`) is the negative control.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers.quantizers.auto import AutoQuantizationConfig
from trl import get_peft_config, get_quantization_config

from ...batching.sizes import Settings, geometry_of
from ...config import GRPOConfig
from ...errors import ConfigError
from ...rewards.registry import resolve_rewards
from ...run.rounding import SAME_UPDATE
from ...settings import named
from ...upstream.argument_checks import find_model
from ..data import load_prompts
from ..options import as_dataclasses, demo_of, fields_of, load_arguments, output_settings
from ..stock import OURS, STOCK
from .comparison import CheckReport, Split, SplitResult, compare
from .runs import Run, RunResult, train


def load_run(run_settings: Settings, folder: Path) -> tuple[Run, str]:
    """Return (the run of these settings, with its data in `folder`; a sentence about it and what it leaves out).

    Settings that name neither a model nor data are those of the demo, here with smaller steps. Without
    `global_batch_size` the step is that of the run on one process.
    """
    demo = demo_of(run_settings)
    defaults: dict[str, Any] = {"bf16": False}
    if demo:
        defaults = {**demo.settings, "global_batch_size": 32, "rollout_chunk_size": 8}
    ignored = output_settings(run_settings)
    without = ignored | {"sequence_parallel_size"}  # of a split; this process alone may not have it
    settings = {**defaults, **{name: value for name, value in run_settings.items() if name not in without}}
    script, training, model = as_dataclasses(settings)
    rewards = tuple(resolve_rewards(script.rewards, training.max_completion_length))
    load = load_arguments(training, model)
    if demo:
        task = demo.load(model.model_name_or_path)
        source, dataset, about = str(task.model_path), task.train_dataset, f"the demo: {task.about}"
    else:
        source = str(model.model_name_or_path)
        find_model(source, load)
        dataset, _ = load_prompts(script, training.seed)
        about = f"{source} on {script.dataset_name}"
    dataset.save_to_disk(str(folder))
    quantization = get_quantization_config(model)
    if (stated := load.pop("quantization_config", None)) is not None and quantization is None:
        quantization = AutoQuantizationConfig.from_dict(stated)
    config = _config(settings, {name: value for name, value in load.items() if name != "dtype"})
    peft: Any = get_peft_config(model)
    run = Run("", source, str(folder), rewards, config, peft=peft, quantization=quantization)
    ignored |= {"dtype"} & {*run_settings, *(training.model_init_kwargs or {})}
    parts = [f"Checking {about}", "all weights" if peft is None else f"LoRA of rank {peft.r}", _precision(run)]
    if ignored:
        parts.append(f"without {', '.join(sorted(ignored))}")
    if not demo and run_settings.get("bf16") is None and run.half is None:
        parts.append("the run itself trains in bfloat16, TRL's default (--bf16 True checks that)")
    return run, "; ".join(parts)


def _config(settings: Settings, load: dict[str, Any]) -> dict[str, Any]:
    """Settings of GRPOConfig, with sizes that no split changes."""
    ours = fields_of(settings, GRPOConfig)
    geometry = geometry_of(ours, 1)
    # one `generate` call per chunk, so that every split trains on the same completions
    sizes = {name: getattr(geometry, name) for name in ("global_batch_size", "rollout_chunk_size")}
    if geometry.steps_per_rollout > 1:
        sizes["rollout_batch_size"] = geometry.rollout_batch_size
    return (
        {name: value for name, value in ours.items() if name not in named("size")} | sizes | {"model_init_kwargs": load}
    )


def _precision(run: Run) -> str:
    if run.half:
        return f"{run.half} as the settings say (--{run.half} False: float32)"
    if run.quantization is None:
        return "float32"
    bits = next((n for n in (4, 8) if getattr(run.quantization, f"load_in_{n}bit", False)), "fewer")
    return f"float32 on weights of {bits} bits"


def splits_of(
    global_batch_size: int,
    processes: Sequence[int],
    sizes: Sequence[int] | None = None,
    sequence_parallel: Sequence[int] = (1,),
) -> list[Split]:
    """Each micro-batch size on each number of processes, with each `sequence_parallel` size that divides the number.

    Without sizes: on the first number of processes, the whole step in one forward, and a size that leaves a remainder;
    on each other number, two equal micro-batches per process if possible, which stock TRL can train too.
    """
    for size in sequence_parallel:
        if all(n % size for n in processes):
            counts = ",".join(map(str, processes))
            raise ConfigError(
                f"sequence_parallel={size} divides none of processes={counts}; use for example processes={size}."
            )
    uneven = next((s for s in range(max(3, global_batch_size // 8), global_batch_size) if global_batch_size % s), 1)
    first, *further = processes
    splits = [Split(global_batch_size, first), Split(uneven, first)]
    splits += [Split(max(1, global_batch_size // (2 * n)), n) for n in further]
    if sizes is not None:
        splits = [Split(size, n) for n in processes for size in sizes]
    splits = [replace(s, sequence_parallel_size=n) for s in splits for n in sequence_parallel if s.processes % n == 0]
    return list(dict.fromkeys(splits))


def check(
    run: Run,
    splits: Sequence[Split],
    folder: Path,
    *,
    steps: int = 3,
    against: str | None = None,
    tolerance: float = SAME_UPDATE,
    bitwise: bool = False,
) -> CheckReport:
    """Train a few steps of a run, which has a `global_batch_size`, under every split; compare with the first split.

    Every split trains into a run folder of its own in `folder`. `bitwise` trains with `bitwise_invariant=True` and
    compares hashes of every tensor after every step.
    """
    if against not in (None, STOCK):
        raise ConfigError(f"against={against!r} is unknown; use 'trl' or nothing.")
    if len(splits) < 2 and against is None:
        raise ConfigError(f"{splits[0]} alone has nothing to be compared with; name two splits, or --against trl.")
    config = {**run.config, "max_steps": steps, "logging_steps": 1}
    if bitwise:
        config["bitwise_invariant"] = True
    for split in splits:
        geometry_of({**config, **split.settings}, split.processes)
    what = f"{len(splits)} splits in {run.half or 'float32'}"
    print(f"{what}, written as processes x completions in a forward", flush=True)
    results: list[SplitResult] = []
    references: dict[str, RunResult] = {}
    for processes in dict.fromkeys(split.processes for split in splits):  # they share a launch
        jobs: list[tuple[Run, Split]] = []
        for trainer in (OURS, STOCK) if against else (OURS,):
            for split in (split for split in splits if split.processes == processes):
                if trainer == STOCK and split.sequence_parallel_size > 1:
                    continue  # it has no such layout
                name = f"{trainer}, {split}"
                settings = {**config, **split.settings, "output_dir": str(folder / name)}
                job = replace(run, name=name, trainer=trainer, config=settings, trace=bitwise)
                jobs.append((job, split))
        for trained, (job, split) in zip(train([job for job, _ in jobs], processes), jobs, strict=True):
            if trained.error is None:
                references.setdefault(job.trainer, trained)
            results.append(compare(job, split, references.get(job.trainer, trained), trained, tolerance))
            print(results[-1], flush=True)
    report = CheckReport(results, steps)
    if all(result.verdict == "refused" for result in report.of(OURS)):
        raise ConfigError(f"no split could be trained: {report.of(OURS)[0].reason}")
    return report
