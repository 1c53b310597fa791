"""The YAML file of a run, as recipes/grpo.py reads it: its settings, and the task that a check makes of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ..errors import ConfigError, did_you_mean

_TASK = ("model_name_or_path", "dataset_name")


def read_config(path: Path | None) -> dict[str, Any]:
    """The settings of a YAML file; none without a file.

    Raises:
        ConfigError: no such file, or no mapping of names to values in it.
    """
    if path is None:
        return {}
    if not path.is_file():
        raise ConfigError(f"config={path} is no file; give the path of a YAML file with settings.")
    settings = yaml.safe_load(path.read_text())
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} holds no settings; it should map names to values, one a line: `name: value`.")
    return settings


def refuse_unknown(settings: Mapping[str, Any], path: Path | None) -> None:
    """Refuse names that are a setting neither of GRPOConfig nor of the recipe (its own and trl's ModelConfig).

    Raises:
        ConfigError: names the nearest one.
    """
    import trl

    from ..config import GRPOConfig
    from .data import OPTIONS

    known = {"dataset_name", "rewards", "demo_eval_every", *OPTIONS, *trl.ModelConfig.__dataclass_fields__}
    known |= GRPOConfig.__dataclass_fields__.keys()
    for name in settings:
        if name not in known:
            hint = did_you_mean(name, known, "`recipes/grpo.py --help` lists them.")
            raise ConfigError(f"{path}: {name!r} is no setting; {hint}")


@dataclass(frozen=True)
class Task:
    """What a check trains.

    Attributes:
        model: folder or id.
        settings: of GRPOConfig.
        peft: arguments of LoraConfig; None for full training.
        about: the task in words, with what of the file a check leaves out.
    """

    model: Any
    dataset: Any
    rewards: Any
    settings: dict[str, Any]
    peft: dict[str, Any] | None
    about: str


def load_task(given: Mapping[str, Any]) -> Task:
    """The task of a run's settings: the demo's where neither a model nor data is named.

    A check trains the whole model or adapters, in float32, and writes nothing: what else the settings say of the model
    and of the output is left out.

    Raises:
        ConfigError: half a task is named.
    """
    from ..config import GRPOConfig
    from ..rewards.registry import resolve_rewards
    from .data import OPTIONS, load_prompts

    settings = {n: v for n, v in given.items() if n in GRPOConfig.__dataclass_fields__ and n != "output_dir"}
    adapter = {n: v for n, v in given.items() if n.startswith("lora_") or n in ("use_peft", "use_rslora", "use_dora")}
    peft = _adapter(adapter)
    rewards: Any = resolve_rewards(given["rewards"]) if "rewards" in given else None
    used = settings.keys() | adapter.keys() | {"rewards"}
    of_data = {keyword: given[name] for name, keyword in OPTIONS.items() if name in given}
    named = [name for name in _TASK if given.get(name) is not None]
    if not named:
        from ..demo.task import demo_config_defaults, load_demo

        demo = load_demo()
        task, rewards = (demo.model_path, demo.train_dataset), rewards or demo.reward_funcs
        defaults = {**demo_config_defaults(), "global_batch_size": 32, "rollout_chunk_size": 8}
        about = "the demo"
    elif rewards is None or len(named) < len(_TASK):
        said = ", ".join(f"{name}={given.get(name)}" for name in (*_TASK, "rewards"))
        raise ConfigError(f"{said}: either give all three, or neither model nor data for the demo.")
    else:
        used |= {*_TASK, *OPTIONS}
        task = (given["model_name_or_path"], load_prompts(given["dataset_name"], **of_data)[0])
        defaults = {"global_batch_size": 16, "num_generations": 4, "max_completion_length": 64, "learning_rate": 1e-5}
        about = f"{given['model_name_or_path']} on {given['dataset_name']}"
    left_out = [name for name in given if name not in used]
    about += ", all weights" if peft is None else f", LoRA of rank {peft['r']}"
    about += f"; {', '.join(left_out)} left out" if left_out else ""
    return Task(*task, rewards, {**defaults, **settings}, peft, f"Checking {about}")


def _adapter(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """The arguments of LoraConfig that trl makes of a file's settings; None for full training."""
    from trl import ModelConfig, get_peft_config

    config = get_peft_config(ModelConfig(**{"lora_dropout": 0.0, **settings}))
    if config is None:
        return None
    return {spec.name: getattr(config, spec.name) for spec in dataclasses.fields(config) if spec.init}
