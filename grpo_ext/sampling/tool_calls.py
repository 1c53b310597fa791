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
from transformers.utils import DocstringParsingException, TypeHintParsingException, get_json_schema

from ..compat import supports_tool_calling
from ..errors import ConfigError, DataError, RolloutError, shortened
from ..rewards.guard import CallTimeout, in_time

logger = get_logger(__name__)
Tool = Callable[..., Any]
Tools = dict[str, Tool]
_TASKS: set[Any] = set()  # of calls that go on after they were cancelled; a loop itself keeps none


@dataclass
class TimedTools:
    """The tools of a run, with a limit in time for every call.

    An environment with a call that has not come back is taken out of its pool: no later call reaches it, no later
    rollout, and its reward is None, as its thread may still change it.

    Attributes:
        seconds: a call may take.
        pools: TRL's, of environments that are used again, by name.
    """

    seconds: float
    pools: dict[Any, list[Any]]
    _said: set[str] = field(default_factory=set)

    def of_rows(
        self, sync: Sequence[Tools], asynchronous: Sequence[Tools], environments: Sequence[Any] | None
    ) -> list[list[Tools]]:
        """TRL's synchronous and asynchronous tools of each row, with the limit.

        Args:
            environments: of each row; None without any.
        """
        owners = environments or [None] * len(sync)
        return [
            [
                {name: limit(name, tool, _owner(tool, environment)) for name, tool in tools.items()}
                for tools, environment in zip(rows, owners, strict=True)
            ]
            for limit, rows in ((self._sync, sync), (self._async, asynchronous))
        ]

    def _sync(self, name: str, tool: Tool, owner: Any) -> Tool:
        def timed(**arguments: Any) -> Any:
            self._refuse_hung(owner)
            try:
                return in_time(functools.partial(tool, **arguments), self.seconds, "tool_timeout")
            except CallTimeout:
                self._say(name, "its thread is left behind, as none can be stopped")
                self._replace(owner)
                raise

        return timed

    def _async(self, name: str, tool: Tool, owner: Any) -> Tool:
        async def timed(**arguments: Any) -> Any:
            self._refuse_hung(owner)
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
                self._replace(owner)
            raise CallTimeout(self.seconds, "tool_timeout")

        return timed

    def _refuse_hung(self, owner: Any) -> None:
        if owner is not None and not any(owner is other for pool in self.pools.values() for other in pool):
            raise TimeoutError("an earlier call has not come back")

    def _say(self, name: str, what: str) -> None:
        if name not in self._said:
            self._said.add(name)
            logger.warning(
                f"tool '{name}' gave no answer within tool_timeout={self.seconds} seconds: {what}, and the model is "
                "told that the call failed. Said once for each tool; tools/failure_frequency counts every call."
            )

    def _replace(self, owner: Any) -> None:
        """TRL makes an environment where its pool has too few."""
        if owner is None:
            return
        for pool in self.pools.values():
            pool[:] = [other for other in pool if other is not owner]
        kind = type(owner)
        if (reward := getattr(kind, "get_reward", None)) is not None:
            owner.get_reward = _no_reward_later if inspect.iscoroutinefunction(reward) else lambda: None
        if kind.__name__ not in self._said:
            self._said.add(kind.__name__)
            logger.warning(
                f"The environment ({kind.__name__}) whose call hung has no reward (None), and is replaced by a new one "
                "for the next rollout."
            )


def _owner(tool: Tool, environment: Any) -> Any:
    """The environment, where the tool is a method of it."""
    return environment if environment is not None and getattr(tool, "__self__", None) is environment else None


async def _no_reward_later() -> None:
    return None


# ---- Before training ------------------------------------------------------------------------------------------------


def check_tools(tools: Sequence[Any], processing_class: Any, first_rows: Sequence[Any]) -> None:
    """Refuse tools that cannot be shown to the model, and prompts that no tool can be shown with.

    Args:
        processing_class: the tokenizer or processor.
        first_rows: of every data set.

    Raises:
        ConfigError, DataError: names the tool or the prompt.
    """
    if not supports_tool_calling(processing_class):
        has = "has no chat template" if processing_class.chat_template is None else "has one that leaves them out"
        raise ConfigError(
            f"tools and environments need a chat template that renders tool calls and answers, and this "
            f"tokenizer {has}; take a model that was trained to call tools, or set a template."
        )
    names = [getattr(tool, "__name__", None) for tool in tools]
    for tool, name in zip(tools, names):
        if name is None or names.count(name) > 1:
            what = "has no __name__" if name is None else f"is not the only one named {name!r}"
            raise ConfigError(
                f"tool {tool!r} {what}, and the model calls tools by name; give a function of its own name."
            )
        _check_schema(tool, f"tool {name!r}")
    for row in first_rows:
        prompt = row.get("prompt")
        if isinstance(prompt, str):
            raise DataError(
                f"tools and environments need prompts that are lists of messages, and the first one is the text "
                f"{prompt[:40]!r}; write [{{'role': 'user', 'content': ...}}]."
            )


def _check_schema(tool: Any, what: str) -> None:
    try:
        get_json_schema(tool)
    except (TypeHintParsingException, DocstringParsingException) as error:
        raise ConfigError(
            f"{what} cannot be shown to the model ({error}); give every argument a type and, in a docstring with a "
            "section 'Args:', a description."
        ) from error


def checked_environments(factories: Any, seconds: float | None, datasets: Sequence[Any]) -> Any:
    """The factory, or the factories by name, of environments that can be reset, within a time.

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


def _checked_factory(factory: Callable[[], Any], seconds: float | None) -> Callable[[], Any]:
    checked: set[type] = set()  # TRL makes the first environment before training, and more as its pool grows

    @functools.wraps(factory, updated=())
    def make() -> Any:
        environment = factory()
        kind = type(environment)
        if kind not in checked:
            _check_environment(environment, kind, seconds)
            checked.add(kind)
        if hasattr(environment, "__dict__"):
            environment.reset = _checked_reset(environment.reset, kind.__name__, seconds)
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
            f"environment {kind.__name__} has __slots__, and tool_timeout={seconds} needs to put a limit on its "
            "`reset`; add '__dict__' to its slots, or leave tool_timeout out."
        )
    for name in methods.keys() - {"reset", "get_reward"}:
        if not name.startswith("_"):
            _check_schema(getattr(environment, name), f"method '{name}' of environment {kind.__name__}")


def _checked_reset(reset: Callable[..., Any], kind: str, seconds: float | None) -> Callable[..., Any]:
    what = f"`reset` of environment {kind}"

    @functools.wraps(reset)
    def checked(**row: Any) -> Any:
        call = functools.partial(reset, **row)
        try:
            added = call() if seconds is None else in_time(call, seconds, "tool_timeout")
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

    return checked
