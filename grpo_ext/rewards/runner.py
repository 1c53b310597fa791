"""Calls reward functions and reward models for the completions of one process.

Differs from TRL's `_calculate_rewards`: a function is called once for each chunk of completions, its result is checked,
a failed call may be retried, and processes exchange no data. Shapes: B completions of this process, F functions.
"""

import asyncio
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import nn
from trl import apply_chat_template

from ..compat import parameters_of
from ..errors import RewardError
from ..runtime.messages import logger
from .guard import ChunkRewards, Faults, GuardedCall, start
from .worker import RewardCall
from .workers import RewardWorkers

# columns that reward functions do not get: TRL leaves them out, or they are names of arguments
_NO_COLUMNS = ("prompt", "completion", "completion_ids", "log_metric", "log_extra")


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling a function, a partial or an object with `__call__` returns a coroutine."""
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


@dataclass(frozen=True)
class RewardFunctions:
    functions: Sequence[Any]  # callables, and reward models (modules with one logit)
    names: Sequence[str]
    processing_classes: Sequence[Any]  # the tokenizers of reward models; None for callables
    # arguments of the chat template that a reward model's conversations are written with
    chat_template_kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class RewardRows:
    inputs: Sequence[Mapping[str, Any]]  # rows of the data set
    prompts: list[Any]  # texts, or lists of messages, as the completions
    completions: list[Any]
    completion_ids: list[Any]
    environments: list[Any] | None = None  # of each completion
    retired: Collection[int] = ()  # the `id` of each environment without a reward, because a call hangs
    first: int = 0  # place of the first of these completions in the rollout batch, over all processes
    chunk: int | None = None  # completions in one call, a divisor of their number; None: all in one call
    state: Any = None  # the Trainer's, an argument of the functions
    log_extra: Callable[..., None] | None = None  # the user's `_log_completion_extra`
    names: Sequence[str] = ()  # of the columns of all processes, whose rows may have different keys
    ended: Future[None] = field(default_factory=Future)  # done once a call has failed for good, so that others end

    def columns(self) -> dict[str, Any]:
        names = dict.fromkeys([*self.names, *(name for row in self.inputs for name in row)])
        columns: dict[str, Any] = {n: [row.get(n) for row in self.inputs] for n in names if n not in _NO_COLUMNS}
        if self.environments is not None:
            columns["environments"] = self.environments
        return columns

    def keywords_of(self, function: Callable[..., Any]) -> dict[str, Any]:
        """A function's keywords; TRL's function that calls `get_reward` gets None for retired environments."""
        keywords = dict(
            prompts=self.prompts, completions=self.completions, completion_ids=self.completion_ids, **self.columns()
        )
        if self.retired and "_env_type" in parameters_of(function):
            keywords["environments"] = [None if id(e) in self.retired else e for e in keywords["environments"]]
        return keywords


@dataclass(frozen=True)
class RewardRunner:
    device: torch.device  # for the inputs of reward models
    faults: Faults
    workers: RewardWorkers | None  # run synchronous functions; None: those run in this process, in order
    async_loop: asyncio.AbstractEventLoop | None  # None without asynchronous functions
    profile: Callable[[str], AbstractContextManager[Any]] = nullcontext  # around a function's work, by its name

    def kill_workers(self) -> None:
        if self.workers is not None:
            self.workers.kill()

    def pack_functions(self, sources: RewardFunctions) -> None:
        """Pickle the synchronous functions for `workers`; a ConfigError where one cannot be pickled."""
        for name, function in zip(sources.names, sources.functions, strict=True):
            if self.workers is not None and not isinstance(function, nn.Module) and not is_async(function):
                self.workers.add(function, name)

    def compute(self, sources: RewardFunctions, rows: RewardRows) -> tuple[torch.Tensor, list[RewardCall]]:
        """The rewards, float32 (B, F) on the CPU, NaN where a function does not apply; and the logs of each call.

        Models and synchronous functions run in order, then all asynchronous ones at once. With `workers` the chunks of
        all synchronous functions are submitted before the first is awaited.
        """
        rewards_BF = torch.zeros(len(rows.completions), len(sources.functions))
        if not rows.completions:
            return rewards_BF, []
        records: list[RewardCall] = []
        for asynchronous in (False, True):
            numbers = [number for number, each in enumerate(sources.functions) if is_async(each) is asynchronous]
            try:
                begun = [self._begin(sources, number, rows) for number in numbers]
                for number, chunks in zip(numbers, begun, strict=True):
                    with self.profile(sources.names[number]):
                        results = [result() for result in chunks]
                    rewards = [torch.nan if reward is None else reward for part, _ in results for reward in part]
                    rewards_BF[:, number] = torch.tensor(rewards, dtype=torch.float32)
                    records += [_handed_over(record, rows.log_extra) for _, record in results]
            except BaseException:  # the first chunk that fails ends the others
                rows.ended.set_result(None)
                self.kill_workers()
                raise
        for row in torch.isnan(rewards_BF).all(dim=1).nonzero().flatten().tolist()[:1]:  # the first, if there is one
            shown = {name: values[row] for name, values in rows.columns().items()}
            shown |= {"prompt": rows.prompts[row], "completion": rows.completions[row]}
            logger.warning(
                f"All reward functions returned None for the following kwargs:\n{shown}\n"
                "Please ensure that at least one reward function returns a valid reward."
            )
        return rewards_BF, records

    def _begin(self, sources: RewardFunctions, number: int, rows: RewardRows) -> list[Callable[[], ChunkRewards]]:
        """Start the chunks of a function on `workers` or a loop; a function for each returns its rewards."""
        function, name = sources.functions[number], sources.names[number]
        if isinstance(function, nn.Module):
            return [partial(self._run_model, sources, number, rows)]
        keywords, calls = rows.keywords_of(function), []
        size = rows.chunk or len(rows.completions)
        for first in range(0, len(rows.completions), size):
            chunk = {column: values[first : first + size] for column, values in keywords.items()}
            record = RewardCall(name, number, rows.first + first, len(chunk["completions"]))
            chunk["trainer_state"] = rows.state
            calls.append(GuardedCall(function, record, chunk, self.faults))
        if not is_async(function):
            return [call.run_here if self.workers is None else self.workers.submit(call).result for call in calls]
        if self.async_loop is None:
            raise RewardError(
                f"reward function '{name}' is asynchronous, and the trainer was built without asynchronous functions; "
                "pass it as reward_funcs when the trainer is built."
            )
        return [start(partial(call.run_on, self.async_loop, rows.ended)).result for call in calls]

    def join_remaining_forwards(self, sources: RewardFunctions, rows: RewardRows) -> None:
        """Run the reward models on completions that do not count, where their forward is a collective."""
        for number, function in enumerate(sources.functions):
            if isinstance(function, nn.Module):
                self._run_model(sources, number, rows)

    def _run_model(self, sources: RewardFunctions, number: int, rows: RewardRows) -> ChunkRewards:
        """The first logit of a reward model for each completion, in one forward."""
        processor = sources.processing_classes[number]
        texts = [prompt + completion for prompt, completion in zip(rows.prompts, rows.completions, strict=True)]
        for row, text in enumerate(texts):
            if not isinstance(text, str):
                messages: Any = {"messages": text}
                texts[row] = apply_chat_template(messages, processor, **sources.chat_template_kwargs)["text"]
        inputs = processor(
            text=texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False
        )
        with torch.inference_mode():
            logits = sources.functions[number](**send_to_device(inputs, self.device)).logits
        return logits[:, 0].tolist(), RewardCall(sources.names[number], number, rows.first, len(texts))


def _handed_over(record: RewardCall, log_extra: Callable[..., None] | None) -> RewardCall:
    """Pass the columns of a call to the user's `log_extra`; returns the record without them."""
    if log_extra is None:
        return record
    for column, values in record.columns.items():
        log_extra(column, values)
    return replace(record, columns={})
