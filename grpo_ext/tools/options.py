"""The options of a run, on the command line or in the YAML file of `--config`: data and rewards, GRPOConfig and TRL's
ModelConfig. Read by recipes/grpo.py, `grpo-ext check` and `grpo-ext plan`.

Unlike in TRL's script, a run that names neither model nor data is the embedded demo.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

import trl
import yaml
from trl import ModelConfig, TrlParser

from ..config import REMOVED_SETTINGS, GRPOConfig
from ..demo.task import EMBEDDED, DemoTask, demo_named
from ..errors import ConfigError, GrpoExtError, did_you_mean
from ..rewards.registry import reward_names
from .data import DataArguments
from .stock import OURS, STOCK, stock_config

# prefixes of settings of a run's output, evaluation and resume
_WRITTEN = ("output_dir", "report_to", "run_name", "log", "save_", "eval_", "push_to", "hub_", "load_best", "resume")


@dataclass
class ScriptArguments(DataArguments):
    """What is trained on: the data, how a row becomes a prompt, and the rewards by name."""

    rewards: list[str] = field(
        default_factory=lambda: ["exact_number"],
        metadata={"help": f"{', '.join(reward_names())}, package.module.function, or path/to/file.py:function."},
    )
    demo: str | None = field(
        default=None,
        metadata={
            "help": f"Where no data are named: {EMBEDDED} (default), a tiny model that sorts letters, or "
            "path/to/file.py:name. recipes/grpo.py knows sums and last_word of recipes/smollm2.py: SmolLM2-135M, or "
            "the chat model of --model_name_or_path."
        },
    )
    demo_trainer: str = field(
        default=OURS, metadata={"help": f"Demo: {OURS}, or {STOCK}, the stock trainer with the same settings."}
    )
    demo_eval_every: int = field(default=15, metadata={"help": "Demo: optimizer steps between held-out measurements."})


def parse(
    argv: list[str], demos: Mapping[str, str] | None = None
) -> tuple[bool, ScriptArguments, GRPOConfig, ModelConfig]:
    """(demo or not, script arguments, GRPOConfig, ModelConfig); demo settings are defaults that options override.

    Args:
        demos: short names of demos in files, `path/to/file.py:name`.
    """
    settings = read_settings(argv)
    if demos and settings.get("demo") in demos:
        settings["demo"] = demos[settings["demo"]]
    demo = is_demo(settings)
    return demo, *as_dataclasses({**(demo_defaults(settings) if demo else {}), **settings})


def read_settings(argv: list[str], more_options: Iterable[str] = ()) -> dict[str, Any]:
    """What the command line and its `--config FILE` set, by name and in its type; the command line wins.

    Args:
        more_options: options of the calling command, for the hint where a name is unknown.

    Raises:
        ConfigError: an unknown name or a value of another type; a file that is missing or holds no settings.
    """
    argv = [word for arg in argv for word in (arg.split("=", 1) if arg.startswith("--config=") else [arg])]
    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig), allow_abbrev=False)  # type: ignore[arg-type]
    parser.error = refuse_option  # type: ignore[method-assign]
    if argv[-1:] == ["--config"]:
        refuse_option("--config wants a file")
    if "--config" in argv and not (path := Path(argv[argv.index("--config") + 1])).is_file():
        raise ConfigError(f"--config {path} does not exist (looked in {Path.cwd()}); check the path.")
    # ModelConfig's 0.05 is noise drawn per micro-batch, which the trainer refuses
    parser.set_defaults_with_config(lora_dropout=0.0)
    # help lists the defaults; otherwise only what is given is parsed, into a namespace
    if not {"--help", "-h"} & set(argv):
        parser.set_defaults_with_config(**dict.fromkeys((a.dest for a in parser._actions), argparse.SUPPRESS))
        parser.dataclass_types = ()
    try:
        *parsed, unknown = parser.parse_args_and_config(argv, return_remaining_strings=True)
    except GrpoExtError:
        raise
    except (ValueError, TypeError, yaml.YAMLError) as error:
        raise ConfigError(str(error)) from error
    known = [option for action in parser._actions for option in action.option_strings]
    refuse_unknown(unknown, argv, [*more_options, *known])
    return dict(vars(parsed[0])) if parsed else {}


def is_demo(settings: Mapping[str, Any]) -> bool:
    """Whether the settings name a demo, or neither a model nor data.

    Raises:
        ConfigError: only one of model and data is named, or a demo with data or a model it does not take.
    """
    if (name := settings.get("demo")) is not None:
        if settings.get("dataset_name") is not None:
            raise ConfigError(f"--demo {name} brings its own data; leave --dataset_name out, or --demo.")
        if name == EMBEDDED and settings.get("model_name_or_path") is not None:
            raise ConfigError(f"--demo {name} makes its own model; leave --model_name_or_path out.")
        return True
    named = [name for name in ("model_name_or_path", "dataset_name") if settings.get(name) is not None]
    if len(named) == 1:
        raise ConfigError(
            f"Only --{named[0]} is given; name both --model_name_or_path and --dataset_name, or neither (demo)."
        )
    return not named


def demo_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The demo's own settings, which the run's override."""
    name = settings.get("demo") or EMBEDDED
    return {**demo_named(name).settings, "demo": name}


