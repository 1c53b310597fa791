"""The options of a run, on the command line or in a YAML file (`--config`): data and rewards, GRPOConfig and TRL's
ModelConfig. Read by recipes/grpo.py, `grpo-ext check` and `grpo-ext plan`.

Differs from TRL's parser, on which it rests: gives the settings that were made, before the dataclasses fill in
defaults, an unknown name is an error with a hint, and torch is not loaded (config_source.py). Unlike in TRL's script, a
run that names neither model nor data is the embedded demo.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import yaml
from trl import ModelConfig, TrlParser

from ..batching.sizes import Settings
from ..demo import EMBEDDED
from ..errors import ConfigError, GrpoExtError, ProcessError, RewardError, did_you_mean
from ..rewards.registry import reward_names
from ..settings import decides, setting
from .config_source import fields_in_source
from .data import DataArguments
from .stock import OURS, STOCK

if TYPE_CHECKING:
    from ..config import GRPOConfig
    from ..demo.task import Demo

# help of fields that mean something else here than in TRL and transformers
_HELP = {
    "num_generations": "Completions per prompt, 2 or more; rollout_batch_size is a multiple of it.",
    "per_device_train_batch_size": "The most completions in one forward on one device, any number; changes nothing "
    "that is learned. Without global_batch_size it also determines the size of the step, as in TRL.",
    "gradient_accumulation_steps": "Used only without global_batch_size, as in TRL; otherwise derived.",
    "generation_batch_size": "TRL's name for rollout_batch_size.",
    "steps_per_generation": "Micro-batches per generation phase, as in TRL; prefer rollout_batch_size.",
    "auto_find_batch_size": "Accepted, but has no effect: a step that runs out of memory is always repeated with "
    "smaller micro-batches.",
    "resume_from_checkpoint": "For scripts, as in transformers; recipes/grpo.py passes it to train(): a checkpoint, "
    "'latest' (or true) for the newest complete one in output_dir, or 'auto' for that or, if there is none, a new run.",
}


@dataclass
class ScriptArguments(DataArguments):
    rewards: list[str] = field(
        default_factory=lambda: ["exact_number"],
        metadata={"help": f"{', '.join(reward_names())}, package.module.function, path/to/file.py:function, or none."},
    )
    demo: str | None = setting(
        f"Instead of data: {EMBEDDED} (default), a tiny model that sorts letters, or path/to/file.py:name. "
        "recipes/grpo.py also knows sums and last_word of recipes/smollm2.py: SmolLM2-135M, or the chat model of "
        "--model_name_or_path."
    )
    demo_trainer: str = setting(f"Demo: {OURS}, or {STOCK}, the stock trainer with the same settings.", default=OURS)
    demo_eval_every: int = setting("Demo: optimizer steps between held-out measurements.", default=15)
    rerun: int | None = setting("Instead of training: run this step of the run in output_dir again (grpo-ext rerun).")
    rerun_gradients: bool = setting("Rerun: record the gradient of each completion too.", default=False)
    rerun_rewards: bool = setting("Rerun: call the reward functions again.", default=False)
    rerun_cases: list[str] = field(
        default_factory=list, metadata={"help": "Rerun: also compare it with other settings: loss_type=grpo,beta=0.01."}
    )


def kinds_of_options() -> tuple[Any, ...]:
    if "grpo_ext.config" not in sys.modules:
        with suppress(Exception):  # another version keeps them elsewhere, or computes more of them
            return ScriptArguments, fields_in_source(), ModelConfig
    from ..config import GRPOConfig

    return ScriptArguments, GRPOConfig, ModelConfig


def check_options(argv: list[str], kinds: tuple[Any, ...] | None = None) -> None:
    """Before a script imports what takes seconds: print its `--help`, or the error of its options, and end."""
    try:
        read_settings(argv, kinds)
    except GrpoExtError as error:
        end_with(error)


def end_with(error: GrpoExtError) -> NoReturn:
    """End a script with status 2, and an error that one of its processes prints."""
    failed_here = isinstance(error, RewardError)  # on this process alone, with the row that failed
    if isinstance(error, (RewardError, ProcessError)) and error.__cause__ is not None:
        traceback.print_exception(error.__cause__)
    # from the environment: the error may come before the processes know each other
    if failed_here or os.environ.get("RANK", "0") == "0":
        print(f"error: {error}", file=sys.stderr)
    else:
        time.sleep(1.0)  # the launcher ends all processes once one has ended: let the main one print first
    sys.exit(2)


def read_settings(
    argv: list[str], kinds: tuple[Any, ...] | None = None, more_options: Iterable[str] = ()
) -> dict[str, Any]:
    """Parse the settings of a command line and its `--config FILE`, by name; the command line overrides the file.

    Options are the fields of the dataclasses `kinds`, by default those of a run; a hint for an unknown name also knows
    `more_options`.
    """
    kinds = kinds_of_options() if kinds is None else kinds
    parser = TrlParser(kinds, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config", type=_settings_in, help="YAML file of settings; options override it.")
    for action in parser._actions:
        action.help = _HELP.get(action.dest, action.help)
    lists = [action.dest for action in parser._actions if action.nargs == "+"]
    names = [spec.name for kind in kinds for spec in fields(kind) if spec.init]
    unset = object()
    try:
        file = parser.parse_known_args(argv)[0].config or {}
        file |= {name: [file[name]] for name in lists if isinstance(file.get(name), str)}
        # only now, because `--help` lists the defaults
        parser.set_defaults(**{**dict.fromkeys(names, unset), **file})
        namespace, words = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error}; `--help` lists the options.") from error
    if unknown := [*(f"--{name}" for name in file if name not in names), *words]:
        name = next((word for word in unknown if word.startswith("--")), unknown[0]).split("=")[0]
        known = [*more_options, *(f"--{setting}" for setting in names)]
        hint = did_you_mean(name, known, "`--help` lists the options.", show=str)
        raise ConfigError(f"{name} is not an option{' (in the file of --config)' if name[2:] in file else ''}; {hint}")
    return {name: value for name, value in vars(namespace).items() if name in names and value is not unset}


def _settings_in(path: str) -> dict[str, Any]:
    """Read the file of `--config`; as in TRL, the variables under `env` go to the environment."""
    try:
        with Path(path).open() as file:
            settings = {str(name): value for name, value in yaml.safe_load(file).items()}
        os.environ.update({name: str(value) for name, value in settings.pop("env", {}).items()})
    except (OSError, yaml.YAMLError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    except AttributeError:
        raise argparse.ArgumentTypeError(f"{path} must contain a YAML mapping, and so must its `env`") from None
    return settings


def demo_of(settings: Settings) -> Demo | None:
    """The demo that settings name, or the embedded one without model and data; a ConfigError if settings contradict."""
    from ..demo.task import demo_named

    name, model, dataset = (settings.get(option) for option in ("demo", "model_name_or_path", "dataset_name"))
    if name is not None and dataset is not None:
        raise ConfigError(f"--demo {name} has its own data; leave out --dataset_name or --demo.")
    if name == EMBEDDED and model is not None:
        raise ConfigError(f"--demo {name} builds its own model; leave out --model_name_or_path.")
    if name is None and (model is None) != (dataset is None):
        one = "dataset_name" if model is None else "model_name_or_path"
        raise ConfigError(f"Only --{one} is set; set both --model_name_or_path and --dataset_name, or neither (demo).")
    return None if name is None and model is not None else demo_named(name or EMBEDDED)


def as_dataclasses(settings: Settings) -> tuple[ScriptArguments, GRPOConfig, ModelConfig]:
    """Build the dataclasses that the settings configure; a ConfigError if one of them refuses a setting."""
    from ..config import GRPOConfig

    kinds: tuple[Any, ...] = (ScriptArguments, GRPOConfig, ModelConfig)
    try:
        script, training, model = (kind(**fields_of(settings, kind)) for kind in kinds)
    except GrpoExtError:
        raise
    except (ValueError, TypeError) as error:
        raise ConfigError(str(error)) from error
    if script.demo_trainer not in (OURS, STOCK):
        raise ConfigError(f"--demo_trainer {script.demo_trainer} is unknown; use {OURS} or {STOCK}.")
    return script, training, model


def fields_of(settings: Settings, kind: Any) -> dict[str, Any]:
    names = {spec.name for spec in fields(kind) if spec.init}
    return {name: value for name, value in settings.items() if name in names}


def output_settings(settings: Settings) -> set[str]:
    """Names of the settings of a run's output, evaluation and resume, which `grpo-ext check` leaves out."""
    return {name for name in fields_of(settings, kinds_of_options()[1]) if decides(name, "output")}


def load_arguments(training: GRPOConfig, model: ModelConfig) -> dict[str, Any]:
    """Arguments of `from_pretrained` for the run's model; those of `--model_init_kwargs` override the others."""
    model_init_kwargs: Any = training.model_init_kwargs or {}  # a dictionary, whatever its annotation
    return {
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
        "trust_remote_code": training.trust_remote_code,
        **model_init_kwargs,
    }
