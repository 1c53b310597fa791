"""`make bench` of a run: its model, sizes and precision from the settings that recipes/grpo.py takes."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trl import ModelConfig

from grpo_ext.batching.sizes import SETTINGS, ceil_div
from grpo_ext.config import GRPOConfig
from grpo_ext.errors import ConfigError
from grpo_ext.tools.options import ScriptArguments, as_dataclasses, fields_of, load_arguments, output_settings
from grpo_ext.tools.stock import refuse_ours
from grpo_ext.upstream.argument_checks import find_model

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
    own = {name for name in fields_of(settings, GRPOConfig) if name.startswith(_OWN)}
    return sorted(output_settings(settings) | own)


def refuse_sizes(settings: Mapping[str, Any]) -> None:
    """Refuse settings that given shapes replace by their own, in a bench that is not one of a run."""
    replaced = OF_A_SHAPE | fields_of(settings, ScriptArguments).keys()
    if named := sorted(settings.keys() & replaced):
        raise ConfigError(
            f"--{', --'.join(named)}: a bench of shapes has sizes and data of its own; add --prompt_length (tokens) to "
            "bench a step of that run, or name a --shape of these sizes."
        )


def options_of(settings: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """(settings that both trainers of a bench are given, type of the weights)."""
    script, training, model = as_dataclasses(settings)
    if script.demo is not None:
        raise ConfigError(f"--demo {script.demo}: a bench has no demos; leave it out, or name a --config.")
    load = load_arguments(training, model)
    if (dtype := load.pop("dtype")) not in ("float32", "bfloat16"):
        raise ConfigError(f"dtype={dtype!r}: a bench has weights in float32 or bfloat16; use one of them.")
    refuse_ours(settings)
    if (name := model.model_name_or_path) is not None and not name.endswith(".json"):
        find_model(name, load)
    # masks are replayed with filters, which have been refused
    skipped = {*left_out(settings), *OF_A_SHAPE, "model_name_or_path", "dtype", "sampling_mask"}
    used = {**fields_of(settings, GRPOConfig), **fields_of(settings, ModelConfig), "model_init_kwargs": load}
    return {name: value for name, value in used.items() if name not in skipped}, dtype


def model_of(source: str) -> Any:
    """A model as `run_shape` takes it: an id or folder as it is, a config.json as a dictionary (random weights)."""
    if not source.endswith(".json"):
        return source
    try:
        return json.loads(Path(source).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model_name_or_path {source} cannot be read as a configuration: {error}") from None


def shape_of(
    settings: Mapping[str, Any], name: str, prompt_length: int, mean_completion_length: int | None
) -> tuple[Shape, tuple[int, int], dict[str, bool]]:
    """(shape, micro-batch of stock TRL and of ours, precision) of one optimizer step of a run; lengths in tokens."""
    _, training, model = as_dataclasses(settings)
    longest, group = training.max_completion_length or 512, training.num_generations or 8
    groups = ceil_div(training.geometry.global_batch_size, group)
    rows, micro = groups * group, training.per_device_train_batch_size
    sizes: dict[str, Any] = {"groups": groups, "group": group, "mean": mean_completion_length or max(longest // 2, 1)}
    kind = {"lora": model.use_peft, "checkpointing": bool(training.gradient_checkpointing)}
    shape = Shape(name, prompt_length, 1, longest, skewed=True, **sizes, **kind)
    dividing = max(n for n in range(1, min(micro, rows) + 1) if rows % n == 0)  # as stock TRL's has to
    return shape, (dividing, micro), {"bf16": bool(training.bf16), "fp16": bool(training.fp16)}
