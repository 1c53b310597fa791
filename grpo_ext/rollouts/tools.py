"""Environments and tools: a rollout begins with a `reset`, then tools answer the calls of a transcript.

TRL's tool loop, one transcript at a time. In TRL a tool that hangs stops the run on every process; here its call fails,
and the model reads the error; `reset` has a time limit too, and an environment with a call that never returned is not
used again. An answer is added only where it fits, so nothing is rolled back. Called by the worker, which samples a turn
between `Toolbox.answer` and `continue_with`.
"""

import asyncio
import concurrent.futures
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Container, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..compat import supports_tool_calling
from ..errors import ConfigError, DataError, RolloutError, did_you_mean
from ..forward.images import images_in
from ..rewards.guard import CallTimeout, in_time
from ..runtime.messages import logger
from ..sampling.turn import Turn
from .chat import Chat
from .transcript import Messages, Transcript

Tool = Callable[..., Any]
Pools = dict[str | None, list[Any]]


@dataclass(frozen=True)
class Environments:
    # by name; a single factory has the name None. Without factories a run has no environments. Where there are several,
    # the column `environment` of a row chooses one, and `reset` does not get that column
    factories: Mapping[str | None, Callable[[], Any]] = field(default_factory=dict)
    pools: Pools = field(default_factory=dict)  # instances to reuse, by name
    # instances that are no longer used, by `id`; kept alive so that an `id` is not reused
    retired: dict[int, Any] = field(default_factory=dict)

    def begin(self, transcripts: Sequence[Transcript], seconds: float | None = None) -> None:
        """Give each transcript its environment, after a reset, and its prompt with the observation.

        Without environments the prompt is the row's. With environments a row need not have a prompt.
        """
        if not self.factories:
            for t in transcripts:
                t.prompt = t.row["prompt"]
            return
        in_use: Counter[str | None] = Counter()
        several = None not in self.factories
        for t in transcripts:
            t.prompt = t.row.get("prompt", [{"role": "user", "content": ""}])
            t.environment_name = t.row.get("environment") if several else None
            _check_name(t.environment_name, self.factories)
            pool = self.pools.setdefault(t.environment_name, [])
            if in_use[t.environment_name] == len(pool):
                pool.append(self.factories[t.environment_name]())
            t.environment = pool[in_use[t.environment_name]]
            in_use[t.environment_name] += 1
        for t in transcripts:
            columns = {name: value for name, value in t.row.items() if not (several and name == "environment")}
            try:
                observation = in_time(partial(t.environment.reset, **columns), seconds, "tool_timeout")
                t.prompt = _with_observation(t.prompt, observation)
            except Exception as error:
                cause = str(error) if isinstance(error, CallTimeout) else f"{type(error).__name__}: {error}"
                raise RolloutError(
                    f"`reset` of environment {type(t.environment).__name__}: {cause}; a rollout needs what `reset` "
                    "returns: a text, a list of content parts, or None."
                ) from error

    def uses(self, environment: Any) -> bool:
        return id(environment) not in self.retired

    def retire(self, environment: Any) -> None:
        """Stop using an environment whose call hangs: its thread may still change it. Its reward is None."""
        self.retired[id(environment)] = environment
        for pool in self.pools.values():
            pool[:] = filter(self.uses, pool)


def _with_observation(prompt: Messages, observation: str | list[Any] | None) -> Messages:
    if observation is None:
        return prompt
    content = prompt[-1]["content"]
    if isinstance(observation, list) and isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if isinstance(observation, str) and isinstance(content, list):
        observation = [{"type": "text", "text": observation}]
    return [*prompt[:-1], {**prompt[-1], "content": content + observation}]


@dataclass(frozen=True)
class TurnLimits:
    max_completion_length: int  # tokens, including those of tools and environments
    context: int = sys.maxsize  # tokens of prompt and completion that the model can read
    max_turns: int = sys.maxsize  # the most times that tools answer
    seconds: float | None = None  # time limit of a tool call, or of an environment's `reset`; None: no limit
    # tokens that end a message; after any other end (a stop string) an answer begins with the template's end token
    message_ends: Container[int] = ()

    def has_room(self, transcript: Transcript, answer: int) -> bool:
        """Whether an answer of so many tokens fits and leaves the model at least one token of context."""
        completion = len(transcript.ids) + answer
        return completion <= self.max_completion_length and len(transcript.prompt_ids) + completion < self.context


