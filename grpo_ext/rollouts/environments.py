"""Environments: which one a completion acts in, how it is reset, and what is refused before training.

Differs from TRL: `reset` is bounded in time, what it returns is checked, and an environment with a call that has not
come back is used no more. Called where a rollout begins.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from accelerate.logging import get_logger
from transformers.utils import DocstringParsingException, TypeHintParsingException, get_json_schema

from ..errors import ConfigError, DataError, RolloutError, did_you_mean, shortened
from ..rewards.guard import CallTimeout, in_time
from .transcript import Messages, Transcript

logger = get_logger(__name__)
Factory = Callable[[], Any]
Pools = dict[str | None, list[Any]]


class Environments:
    """The environments of a run.

    Args:
        factories: by name, the name None where there is one; None: a run without environments.
        multi: rows choose theirs by a column `environment`, which `reset` does not get.
        pools: instances that are used again, by name; None for empty ones.
    """

    def __init__(
        self, factories: Mapping[str | None, Factory] | None = None, multi: bool = False, pools: Pools | None = None
    ) -> None:
        self.factories, self.multi = dict(factories or {}), multi
        self.pools: Pools = {name: [] for name in self.factories} if pools is None else pools
        self._warned: set[str] = set()

    def copy(self) -> Environments:
        """One that makes instances of its own, as a thread needs."""
        return Environments(self.factories, self.multi)

    def begin(self, transcripts: Sequence[Transcript], seconds: float | None = None) -> None:
        """Give each transcript its environment, reset, and its prompt, with what the environment adds to it.

        Without environments the prompt is that of the row. With them a row may have none.

        Args:
            seconds: a `reset` may take; None: any.

        Raises:
            DataError: a row names an environment that there is not.
            RolloutError: a `reset` raised, took too long, or returned something that no prompt can have.
        """
        if not self.factories:
            for t in transcripts:
                t.prompt = t.row["prompt"]
            return
        in_use: Counter[str | None] = Counter()
        for t in transcripts:
            t.prompt = t.row.get("prompt", [{"role": "user", "content": ""}])
            t.environment_name = self._name_of(t.row)
            pool = self.pools[t.environment_name]
            if in_use[t.environment_name] == len(pool):
                pool.append(self.factories[t.environment_name]())
            t.environment = pool[in_use[t.environment_name]]
            in_use[t.environment_name] += 1
        for t in transcripts:
            columns = {name: value for name, value in t.row.items() if not (self.multi and name == "environment")}
            t.prompt = _with_observation(t.prompt, _reset(t.environment, columns, seconds))

    def _name_of(self, row: Mapping[str, Any]) -> str | None:
        name = row.get("environment") if self.multi else None
        if name not in self.factories:
            known = [str(name) for name in self.factories]
            remedy = did_you_mean(str(name), known, f"it makes {', '.join(map(repr, known))}.")
            raise DataError(f"a row has environment={name!r}, which environment_factory does not make; {remedy}")
        return name

    def uses(self, environment: Any) -> bool:
        """Whether it is in a pool, as every environment without a call that hangs is."""
        return any(environment is other for pool in self.pools.values() for other in pool)

    def retire(self, environment: Any) -> None:
        """Never use one again whose call has not come back: its thread may still change it.

        No later call reaches it, nor does a later rollout, and its reward is None.
        """
        for pool in self.pools.values():
            pool[:] = [other for other in pool if other is not environment]
        kind = type(environment)
        if (reward := getattr(kind, "get_reward", None)) is not None:
            environment.get_reward = _no_reward_later if inspect.iscoroutinefunction(reward) else lambda: None
        if kind.__name__ not in self._warned:
            self._warned.add(kind.__name__)
            logger.warning(
                f"The environment ({kind.__name__}) whose call hung has no reward (None), and is replaced by a new one "
                "for the next rollout."
            )


async def _no_reward_later() -> None:
    return None


def _with_observation(prompt: Messages, observation: str | list[Any] | None) -> Messages:
    """The prompt with an observation at the end of its last message; a new list, as the row's is left alone."""
    if observation is None:
        return prompt
    content = prompt[-1]["content"]
    if isinstance(observation, list) and isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if isinstance(observation, str) and isinstance(content, list):
        observation = [{"type": "text", "text": observation}]
    return [*prompt[:-1], {**prompt[-1], "content": content + observation}]


