"""What `grpo-ext check` trains, from the settings of a run as recipes/grpo.py takes them: the run itself, but for what
it writes and evaluates, and in float32 where the settings do not name another precision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from peft import PeftConfig
from transformers.quantizers.auto import AutoQuantizationConfig
from trl import get_peft_config, get_quantization_config

from ...batching.sizes import geometry_of
from ...checks import find_model
from ...config import GRPOConfig
from ...rewards.registry import resolve_rewards
from ..data import load_prompts
from ..options import (
    as_dataclasses,
    demo_defaults,
    fields_of,
    is_demo,
    load_arguments,
    load_demo_named,
    written,
)

# other names of the two sizes
_SIZES = ("gradient_accumulation_steps", "generation_batch_size", "steps_per_generation")


@dataclass(frozen=True)
class Task:
    """What a check trains.

    Attributes:
        model: folder or id of a model with its tokenizer.
        dataset: a `datasets.Dataset` with a `prompt` column.
        rewards: reward functions.
        settings: of GRPOConfig.
        peft: the adapter; None for full training.
        quantization: a BitsAndBytesConfig, or None.
        about: the task in words, with what of the settings a check leaves out.
    """

    model: str
    dataset: Any
    rewards: Sequence[Any]
    settings: dict[str, Any]
    peft: PeftConfig | None = None
    quantization: Any = None
    about: str = ""


def load_task(given: Mapping[str, Any]) -> Task:
    """The task of a run's settings; the demo, with smaller steps, where they name neither a model nor data.

    Without `global_batch_size` the step is that of the run on one process.

    Raises:
        ConfigError: a setting is refused, or half a task is named. DataError: rows that cannot be trained on.
    """
    demo = is_demo(given)
    defaults = {**demo_defaults(given), "global_batch_size": 32, "rollout_chunk_size": 8} if demo else {"bf16": False}
    left_out = written(given)
    used = {name: value for name, value in given.items() if name not in left_out}
    script, training, model = as_dataclasses({**defaults, **used})
    rewards = resolve_rewards(script.rewards, training.max_completion_length)
    settings = fields_of({**defaults, **used}, GRPOConfig)
    geometry = geometry_of(settings, 1)
    settings = {name: value for name, value in settings.items() if name not in _SIZES}
    settings["global_batch_size"] = geometry.global_batch_size
    if geometry.steps_per_rollout > 1:
        settings["rollout_batch_size"] = geometry.rollout_batch_size
    if demo:
        task = load_demo_named(script, model)
        source, dataset, about = str(task.model_path), task.train_dataset, f"the demo: {task.about}"
    else:
        source = str(model.model_name_or_path)
        find_model(source, load_arguments(training, model))
        dataset = load_prompts(script, training.seed)[0]
        about = f"{source} on {script.dataset_name}"
    settings["model_init_kwargs"] = {n: v for n, v in load_arguments(training, model).items() if n != "dtype"}
    adapter: Any = get_peft_config(model)
    about += ", all weights" if adapter is None else f", LoRA of rank {adapter.r}"
    quantized = get_quantization_config(model)
    if quantized is None and (stated := settings["model_init_kwargs"].pop("quantization_config", None)) is not None:
        quantized = AutoQuantizationConfig.from_dict(stated)
    bits = next((n for n in (4, 8) if getattr(quantized, f"load_in_{n}bit", False)), "fewer")
    if quantized is not None:
        about += f" (in {'float32' if training.float32_adapters else 'bfloat16'}) on weights of {bits} bits"
    half = next((name for name in ("fp16", "bf16") if settings.get(name)), None)
    about += f", {half} as the settings say (float32: --{half} False)" if half else ", in float32"
    ignored = sorted(left_out | {*given, *(training.model_init_kwargs or {})} & {"dtype"})
    about += f", rollout_lag={lag}" if (lag := settings.get("rollout_lag")) else ""
    about += f"; without {', '.join(ignored)}" if ignored else ""
    if not half and not demo and given.get("bf16") is None:
        about += ". The run itself trains in bfloat16, TRL's default: --bf16 True checks that"
    return Task(source, dataset, rewards, settings, adapter, quantized, f"Checking {about}")