def load_demo_named(script: ScriptArguments, model: ModelConfig) -> DemoTask:
    """The demo of these options, with its model."""
    return demo_named(script.demo or EMBEDDED).load(model.model_name_or_path)


def as_dataclasses(settings: Mapping[str, Any]) -> tuple[ScriptArguments, GRPOConfig, ModelConfig]:
    """Settings as what they configure.

    Raises:
        ConfigError: a setting is refused, by this package, TRL or transformers.
    """
    script, model = ScriptArguments(**fields_of(settings, ScriptArguments)), fields_of(settings, ModelConfig)
    if script.demo_trainer not in (OURS, STOCK):
        raise ConfigError(f"--demo_trainer {script.demo_trainer} is unknown; use {OURS} or {STOCK}.")
    try:
        return script, GRPOConfig(**fields_of(settings, GRPOConfig)), ModelConfig(**{"lora_dropout": 0.0, **model})
    except GrpoExtError:
        raise
    except (ValueError, TypeError) as error:
        raise ConfigError(str(error)) from error


def stock_arguments(training: GRPOConfig, processes: int) -> trl.GRPOConfig:
    """The same run for `trl.GRPOTrainer`.

    Raises:
        GrpoExtError: stock TRL cannot express it; see `stock_config`.
    """
    settings = {spec.name: getattr(training, spec.name) for spec in fields(GRPOConfig) if spec.init}
    geometry = training.resolve_geometry(processes)
    settings |= {"generation_batch_size": None, "steps_per_generation": None}
    settings |= {name: getattr(geometry, name) for name in ("global_batch_size", "rollout_batch_size")}
    return trl.GRPOConfig(**stock_config(settings, processes))


def fields_of(settings: Mapping[str, Any], kind: Any) -> dict[str, Any]:
    """The settings that are fields of a dataclass."""
    names = {spec.name for spec in fields(kind) if spec.init}
    return {name: value for name, value in settings.items() if name in names}


def written(settings: Mapping[str, Any]) -> set[str]:
    """The settings of a run's output, evaluation and resume, which a check leaves out."""
    return {name for name in fields_of(settings, GRPOConfig) if name.startswith(_WRITTEN)}


def refuse_option(message: str) -> NoReturn:
    """Raise the parser's message as an error, without its usage."""
    raise ConfigError(f"{message}; `--help` lists the options.")


def refuse_unknown(unknown: list[str], argv: list[str], known: list[str]) -> None:
    """Refuse the words that the parser did not take: options, and names in the file of `--config`."""
    if not unknown:
        return
    names = [word.split("=")[0] for word in unknown]  # without values, as in --option=value
    name = next((name for name in names if name.startswith("--")), names[0])
    hint = did_you_mean(name, known, "`--help` lists the options.", show=str)
    if (removed := REMOVED_SETTINGS.get(name.lstrip("-").replace("-", "_"))) is not None:
        hint = f"{removed}."
    if any(word.split("=")[0] == name for word in argv):
        raise ConfigError(f"{name} is no option; {hint}")
    file = argv[argv.index("--config") + 1]
    raise ConfigError(f"{file}: {name[2:]!r} is no setting; {hint.replace('you mean --', 'you mean ')}")


def load_arguments(training: GRPOConfig, model: ModelConfig) -> dict[str, Any]:
    """How the model is loaded: arguments of `from_pretrained`, those of `--model_init_kwargs` before the others."""
    model_init_kwargs: Any = training.model_init_kwargs or {}  # a dictionary, whatever its annotation
    return {
        "revision": model.model_revision,
        "trust_remote_code": training.trust_remote_code,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
        **model_init_kwargs,
    }
