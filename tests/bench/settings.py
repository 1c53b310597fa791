"""The model and the settings of `make bench`, from the options that recipes/grpo.py takes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trl import ModelConfig

from grpo_ext.batching.sizes import SETTINGS
from grpo_ext.config import GRPOConfig
from grpo_ext.errors import ConfigError
from grpo_ext.tools.options import ScriptArguments, as_dataclasses, fields_of, load_arguments
from grpo_ext.tools.stock import refuse_ours

# what a shape says, and how long a bench runs
REFUSED = {*SETTINGS, "max_completion_length", "gradient_checkpointing", "max_steps", "num_train_epochs"}


def options_of(settings: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """(settings that both trainers of a bench are given, type of the weights).

    Raises:
        ConfigError: sizes or data, which a shape has of its own; a type of the weights that a bench does not have.
        GrpoExtError: stock TRL cannot express a setting.
    """
    if refused := sorted(settings.keys() & (REFUSED | fields_of(settings, ScriptArguments).keys())):
        raise ConfigError(
            f"--{', --'.join(refused)}: a bench has sizes and data of its own; name a --shape of these sizes."
        )
    refuse_ours(settings)
    _, training, model = as_dataclasses(settings)
    load = load_arguments(training, model)
    if (dtype := load.pop("dtype")) not in ("float32", "bfloat16"):
        raise ConfigError(f"dtype={dtype!r}: a bench has weights in float32 or bfloat16; use one of them.")
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
