"""The run that `grpo-ext check` trains: that of recipes/grpo.py without output and evaluation, and in float32 unless
the settings name another precision."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.quantizers.auto import AutoQuantizationConfig
from trl import get_peft_config, get_quantization_config

from ...batching.sizes import geometry_of
from ...checks.model import find_model
from ...config import GRPOConfig
from ...rewards.registry import resolve_rewards
from ..data import load_prompts
from ..options import as_dataclasses, demo_of, fields_of, load_arguments, output_settings
from .runs import Run

# settings of a split, and other names of the two global sizes
_SIZES = ("per_device_train_batch_size", "gradient_accumulation_steps", "generation_batch_size", "steps_per_generation")


def load_run(run_settings: Mapping[str, Any], folder: Path) -> tuple[Run, str]:
    """Return (the run of these settings, with its data in `folder`; a sentence about it and what it leaves out).

    Settings that name neither a model nor data are those of the demo, here with smaller steps. Without
    `global_batch_size` the step is that of the run on one process. A ConfigError or DataError if the run is refused.
    """
    demo = demo_of(run_settings)
    defaults: dict[str, Any] = {"bf16": False}
    if demo:
        defaults = {**demo.settings, "global_batch_size": 32, "rollout_chunk_size": 8}
    ignored = output_settings(run_settings)
    settings = {**defaults, **{name: value for name, value in run_settings.items() if name not in ignored}}
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


def _config(settings: Mapping[str, Any], load: dict[str, Any]) -> dict[str, Any]:
    """Settings of GRPOConfig, with sizes that no split changes."""
    geometry = geometry_of(fields_of(settings, GRPOConfig), 1)
    config = {name: value for name, value in fields_of(settings, GRPOConfig).items() if name not in _SIZES}
    config["global_batch_size"] = geometry.global_batch_size
    # one `generate` call per chunk, so that every split trains on the same completions
    config["rollout_chunk_size"] = geometry.rollout_chunk_size
    if geometry.steps_per_rollout > 1:
        config["rollout_batch_size"] = geometry.rollout_batch_size
    return {**config, "model_init_kwargs": load}


def _precision(run: Run) -> str:
    if run.half:
        return f"{run.half} as the settings say (--{run.half} False: float32)"
    if run.quantization is None:
        return "float32"
    bits = next((n for n in (4, 8) if getattr(run.quantization, f"load_in_{n}bit", False)), "fewer")
    return f"{'float32' if run.in_float32 else 'bfloat16'} on weights of {bits} bits"
