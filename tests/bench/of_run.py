"""`make bench` of a run: its model, sizes and precision from the settings that recipes/grpo.py takes."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trl import ModelConfig

from grpo_ext.batching.sizes import SETTINGS, ceil_div
from grpo_ext.checks.model import find_model
from grpo_ext.config import GRPOConfig
from grpo_ext.errors import ConfigError
from grpo_ext.tools.data import load_prompts
from grpo_ext.tools.options import (
    ScriptArguments,
    as_dataclasses,
    demo_defaults,
    fields_of,
    is_demo,
    load_arguments,
    load_demo_named,
    written,
)
from grpo_ext.tools.stock import refuse_ours

from .shapes import Shape

# what the shape says, and with it how many micro-batches there are
OF_A_SHAPE = {*SETTINGS, "max_completion_length", "gradient_checkpointing"}
# beginnings of the names of what a bench has of its own: how long it runs, rewards, one process, how it samples
_OWN = (
    *("max_steps", "num_train_epochs", "num_iterations", "reward_", "use_cpu", "deepspeed", "fsdp", "auto_find"),
    *("use_vllm", "vllm_", "use_transformers", "mask_truncated"),  # the given completions have no end token
)


def left_out(settings: Mapping[str, Any]) -> list[str]:
    """The settings of GRPOConfig that a bench leaves out."""
    return sorted(written(settings) | {name for name in fields_of(settings, GRPOConfig) if name.startswith(_OWN)})


def refuse_of_run(settings: Mapping[str, Any]) -> None:
    """Refuse settings that given shapes replace by their own, in a bench that is not one of the run.

    Raises:
        ConfigError: names them.
    """
    replaced = OF_A_SHAPE | fields_of(settings, ScriptArguments).keys()
    if given := sorted(settings.keys() & replaced):
        raise ConfigError(
            f"--{', --'.join(given)}: a bench of shapes has sizes and data of its own; name a --config, a --demo, or a "
            "model and --dataset_name to bench that run (without --shape), or a --shape of these sizes."
        )


def options_of(settings: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """(settings that both trainers of a bench are given, type of the weights).

    Raises:
        ConfigError: a type of the weights that a bench does not have. GrpoExtError: stock TRL cannot express a setting.
    """
    _, training, model = as_dataclasses(settings)
    load = load_arguments(training, model)
    if (dtype := load.pop("dtype")) not in ("float32", "bfloat16"):
        raise ConfigError(f"dtype={dtype!r}: a bench has weights in float32 or bfloat16; use one of them.")
    refuse_ours(settings)
    if (name := model.model_name_or_path) is not None and not name.endswith(".json"):
        find_model(name, load)
    skipped = {*left_out(settings), *OF_A_SHAPE, "model_name_or_path", "dtype"}
    used = {**fields_of(settings, GRPOConfig), **fields_of(settings, ModelConfig), "model_init_kwargs": load}
    return {name: value for name, value in used.items() if name not in skipped}, dtype


def model_of(source: str) -> Any:
    """A model as `run_shape` takes it: an id or folder as it is, a config.json as a dictionary (random weights).

    Raises:
        ConfigError: a configuration that cannot be read.
    """
    if not source.endswith(".json"):
        return source
    try:
        return json.loads(Path(source).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model_name_or_path {source} cannot be read as a configuration: {error}") from None


def prompt_lengths(dataset: Any, tokenizer: Any, rows: int = 256) -> list[int]:
    """Tokens of the prompts, with the chat template where they are messages, of all rows or of `rows` evenly spread."""
    count = min(rows, len(dataset))
    lengths = []
    for prompt in dataset.select([place * len(dataset) // count for place in range(count)])["prompt"]:
        if not isinstance(prompt, str):
            prompt = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        lengths.append(len(tokenizer(prompt, add_special_tokens=False)["input_ids"]))
    return lengths


def prompt_tokens(dataset: Any, model: str) -> int:
    """Tokens of a prompt, the mean over a sample of the rows, with the chat template where prompts are messages.

    Raises:
        ConfigError: the model is a config.json, which has no tokenizer.
    """
    from transformers import AutoTokenizer

    if model.endswith(".json"):
        raise ConfigError(
            f"--model_name_or_path {model} is a configuration, without a tokenizer to measure prompts with; name their "
            "tokens with --prompt_length."
        )
    lengths = prompt_lengths(dataset, AutoTokenizer.from_pretrained(model))
    return max(1, round(statistics.fmean(lengths)))


def shape_of(
    settings: Mapping[str, Any], name: str, prompt_length: int | None, mean_completion_length: int | None
) -> tuple[Shape, tuple[int, int], str, dict[str, Any]]:
    """(shape, micro-batch of stock TRL and of ours, model, options for `run_shape`) of one optimizer step of a run.

    Args:
        prompt_length: tokens; None measures the run's data.
        mean_completion_length: tokens; None is half of `max_completion_length`.

    Raises:
        ConfigError: a setting is refused, or half a task is named. DataError: rows that cannot be trained on.
    """
    demo = is_demo(settings)
    settings = {**(demo_defaults(settings) if demo else {}), **settings}
    script, training, model = as_dataclasses(settings)
    options, _ = options_of(settings)
    task = load_demo_named(script, model) if demo else None
    source = str(task.model_path if task else model.model_name_or_path)
    if prompt_length is None:
        prompt_length = prompt_tokens(task.train_dataset if task else load_prompts(script, training.seed)[0], source)
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
    )
    dividing = max(n for n in range(1, min(micro, rows) + 1) if rows % n == 0)  # as stock TRL's has to
    return shape, (dividing, micro), source, {**options, "bf16": training.bf16, "fp16": training.fp16}
