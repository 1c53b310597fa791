"""`grpo-ext bench` of a run: its model, sizes and precision from the settings that recipes/grpo.py takes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from trl import ModelConfig

from ...batching.sizes import ceil_div
from ...errors import ConfigError
from ..options import as_dataclasses, demo_defaults, is_demo, load_data, load_demo_named, part
from .shapes import Shape

# settings of GRPOConfig that decide how long a step takes, beside its sizes
_OF_SPEED = (
    *("bf16", "fp16", "optim", "beta", "loss_type", "importance_sampling_level", "top_entropy_quantile"),
    *("gradient_checkpointing_kwargs", "recompute_granularity", "micro_batch_tokens", "forward", "packed_forward"),
    *("score_completions_only", "skip_zero_contribution", "compact_rollouts", "bitwise_invariant"),
)
_ROWS = 256  # prompts that are measured


def options_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that both trainers of a bench are given, as far as they have them.

    Raises:
        ConfigError: a type of the weights that a bench does not have.
    """
    if settings.get("dtype", "float32") not in ("float32", "bfloat16"):
        raise ConfigError(f"dtype={settings['dtype']!r}: a bench has weights in float32 or bfloat16; use one of them.")
    used = {**part(settings, ModelConfig), **{name: settings[name] for name in _OF_SPEED if name in settings}}
    return {name: value for name, value in used.items() if name not in ("model_name_or_path", "dtype")}


def prompt_tokens(dataset: Any, model: str) -> int:
    """Tokens of a prompt, the mean over the first rows, with the chat template where prompts are messages."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    lengths = []
    for prompt in dataset[:_ROWS]["prompt"]:
        if not isinstance(prompt, str):
            prompt = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        lengths.append(len(tokenizer(prompt, add_special_tokens=False)["input_ids"]))
    return max(1, round(statistics.fmean(lengths)))


def shape_of(
    settings: Mapping[str, Any], name: str, prompt_length: int | None, mean_completion_length: int | None
) -> tuple[Shape, str, dict[str, Any]]:
    """(shape, model, options for `run_shape`) of one optimizer step of a run.

    Args:
        prompt_length: tokens; None measures the run's data.
        mean_completion_length: tokens; None is half of `max_completion_length`.

    Raises:
        ConfigError: a setting is refused, or half a task is named. DataError: rows that cannot be trained on.
    """
    demo = is_demo(settings)
    settings = {**(demo_defaults(settings) if demo else {}), **settings}
    script, training, model = as_dataclasses(settings)
    task = load_demo_named(script, model) if demo else None
    source = str(task.model_path if task else model.model_name_or_path)
    if prompt_length is None:
        prompt_length = prompt_tokens(task.train_dataset if task else load_data(script, training.seed)[0], source)
    longest, group = training.max_completion_length or 512, training.num_generations or 8
    groups = ceil_div(training.geometry.global_batch_size, group)
    rows, micro = groups * group, training.per_device_train_batch_size
    shape = Shape(
        name,
        prompt_length,
        1,
        longest,
        skewed=True,
        groups=groups,
        group=group,
        lora=model.use_peft,
        checkpointing=bool(training.gradient_checkpointing),
        mean=mean_completion_length or max(longest // 2, 1),
        micro=(max(n for n in range(1, min(micro, rows) + 1) if rows % n == 0), micro),  # stock TRL's has to divide
    )
    return shape, source, {**options_of(settings), "bf16": training.bf16, "fp16": training.fp16}
