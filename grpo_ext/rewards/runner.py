"""Scores the completions of one process with reward functions and reward models.

Differs from TRL's `_calculate_rewards`: a function is called once for each chunk of completions, its result is checked,
a failed call may be retried, and processes exchange no data. The rollout worker calls `score`; `join` gathers rewards
and logs. B completions of this process, F reward functions.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import send_to_device
from torch import nn
from trl import apply_chat_template, is_conversational

from ..compat import parameters_of
from ..errors import RewardError
from .calls import RewardCall
from .guard import STRICT, Faults, GuardedCall, ScoredChunk
from .workers import RewardWorkers

logger = get_logger(__name__)


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it returns a coroutine: a function, a partial of one, or an object whose `__call__` does."""
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


@dataclass(frozen=True)
class RewardFunctions:
    """The trainer's reward functions at the start of a rollout batch.

    Attributes:
        functions: callables, and reward models (modules with one logit).
        names: of the functions.
        processing_classes: the tokenizers of reward models; None for callables.
        chat_template_kwargs: arguments of the chat template that a reward model's conversations are written with.
    """

    functions: Sequence[Any]
    names: Sequence[str]
    processing_classes: Sequence[Any]
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardRows:
    """The completions of one process.

    Attributes:
        inputs: rows of the data set; all columns but the prompt and the completion become keywords.
        prompts, completions: texts, or lists of messages.
        completion_ids: token ids of each completion.
        environments: the environment of each completion; None without environments.
        retired: the `id` of each environment that has no reward, because a call has not come back.
        first: place of the first of these completions in the rollout batch, over all processes.
        chunk: completions in one call; the rows are whole chunks, so cutting them from the first cuts by global order;
            None: all rows in one call.
    """

    inputs: Sequence[Mapping[str, Any]]
    prompts: list[Any]
    completions: list[Any]
    completion_ids: list[Any]
    environments: list[Any] | None = None
    retired: Collection[int] = ()
    first: int = 0
    chunk: int | None = None

    def columns(self) -> dict[str, Any]:
        """The keywords with one value for each completion."""
        names = [name for name in self.inputs[0] if name not in ("prompt", "completion", "completion_ids")]
        columns: dict[str, Any] = {name: [row[name] for row in self.inputs] for name in names}
        if self.environments is not None:
            columns["environments"] = self.environments
        return columns

    def chunks(self) -> list[tuple[int, dict[str, Any]]]:
        """For each chunk the place of its first completion in the rollout batch, and its keywords, cut."""
        keywords = dict(
            prompts=self.prompts, completions=self.completions, completion_ids=self.completion_ids, **self.columns()
        )
        rows = len(self.completions)
        size = self.chunk or rows
        return [
            (self.first + start, {name: values[start : start + size] for name, values in keywords.items()})
            for start in range(0, rows, size)
        ]

    def keywords_of(self, function: Callable[..., Any], keywords: dict[str, Any]) -> dict[str, Any]:
        """The keywords of a function: TRL's that calls `get_reward` gets None in the place of a retired environment."""
        if not self.retired or "_env_type" not in parameters_of(function):
            return keywords
        environments = [None if id(value) in self.retired else value for value in keywords["environments"]]
        return {**keywords, "environments": environments}


