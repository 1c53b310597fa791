"""Settings of speed that both trainers of a bench are given, and the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trl import ModelConfig

from grpo_ext.batching.sizes import SETTINGS
from grpo_ext.checks.model import find_model
from grpo_ext.config import GRPOConfig
from grpo_ext.errors import ConfigError
from grpo_ext.tools.options import ScriptArguments, as_dataclasses, fields_of, load_arguments, written
from grpo_ext.tools.stock import refuse_ours

# beginnings of the names of what a bench sets: sizes, how long it runs, rewards, one process, how it samples
_OF_A_BENCH = (
    *(*SETTINGS, "max_completion_length", "gradient_checkpointing"),
    *("max_steps", "num_train_epochs", "num_iterations", "reward_", "use_cpu", "deepspeed", "fsdp", "auto_find"),
    *("use_vllm", "vllm_", "use_transformers", "mask_truncated"),  # the fixed completions have no end token
)


def options_of(settings: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """(settings that both trainers of a bench are given, type of the weights).

    Raises:
        ConfigError: a setting that a bench sets itself, or a type of the weights that it does not have.
        GrpoExtError: stock TRL cannot express a setting.
    """
    own = written(settings) | fields_of(settings, ScriptArguments).keys()
    if named := sorted(name for name in settings if name in own or name.startswith(_OF_A_BENCH)):
        raise ConfigError(
            f"--{', --'.join(named)}: a bench sets sizes, data, rewards and logging itself; name a --shape of the "
            "sizes, such as prompt=512,completions=32-256,group=8,groups=4."
        )
    _, training, model = as_dataclasses(settings)
    load = load_arguments(training, model)
    if (dtype := load.pop("dtype")) not in ("float32", "bfloat16"):
        raise ConfigError(f"dtype={dtype!r}: a bench has weights in float32 or bfloat16; use one of them.")
    refuse_ours(settings)
    if (name := model.model_name_or_path) is not None and not name.endswith(".json"):
        find_model(name, load)
    used = {**fields_of(settings, GRPOConfig), **fields_of(settings, ModelConfig), "model_init_kwargs": load}
    return {name: value for name, value in used.items() if name not in ("model_name_or_path", "dtype")}, dtype


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