@dataclass(frozen=True)
class Toolbox:
    tools: Sequence[Tool]  # the standalone ones
    environments: Environments  # their public methods are tools too
    loop: asyncio.AbstractEventLoop | None = None  # runs asynchronous tools on its own thread; None without any

    def tools_of(self, transcript: Transcript) -> dict[str, Tool]:
        """The tools that a transcript may call, by name; of two with one name a synchronous one, or else the last."""
        methods = []
        if (environment := transcript.environment) is not None:
            names = [name for name, _ in inspect.getmembers(type(environment), inspect.isfunction)]
            public = (n for n in names if n not in ("reset", "get_reward") and not n.startswith("_"))
            methods = [getattr(environment, name) for name in public]
        tools = sorted([*self.tools, *methods], key=inspect.iscoroutinefunction, reverse=True)
        return {tool.__name__: tool for tool in tools}

    def answer(self, transcripts: Sequence[Transcript], chat: Chat, limits: TurnLimits) -> list[Transcript]:
        """Answer the calls of each transcript; returns the transcripts that the model continues."""
        active = []
        for t in transcripts:
            if not t.calls or t.turns >= limits.max_turns:
                continue
            answers = self._answers(t, limits.seconds)
            by_string = t.ended and bool(t.ids) and t.ids[-1] not in limits.message_ends
            ids = chat.of_row(t.row).suffix_ids(answers, by_string)
            t.calls = []
            if limits.has_room(t, len(ids)):
                t.turns += 1
                t.completion = [*t.completion, *answers]
                t.show(images_in(answers))
                t.add_answer(ids)
                active.append(t)
        return active

    def _answers(self, transcript: Transcript, seconds: float | None) -> Messages:
        """Messages that answer all calls: synchronous tools in order, then asynchronous ones, which run together."""
        tools = self.tools_of(transcript)
        results: list[tuple[str, Any]] = []
        later: list[tuple[str, Coroutine[Any, Any, Any]]] = []
        for call in transcript.calls:
            transcript.tool_calls += 1
            function = call.get("function")
            if call.get("type") != "function" or not isinstance(function, Mapping):
                error = f"Unsupported tool call type: {call.get('type')}"
                results.append((call.get("name", "unknown"), _failure(transcript, error)))
                continue
            name = function["name"]
            try:
                if name not in tools:
                    raise ValueError(f"Tool {name} not found.")
                result = self._begin(tools[name], function["arguments"], transcript.environment, seconds)
            except Exception as error:
                results.append((name, _failure(transcript, error)))
            else:
                (later if inspect.iscoroutinefunction(tools[name]) else results).append((name, result))
        results += self._awaited(transcript, tools, later, seconds) if later else []
        contents = [(name, result if isinstance(result, list) else str(result)) for name, result in results]
        return [{"role": "tool", "name": name, "content": content} for name, content in contents]

    def _begin(self, tool: Tool, arguments: Any, environment: Any, seconds: float | None) -> Any:
        """What a synchronous tool returns; the coroutine of an asynchronous one."""
        if _is_method_of(environment, tool) and not self.environments.uses(environment):
            raise TimeoutError("an earlier call has not returned")
        if inspect.iscoroutinefunction(tool):
            return tool(**arguments)
        try:
            return in_time(lambda: tool(**arguments), seconds, "tool_timeout")
        except CallTimeout:
            self._give_up(tool, environment, seconds, "its thread keeps running, because threads cannot be stopped")
            raise

    def _awaited(
        self,
        transcript: Transcript,
        tools: Mapping[str, Tool],
        later: Sequence[tuple[str, Coroutine[Any, Any, Any]]],
        seconds: float | None,
    ) -> list[tuple[str, Any]]:
        assert self.loop is not None
        futures = [asyncio.run_coroutine_threadsafe(coroutine, self.loop) for _, coroutine in later]
        concurrent.futures.wait(futures, timeout=seconds)
        results = []
        for (name, _), future in zip(later, futures, strict=True):
            try:
                if not future.done():
                    future.cancel()
                    self._give_up(tools[name], transcript.environment, seconds, "it is cancelled")
                    raise CallTimeout(seconds, "tool_timeout")
                results.append((name, future.result()))
            except Exception as error:
                results.append((name, _failure(transcript, error)))
        return results

    def _give_up(self, tool: Tool, environment: Any, seconds: float | None, action: str) -> None:
        if _is_method_of(environment, tool):
            self.environments.retire(environment)
        logger.warning_once(
            f"tool '{tool.__name__}' did not answer within tool_timeout={seconds} seconds: {action}, and the model is "
            "told that the call failed. An environment whose method hangs has no reward (None) and is replaced before "
            "the next rollout. Logged once for each tool; tools/failure_frequency counts every call."
        )


def _is_method_of(environment: Any, tool: Tool) -> bool:
    return environment is not None and getattr(tool, "__self__", None) is environment


def _failure(transcript: Transcript, error: object) -> dict[str, str]:
    """Count a failed call, and return what the model reads about it; the words are TRL's."""
    transcript.tool_failures += 1
    return {"error": str(error)}


def continue_with(transcript: Transcript, turn: Turn, chat: Chat, limits: TurnLimits) -> None:
    """Add a turn of the model after an answer, cut to the tokens that are left; with none left no message is added."""
    turn = turn.first(limits.max_completion_length - len(transcript.ids))
    transcript.add_turn(turn)
    transcript.calls = []
    if turn.ids:
        chat.add_message(transcript, turn.ids, transcript.all_ids[: -len(turn.ids)])


# ---- Before training ------------------------------------------------------------------------------------------------


def check_tools(tools: Sequence[Tool], processing_class: Any, first_rows: Sequence[Any]) -> None:
    names = [getattr(tool, "__name__", None) for tool in tools]
    if None in names or len(set(names)) < len(names):
        raise ConfigError(f"the model calls tools by name, and these are named {names}; give each its own name.")
    if not supports_tool_calling(processing_class):
        has = "has no chat template" if processing_class.chat_template is None else "has one that leaves them out"
        raise ConfigError(
            "tools and environments need a chat template that renders tool calls and answers, and this tokenizer "
            f"{has}; use a model that was trained to call tools, or set a template."
        )
    for row in first_rows:
        if isinstance(prompt := row.get("prompt"), str):
            raise DataError(
                f"tools and environments need prompts that are lists of messages, and the first one is the text "
                f"{prompt[:40]!r}; write [{{'role': 'user', 'content': ...}}]."
            )


def check_names(datasets: Sequence[Any], factories: Any) -> None:
    for dataset in datasets if isinstance(factories, dict) else ():
        for name in set(dataset["environment"]) if "environment" in dataset.column_names else {None}:
            _check_name(name, factories)


def _check_name(name: str | None, factories: Mapping[str | None, Any]) -> None:
    if name not in factories:
        names = [str(known) for known in factories]
        remedy = did_you_mean(str(name), names, f"it makes {', '.join(map(repr, names))}.")
        raise DataError(
            f"a row has environment={name!r}, by its column 'environment', which environment_factory does not have; "
            f"{remedy}"
        )