def _reset(environment: Any, columns: dict[str, Any], seconds: float | None) -> str | list[Any] | None:
    what = f"`reset` of environment {type(environment).__name__}"
    try:
        added = in_time(lambda: environment.reset(**columns), seconds, "tool_timeout")
    except CallTimeout as error:
        raise RolloutError(f"{what}: {error}; a rollout cannot begin without it.") from None
    except Exception as error:
        raise RolloutError(f"{what} raised {type(error).__name__}: {error}; a rollout cannot begin.") from error
    parts = isinstance(added, list) and all(isinstance(part, dict) and "type" in part for part in added)
    if not (added is None or isinstance(added, str) or parts):
        raise RolloutError(
            f"{what} returned {shortened(repr(added), 80)}; return what is added to the prompt: a text, a list of "
            "content parts ({'type': 'text', 'text': ...}), or None."
        )
    return added


# ---- Before training ------------------------------------------------------------------------------------------------


def check_schema(tool: Any, what: str) -> None:
    """Refuse a tool that cannot be shown to the model.

    Args:
        what: it is, in words.

    Raises:
        ConfigError: an argument has no type or no description.
    """
    try:
        get_json_schema(tool)
    except (TypeHintParsingException, DocstringParsingException) as error:
        raise ConfigError(
            f"{what} cannot be shown to the model ({error}); give every argument a type and, in a docstring with a "
            "section 'Args:', a description."
        ) from error


def checked_environments(factories: Any, seconds: float | None, datasets: Sequence[Any]) -> Any:
    """The factory, or the factories by name, of environments that can be reset and called.

    Args:
        seconds: a call may take; None: any.

    Raises:
        ConfigError, DataError: where it is no factory, or the data name another environment.
    """
    if factories is None:
        return None
    if callable(factories):
        return _checked_factory(factories, seconds)
    if not isinstance(factories, dict) or not all(callable(factory) for factory in factories.values()):
        raise ConfigError(
            f"environment_factory={factories!r}: pass a class, a function that returns an environment, or a dictionary "
            "from names to those."
        )
    for dataset in datasets:
        names = dataset.column_names
        if "environment" not in names:
            raise DataError(
                f"environment_factory names {', '.join(map(repr, factories))}, and the data have no column "
                f"'environment' that chooses among them (columns: {', '.join(names)}); add one."
            )
        if unknown := set(dataset["environment"]) - set(factories):
            raise DataError(
                f"the column 'environment' names {sorted(map(repr, unknown))[0]}, which environment_factory does not "
                f"make; it makes {', '.join(map(repr, factories))}."
            )
    return {name: _checked_factory(factory, seconds) for name, factory in factories.items()}


def _checked_factory(factory: Factory, seconds: float | None) -> Factory:
    checked: set[type] = set()  # the first environment is made before training, others as a pool grows

    @functools.wraps(factory, updated=())
    def make() -> Any:
        environment = factory()
        kind = type(environment)
        if kind not in checked:
            _check_environment(environment, kind, seconds)
            checked.add(kind)
        return environment

    return make


def _check_environment(environment: Any, kind: type, seconds: float | None) -> None:
    methods = dict(inspect.getmembers(kind, inspect.isfunction))
    if "reset" not in methods:
        raise ConfigError(
            f"environment {kind.__name__} has no method `reset`, which begins a rollout; give it one that takes "
            "the row's columns as keywords and returns what is added to the prompt, or None."
        )
    if inspect.iscoroutinefunction(methods["reset"]):
        raise ConfigError(f"`reset` of environment {kind.__name__} is asynchronous, and nothing awaits it.")
    if seconds is not None and not hasattr(environment, "__dict__"):
        raise ConfigError(
            f"environment {kind.__name__} has __slots__, and tool_timeout={seconds} needs to replace its `get_reward` "
            "where a call hangs; add '__dict__' to its slots, or leave tool_timeout out."
        )
    for name in methods.keys() - {"reset", "get_reward"}:
        if not name.startswith("_"):
            check_schema(getattr(environment, name), f"method '{name}' of environment {kind.__name__}")
