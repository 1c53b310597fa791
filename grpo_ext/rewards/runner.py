"""Reward functions and reward models score the completions that one process has sampled.

Differs from TRL's `_calculate_rewards`: a function is called once for each chunk of completions, its result is checked,
a call that fails may be made again, and no data is exchanged between processes. The rollout worker calls `score`;
`join` gathers the rewards and what the functions logged. B completions of this process, F reward functions.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import send_to_device
from torch import nn
from trl import apply_chat_template, is_conversational

from ..errors import RewardError
from .calls import RewardCall
from .guard import STRICT, Faults, GuardedCall, Rewards
from .workers import RewardWorkers

logger = get_logger(__name__)
Scored = list[tuple[Rewards, RewardCall]]  # of one function, by chunk


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it returns a coroutine: a function, a partial of one, or an object whose `__call__` does."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


@dataclass(frozen=True)
class RewardFunctions:
    """What scores completions, as the trainer holds it when a rollout batch begins.

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

    def synchronous(self) -> Iterator[tuple[int, Callable[..., Any]]]:
        """The number of each function that is neither a model nor asynchronous, and the function."""
        for number, function in enumerate(self.functions):
            if not isinstance(function, nn.Module) and not is_async(function):
                yield number, function


@dataclass(frozen=True)
class RewardRows:
    """The completions of one process.

    Attributes:
        inputs: rows of the data set; all columns but the prompt and the completion become keywords.
        prompts, completions: texts, or lists of messages.
        completion_ids: token ids of each completion.
        environments: the environment of each completion; None without environments.
        first: place of the first of these completions in the rollout batch, over all processes.
        chunk: completions in one call; the rows are whole chunks, so cutting them from the first cuts by global order;
            None: all rows in one call.
    """

    inputs: Sequence[Mapping[str, Any]]
    prompts: list[Any]
    completions: list[Any]
    completion_ids: list[Any]
    environments: list[Any] | None = None
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
        if (size := self.chunk or rows) >= rows:
            return [(self.first, keywords)]
        return [
            (self.first + start, {name: values[start : start + size] for name, values in keywords.items()})
            for start in range(0, rows, size)
        ]


def no_profile(name: str) -> AbstractContextManager[Any]:
    """A context that measures nothing."""
    return nullcontext()