@dataclass(frozen=True)
class RewardRunner:
    """Calls reward functions and reward models.

    Attributes:
        device: where the rewards are, and the inputs of reward models.
        faults: how a function that hangs or raises is handled.
        workers: processes that run synchronous functions; None: they run here, in order.
        async_loop: the running loop of asynchronous functions; None where the trainer was built without any.
        profile: a context around a function's work, by its name.
    """

    device: torch.device
    faults: Faults = STRICT
    workers: RewardWorkers | None = None
    async_loop: asyncio.AbstractEventLoop | None = None
    profile: Callable[[str], AbstractContextManager[Any]] = nullcontext

    def pack_functions(self, sources: RewardFunctions) -> None:
        """Pickle the synchronous functions for `workers`.

        Raises:
            ConfigError: a function cannot be sent to another process.
        """
        if self.workers is not None:
            for name, function in zip(sources.names, sources.functions, strict=True):
                if not isinstance(function, nn.Module) and not is_async(function):
                    self.workers.add(function, name)

    def score(
        self,
        sources: RewardFunctions,
        rows: RewardRows,
        state: Any,
        recorders: Mapping[str, Callable[..., None]] | None = None,
    ) -> tuple[torch.Tensor, list[RewardCall]]:
        """The rewards, float32 (B, F), NaN where a function does not apply; and what each call logged.

        Models and synchronous functions run in the order of the functions, then all asynchronous ones at once. With
        `workers` the chunks of all synchronous functions are submitted before the first of them is awaited.

        Args:
            state: of the Trainer, for the functions.
            recorders: the user's own `log_metric` and `log_extra`, which the functions get; those that are missing
                record in the calls.

        Raises:
            RewardError: a function failed, or returned something that is no reward.
            ConfigError: a function cannot be sent to the processes of `workers`.
        """
        rewards_BF = torch.zeros(len(rows.completions), len(sources.functions), device=self.device)
        if not rows.completions:
            return rewards_BF, []
        self.pack_functions(sources)  # before any call, whose thread may import while a function is pickled
        chunks = [(first, {**keywords, "trainer_state": state}) for first, keywords in rows.chunks()]
        calls: dict[int, list[GuardedCall]] = {  # by the number of the function
            number: [
                GuardedCall(
                    function, name, number, first, rows.keywords_of(function, keywords), recorders or {}, self.faults
                )
                for first, keywords in chunks
            ]
            for number, (function, name) in enumerate(zip(sources.functions, sources.names, strict=True))
        }
        asynchronous = {number: calls[number] for number in calls if is_async(sources.functions[number])}
        try:
            started = {n: self._start(sources, n, rows, calls[n]) for n in calls if n not in asynchronous}
            scored = {number: self._results(sources.names[number], results) for number, results in started.items()}
        except BaseException:
            if self.workers is not None:  # the first chunk that fails for good ends the others
                self.workers.kill()
            raise
        scored |= self._score_async(asynchronous)
        for number, parts in scored.items():
            rewards_BF[:, number] = _column([reward for rewards, _ in parts for reward in rewards])
        _warn_of_unscored(rows, rewards_BF)
        return rewards_BF, [call for parts in scored.values() for _, call in parts]

    def join_remaining_forwards(self, sources: RewardFunctions, rows: RewardRows) -> None:
        """Run only the reward models, on completions that do not count, where their forward is a collective."""
        for number, function in enumerate(sources.functions):
            if isinstance(function, nn.Module):
                self._score_by_model(sources, number, rows)

    def _start(
        self, sources: RewardFunctions, number: int, rows: RewardRows, calls: Sequence[GuardedCall]
    ) -> list[Callable[[], ScoredChunk]]:
        """Callables that return the scored chunks of a reward model or a synchronous function; `workers` start now."""
        if isinstance(sources.functions[number], nn.Module):
            return [partial(self._score_by_model, sources, number, rows)]
        if self.workers is not None:
            return [self.workers.submit(call).result for call in calls]
        return [call.score for call in calls]

    def _results(self, name: str, results: Sequence[Callable[[], ScoredChunk]]) -> list[ScoredChunk]:
        with self.profile(name):
            return [result() for result in results]

    def _score_async(self, calls: Mapping[int, list[GuardedCall]]) -> dict[int, list[ScoredChunk]]:
        """The scored chunks of asynchronous functions, which all run concurrently.

        Raises:
            RewardError: a function failed, or there is no loop to run it on.
        """
        if not calls:
            return {}
        if self.async_loop is None:
            name = next(iter(calls.values()))[0].name
            raise RewardError(
                f"reward function '{name}' is asynchronous, and the trainer was built without an asynchronous function;"
                " pass it as reward_funcs when the trainer is built."
            )

        async def of_function(chunks: list[GuardedCall]) -> list[ScoredChunk]:
            with self.profile(chunks[0].name):
                return await asyncio.gather(*(chunk.score_later() for chunk in chunks))

        async def of_all() -> list[list[ScoredChunk]]:
            return await asyncio.gather(*map(of_function, calls.values()))

        return dict(zip(calls, asyncio.run_coroutine_threadsafe(of_all(), self.async_loop).result()))

    def _score_by_model(self, sources: RewardFunctions, number: int, rows: RewardRows) -> ScoredChunk:
        """The first logit of a reward model for each completion; all completions are in one forward."""
        processor = sources.processing_classes[number]
        texts = [prompt + completion for prompt, completion in zip(rows.prompts, rows.completions, strict=True)]
        if is_conversational({"prompt": rows.prompts[0]}):
            options = sources.chat_template_kwargs
            texts = [apply_chat_template({"messages": text}, processor, **options)["text"] for text in texts]
        inputs = processor(
            text=texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False
        )
        with torch.inference_mode():
            logits = sources.functions[number](**send_to_device(inputs, self.device)).logits
        return logits[:, 0].tolist(), RewardCall(sources.names[number], number, rows.first, len(texts))


def _column(rewards: list[float | None]) -> torch.Tensor:
    return torch.tensor([torch.nan if reward is None else reward for reward in rewards], dtype=torch.float32)


def _warn_of_unscored(rows: RewardRows, rewards_BF: torch.Tensor) -> None:
    """Name the first completion that every function left unscored."""
    unscored_B = torch.isnan(rewards_BF).all(dim=1)
    if not unscored_B.any():
        return
    row = int(unscored_B.nonzero()[0])
    shown = {name: values[row] for name, values in rows.columns().items()}
    shown |= {"prompt": rows.prompts[row], "completion": rows.completions[row]}
    logger.warning(
        f"All reward functions returned None for the following kwargs:\n{shown}\n"
        "Please ensure that at least one reward function returns a valid reward."
    )
