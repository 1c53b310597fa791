"""Calls of tools and of environments: what is refused before training, and a limit in time for each of them.

Differs from TRL, where a tool that hangs stops the run, on every process. Its loop over the turns is left as it is: it
finds callables with a limit (`TimedTools.of_rows`), and tells the model of one that took too long as of any failure.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from accelerate.logging import get_logger
from transformers.utils import get_json_schema

from ..compat import supports_tool_calling
from ..errors import ConfigError, DataError, RolloutError
from ..rewards.guard import TookTooLong, in_time

logger = get_logger(__name__)
Tools = dict[str, Callable[..., Any]]
_TASKS: set[Any] = set()  # of calls that go on after they were cancelled; a loop itself keeps none


@dataclass
class TimedTools:
    """The tools of a run, with a limit in time for every call.

    Attributes:
        seconds: a call may take.
        pools: TRL's, of environments that are used again, by name.
        hung: environments with a call that has not come back. No later call reaches them, and no later rollout.
    """

    seconds: float
    pools: dict[Any, list[Any]]
    hung: list[Any] = field(default_factory=list)
    _said: set[str] = field(default_factory=set)

    def of_rows(self, now: Sequence[Tools], later: Sequence[Tools], environments: Sequence[Any] | None) -> list[Any]:
        """TRL's synchronous and asynchronous tools of each row, with the limit.

        Args:
            environments: of each row; None without any.
        """
        self.hung.clear()
        owners = environments or [None] * len(now)
        return [
            [
                {name: limit(name, tool, owner) for name, tool in tools.items()}
                for tools, owner in zip(rows, owners, strict=True)
            ]
            for limit, rows in ((self._now, now), (self._later, later))
        ]

    def _now(self, name: str, tool: Callable[..., Any], environment: Any) -> Callable[..., Any]:
        owned = environment is not None and getattr(tool, "__self__", None) is environment

        def timed(**arguments: Any) -> Any:
            self._refuse_hung(owned, environment)
            try:
                return in_time(functools.partial(tool, **arguments), self.seconds, "tool_timeout")
            except TookTooLong:
                self._say(name, "its thread is left behind, as none can be stopped")
                if owned:
                    self._replace(environment)
                raise

        return timed

    def _later(self, name: str, tool: Callable[..., Any], environment: Any) -> Callable[..., Any]:
        owned = environment is not None and getattr(tool, "__self__", None) is environment

        async def timed(**arguments: Any) -> Any:
            self._refuse_hung(owned, environment)
            task = asyncio.ensure_future(tool(**arguments))
            await asyncio.wait([task], timeout=self.seconds)
            if task.done():
                return task.result()
            task.cancel()
            self._say(name, "it is cancelled")
            await asyncio.wait([task], timeout=min(self.seconds, 1.0))  # it may take its time to end, or never do
            if not task.done():
                _TASKS.add(task)
                task.add_done_callback(_TASKS.discard)
                if owned:
                    self._replace(environment)
            raise TookTooLong(self.seconds, "tool_timeout")

        return timed

    def _refuse_hung(self, owned: bool, environment: Any) -> None:
        if owned and any(environment is other for other in self.hung):
            raise TimeoutError("an earlier call has not come back")

    def _say(self, name: str, what: str) -> None:
        if name not in self._said:
            self._said.add(name)
            logger.warning(
                f"tool '{name}' gave no answer within tool_timeout={self.seconds} seconds: {what}, and the model is "
                "told that the call failed. Said once for each tool; tools/failure_frequency counts every call."
            )

    def _replace(self, environment: Any) -> None:
        """TRL makes an environment where its pool has too few."""
        self.hung.append(environment)
        for pool in self.pools.values():
            pool[:] = [other for other in pool if other is not environment]
        kind = type(environment).__name__
        if kind not in self._said:
            self._said.add(kind)
            logger.warning(f"The environment ({kind}) whose call hung is replaced by a new one for the next rollout.")


# ---- Before training ------------------------------------------------------------------------------------------------


def check_tools(tools: Sequence[Any], processing_class: Any, datasets: Sequence[Any]) -> None:
    """Refuse tools that cannot be shown to the model, and prompts that no tool can be shown with.

    Args:
        processing_class: the tokenizer or processor.
        datasets: those that have rows to look at.

    Raises:
        ConfigError, DataError: names the tool or the prompt.
    """
    if not supports_tool_calling(processing_class):
        has = "has no chat template" if processing_class.chat_template is None else "has one that leaves them out"
        raise ConfigError(
            f"tools and environments need a chat template that renders tool calls and answers, and this "
            f"tokenizer {has}; take a model that was trained to call tools, or set a template."
        )
    for tool in tools:
        _check_schema(tool, f"tool {getattr(tool, '__name__', tool)!r}")
    for dataset in datasets:
        prompt = dataset[0].get("prompt")
        if isinstance(prompt, str):
            raise DataError(
                f"tools and environments need prompts that are lists of messages, and the first one is the text "
                f"{prompt[:40]!r}; write [{{'role': 'user', 'content': ...}}]."
            )


def _check_schema(tool: Any, what: str) -> None:
    try:
        get_json_schema(tool)
    except Exception as error:  # of several kinds
        raise ConfigError(
            f"{what} cannot be shown to the model ({error}); give every argument a type and, in a docstring with a "
            "section 'Args:', a description."
        ) from error


def checked_environments(factories: Any, seconds: float | None, datasets: Sequence[Any]) -> Any:
    """The factory, or the factories by name, of environments that can be reset, within a time.

    Raises:
        ConfigError, DataError: where it is no factory, or the data name another environment.
    """
    if factories is None or callable(factories):
        return None if factories is None else _checked_factory(factories, seconds)
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


def _checked_factory(factory: Callable[[], Any], seconds: float | None) -> Callable[[], Any]:
    @functools.wraps(factory, updated=())
    def make() -> Any:
        environment = factory()
        kind = type(environment)
        methods = dict(inspect.getmembers(kind, inspect.isfunction))
        if "reset" not in methods:
            raise ConfigError(
                f"environment {kind.__name__} has no method `reset`, which begins a rollout; give it one that takes "
                "the row's columns as keywords and returns what is added to the prompt, or None."
            )
        for name in methods.keys() - {"reset", "get_reward"}:
            if not name.startswith("_"):
                _check_schema(getattr(environment, name), f"method '{name}' of environment {kind.__name__}")
        if seconds is not None:
            environment.reset = _timed_reset(environment.reset, kind.__name__, seconds)
        return environment

    return make


def _timed_reset(reset: Callable[..., Any], kind: str, seconds: float) -> Callable[..., Any]:
    @functools.wraps(reset)
    def timed(**row: Any) -> Any:
        try:
            return in_time(functools.partial(reset, **row), seconds, "tool_timeout")
        except TookTooLong as error:
            raise RolloutError(f"`reset` of environment {kind}: {error}; a rollout cannot begin without it.") from None

    return timed