@dataclass(frozen=True)
class RewardRunner:
    """Calls reward functions and reward models.

    Attributes:
        device: where the rewards are, and the inputs of reward models.
        faults: what is done about a function that hangs or raises.
        workers: processes that synchronous functions run in; None: they run here, in order.
        async_loop: the running loop of asynchronous functions; None where the trainer was built without any.
        profile: a context around a function's work, by its name.
    """

    device: torch.device
    faults: Faults = STRICT
    workers: RewardWorkers | None = None
    async_loop: asyncio.AbstractEventLoop | None = None
    profile: Callable[[str], AbstractContextManager[Any]] = no_profile

    def start_workers(self, sources: RewardFunctions) -> None:
        """Start the processes of `workers` with the synchronous functions, before training.

        Raises:
            ConfigError: a function cannot be sent there, or loaded there.
        """
        assert self.workers is not None
        for number, function in sources.synchronous():
            self.workers.add(function, sources.names[number])
        self.workers.start()

    def score(
        self,
        sources: RewardFunctions,
        rows: RewardRows,
        *,
        state: Any,
        log_metric: Callable[[str, float], None] | None = None,
        log_extra: Callable[[str, Any], None] | None = None,
    ) -> tuple[torch.Tensor, list[RewardCall]]:
        """The rewards, float32 (B, F), NaN where a function does not apply; and what each call logged.

        Models and synchronous functions run in the order of the functions, then all asynchronous ones at once. With
        `workers` the chunks of all synchronous functions are submitted before the first of them is awaited.

        Args:
            state: of the Trainer, for the functions.
            log_metric, log_extra: the user's own recorders, which the functions get; None: the calls record.

        Raises:
            RewardError: a function failed, or returned something that is no reward.
            ConfigError: a function cannot be sent to the processes of `workers`.
        """
        rewards_BF = torch.zeros(len(rows.completions), len(sources.functions), device=self.device)
        if not rows.completions:
            return rewards_BF, []
        all_recorders = {"log_metric": log_metric, "log_extra": log_extra}
        recorders = {name: record for name, record in all_recorders.items() if record is not None}
        chunks = [(first, {**keywords, "trainer_state": state}) for first, keywords in rows.chunks()]
        calls = {
            number: [
                GuardedCall(function, name, number, first, kwargs, recorders, self.faults) for first, kwargs in chunks
            ]
            for number, (function, name) in enumerate(zip(sources.functions, sources.names, strict=True))
            if not isinstance(function, nn.Module)
        }
        scored = self._synchronous(sources, rows, calls, rewards_BF)
        scored |= self._asynchronous({number: calls[number] for number in calls if number not in scored})
        for number, parts in scored.items():
            rewards = [torch.nan if reward is None else reward for part, _ in parts for reward in part]
            rewards_BF[:, number] = torch.tensor(rewards, dtype=torch.float32, device=self.device)
        _warn_of_unscored(rows, rewards_BF)
        return rewards_BF, [call for number in sorted(scored) for _, call in scored[number]]

    def keep_company(self, sources: RewardFunctions, rows: RewardRows) -> None:
        """Run the reward models alone, on completions that do not count, where their forward is a collective."""
        for number, function in enumerate(sources.functions):
            if isinstance(function, nn.Module):
                self._model_rewards(sources, number, rows)

    def _synchronous(
        self,
        sources: RewardFunctions,
        rows: RewardRows,
        calls: Mapping[int, list[GuardedCall]],
        rewards_BF: torch.Tensor,
    ) -> dict[int, Scored]:
        """What synchronous functions return; rewards of models go into their columns of `rewards_BF`."""
        scored: dict[int, Scored] = {}
        jobs = self._submit(sources, calls)
        try:
            for number, function in enumerate(sources.functions):
                if isinstance(function, nn.Module):
                    with self.profile(sources.names[number]):
                        rewards_BF[:, number] = self._model_rewards(sources, number, rows)
                elif not is_async(function):
                    with self.profile(sources.names[number]):
                        if self.workers is None:
                            scored[number] = [call.score() for call in calls[number]]
                        else:
                            scored[number] = [job.result() for job in jobs[number]]
        except BaseException:  # the first chunk that fails for good ends the others
            for job in (job for several in jobs.values() for job in several):
                job.cancel()
            if self.workers is not None:
                self.workers.kill()
            raise
        return scored

    def _submit(
        self, sources: RewardFunctions, calls: Mapping[int, list[GuardedCall]]
    ) -> dict[int, list[Future[tuple[Rewards, RewardCall]]]]:
        """Begin the calls of synchronous functions in other processes, by function; nothing without `workers`."""
        if (workers := self.workers) is None:
            return {}
        synchronous = list(sources.synchronous())
        for number, function in synchronous:
            workers.add(function, sources.names[number])
        ended = workers.ended
        return {
            number: [workers.submit(functools.partial(call.score, ended)) for call in calls[number]]
            for number, _ in synchronous
        }

    def _asynchronous(self, calls: Mapping[int, list[GuardedCall]]) -> dict[int, Scored]:
        """What asynchronous functions return; all chunks of all functions run concurrently.

        Raises:
            RewardError: there is no loop to run them on.
        """
        if not calls:
            return {}
        if self.async_loop is None:
            name = next(iter(calls.values()))[0].name
            raise RewardError(
                f"reward function '{name}' is asynchronous, and the trainer was built without an asynchronous function;"
                " pass it as reward_funcs when the trainer is built."
            )

        async def of_function(chunks: list[GuardedCall]) -> Scored:
            with self.profile(chunks[0].name):
                return await asyncio.gather(*(call.score_later() for call in chunks))

        async def of_all() -> list[Scored]:
            return await asyncio.gather(*(of_function(chunks) for chunks in calls.values()))

        return dict(zip(calls, asyncio.run_coroutine_threadsafe(of_all(), self.async_loop).result()))

    def _model_rewards(self, sources: RewardFunctions, number: int, rows: RewardRows) -> torch.Tensor:
        """The first logit of a reward model for each completion (B,); all completions are in one forward."""
        processor, pairs = sources.processing_classes[number], zip(rows.prompts, rows.completions, strict=True)
        texts = [prompt + completion for prompt, completion in pairs]
        if is_conversational({"prompt": rows.prompts[0]}):
            options = sources.chat_template_kwargs
            texts = [apply_chat_template({"messages": text}, processor, **options)["text"] for text in texts]
        inputs = processor(
            text=texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False
        )
        with torch.inference_mode():
            return sources.functions[number](**send_to_device(inputs, self.device)).logits[:, 0]


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
