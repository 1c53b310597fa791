"""Calls reward functions and reward models for the completions of one process.

Differs from TRL's `_calculate_rewards`: a function is called once for each chunk of completions, its result is checked,
a failed call may be retried, and processes exchange no data. The rollout worker calls it; `join` gathers rewards and
logs. B completions of this process, F reward functions.
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
from .guard import STRICT, ChunkRewards, Faults, GuardedCall
from .workers import RewardWorkers

logger = get_logger(__name__)
# columns of a data set that reward functions do not get: those that TRL leaves out, and names of arguments
_NO_COLUMNS = ("prompt", "completion", "completion_ids", "log_metric", "log_extra")


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
        columns: dict[str, Any] = {n: [row[n] for row in self.inputs] for n in self.inputs[0] if n not in _NO_COLUMNS}
        if self.environments is not None:
            columns["environments"] = self.environments
        return columns

    def keywords_of(self, function: Callable[..., Any]) -> dict[str, Any]:
        """A function's keywords. TRL's function that calls `get_reward` gets None for a retired environment."""
        keywords = dict(
            prompts=self.prompts, completions=self.completions, completion_ids=self.completion_ids, **self.columns()
        )
        if self.retired and "_env_type" in parameters_of(function):
            keywords["environments"] = [None if id(e) in self.retired else e for e in keywords["environments"]]
        return keywords


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

    def compute(
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
            recorders: the user's overrides of `log_metric` and `log_extra`, by these names.

        Raises:
            RewardError: a function failed, or returned something that is not a reward.
            ConfigError: a function cannot be sent to the processes of `workers`.
        """
        rewards_BF = torch.zeros(len(rows.completions), len(sources.functions), device=self.device)
        if not rows.completions:
            return rewards_BF, []
        self.pack_functions(sources)  # before any call, whose thread may import while a function is pickled
        calls = self._calls(sources, rows, state, recorders or {})
        started: dict[int, list[Callable[[], ChunkRewards]]] = {}
        results: dict[int, list[ChunkRewards]] = {}
        try:
            for number, function in enumerate(sources.functions):
                if isinstance(function, nn.Module):
                    started[number] = [partial(self._run_model, sources, number, rows)]
                elif self.workers is not None and not is_async(function):
                    started[number] = [self.workers.submit(call).result for call in calls[number]]
                elif not is_async(function):
                    started[number] = [call.run for call in calls[number]]
            for number, waiting in started.items():
                with self.profile(sources.names[number]):
                    results[number] = [result() for result in waiting]
        except BaseException:
            if self.workers is not None:  # the first chunk that fails for good ends the others
                self.workers.kill()
            raise
        results |= self._run_async({number: calls[number] for number in calls if number not in started})
        for number, chunks in results.items():
            rewards = [torch.nan if reward is None else reward for part, _ in chunks for reward in part]
            rewards_BF[:, number] = torch.tensor(rewards, dtype=torch.float32)
        _warn_of_unscored(rows, rewards_BF)
        return rewards_BF, [record for chunks in results.values() for _, record in chunks]

    def _calls(
        self, sources: RewardFunctions, rows: RewardRows, state: Any, recorders: Mapping[str, Callable[..., None]]
    ) -> dict[int, list[GuardedCall]]:
        """The calls of each function, by its number."""
        size = rows.chunk or len(rows.completions)
        calls: dict[int, list[GuardedCall]] = {}
        for number, (function, name) in enumerate(zip(sources.functions, sources.names, strict=True)):
            keywords = rows.keywords_of(function)
            calls[number] = []
            for start in range(0, len(rows.completions), size):
                chunk = {column: values[start : start + size] for column, values in keywords.items()}
                record = RewardCall(name, number, rows.first + start, len(chunk["completions"]))
                chunk["trainer_state"] = state
                calls[number].append(GuardedCall(function, record, chunk, recorders, self.faults))
        return calls

    def join_remaining_forwards(self, sources: RewardFunctions, rows: RewardRows) -> None:
        """Run only the reward models, on completions that do not count, where their forward is a collective."""
        for number, function in enumerate(sources.functions):
            if isinstance(function, nn.Module):
                self._run_model(sources, number, rows)

    def _run_async(self, calls: Mapping[int, list[GuardedCall]]) -> dict[int, list[ChunkRewards]]:
        """The results of asynchronous functions, which all run concurrently.

        Raises:
            RewardError: a function failed, or there is no loop to run it on.
        """
        if not calls:
            return {}
        if self.async_loop is None:
            name = next(iter(calls.values()))[0].record.function
            raise RewardError(
                f"reward function '{name}' is asynchronous, and the trainer was built without an asynchronous function;"
                " pass it as reward_funcs when the trainer is built."
            )

        async def of_function(chunks: list[GuardedCall]) -> list[ChunkRewards]:
            with self.profile(chunks[0].record.function):
                return await asyncio.gather(*(chunk.run_async() for chunk in chunks))

        async def of_all() -> list[list[ChunkRewards]]:
            return await asyncio.gather(*map(of_function, calls.values()))

        return dict(zip(calls, asyncio.run_coroutine_threadsafe(of_all(), self.async_loop).result()))

    def _run_model(self, sources: RewardFunctions, number: int, rows: RewardRows) -> ChunkRewards:
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
