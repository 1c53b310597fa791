"""Errors of grpo_ext: every message names the values, the rule they break and the remedy.

All derive from `ValueError`, because TRL and transformers raise `ValueError` for the same kinds of mistakes.
"""

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any


def did_you_mean(
    name: str, known: Iterable[str], otherwise: str, show: Callable[[str], str] = repr, cutoff: float = 0.6
) -> str:
    """Suggest a remedy for an unknown name: the closest known name, written by `show`, or else `otherwise`."""
    near = get_close_matches(name, list(known), 1, cutoff)
    return f"did you mean {show(near[0])}?" if near else otherwise


def shortened(text: str, limit: int) -> str:
    """Shorten the text of a value in a message to at most `limit` characters."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def counted(number: float, noun: str) -> str:
    """A number of things: `1 prompt`, `2.5 prompts`."""
    return f"{number:.10g} {noun}{'' if number == 1 else 'es' if noun.endswith('s') else 's'}"


class GrpoExtError(ValueError):
    """Base class; catch it to handle every deliberate error of this package."""


def quiet(error: GrpoExtError) -> GrpoExtError:
    """Copy an error for a process that need not report it: uncaught, it ends the process silently, with status 1."""
    plain = {"code": 1, "__reduce__": lambda self: (type(error), error.args)}
    kind: Any = type(type(error).__name__, (type(error), SystemExit), plain)
    return kind(*error.args)


class ConfigError(GrpoExtError):
    """A setting, or a combination of settings, that cannot be run."""


class UnknownSettingError(ConfigError, TypeError):
    """A keyword argument that a configuration does not take; a TypeError, as Python raises."""


class DataError(GrpoExtError):
    """A data set that cannot be used for training."""


class ModelError(GrpoExtError):
    """A model that cannot be trained."""


class RewardError(GrpoExtError):
    """A reward function that raised, or returned something that is not a reward."""


class RolloutError(GrpoExtError):
    """A `rollout_func` that raised or did not return a rollout, or an environment that cannot start one."""


class SplitDependentError(ModelError):
    """Something in the model or the settings makes the update depend on the hardware split."""


def refuse_split_dependence(reasons: list[str], allow: bool) -> list[str]:
    """Raise a SplitDependentError for reasons, as sentences, unless they are allowed; then return them."""
    if reasons and not allow:
        raise SplitDependentError(
            "the update would depend on the batch split: " + ". ".join(reasons) + ". To train anyway, set "
            "allow_split_dependent=True."
        )
    return reasons


class PrecisionError(GrpoExtError):
    """A number that is not finite, or out of the range of the arithmetic."""


class CheckpointError(GrpoExtError):
    """A checkpoint that is broken, cannot be written, or belongs to another run."""


class MemoryShortageError(GrpoExtError):
    """Even the smallest possible piece of work does not fit into the device's memory."""


class ProcessError(GrpoExtError):
    """Another process of the run has failed, and this one cannot continue without it."""


class LaunchError(GrpoExtError):
    """The processes of a launch ended without results."""


class ContractError(GrpoExtError):
    """The installed TRL, transformers or Accelerate does not fit this package."""
