"""Run by test_tools.py on any number of processes: tools and environments, and what each process saw of a run.

Tools answer after random delays, so calls that run together end in any order; they fail, are unknown, or answer at
length. Which tool a completion calls follows from its tokens (`sampled`).
"""

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from grpo_ext.sampling import engine
from tests.support.drop_in import conversations
from tests.support.launch import leave
from tests.support.rollouts import share_forwards
from tests.support.tiny import tiny_model, tiny_tokenizer, tool, with_calls
from tests.support.trainers import make, parameters

DELAYS = random.SystemRandom()  # other ones in every process and every run
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}{% if m['tool_calls'] %}{{ m['tool_calls'] }}"
    "{% endif %}<eos>{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
SETTINGS: dict[str, Any] = {
    "global_batch_size": 24,
    "rollout_chunk_size": 8,
    "max_completion_length": 45,
    "max_tool_calling_iterations": 2,
    "max_steps": 1,
}


@tool
def count(number: int) -> str:
    time.sleep(DELAYS.uniform(0, 0.004))
    return str(number % 7)


@tool
def tell(number: int) -> str:
    return "so " * (number % 17)


@tool
def fail(number: int) -> str:
    raise ValueError(f"no {number % 3}")


@tool
async def ask(number: int) -> str:
    await asyncio.sleep(DELAYS.uniform(0, 0.008))
    return f"is {number % 5}"


@tool
async def refuse(number: int) -> str:
    await asyncio.sleep(DELAYS.uniform(0, 0.004))
    raise RuntimeError("busy")


calls_here = [0]
happened: list[str] = []  # on this process: the environments that were asked for a reward, what hung, what failed
HANGS, FAILS = 3, 1  # sizes of rows
DIES_AT: dict[str, int] = {}  # the call that kills the process, by the number of the process


def note_call() -> None:
    calls_here[0] += 1
    if calls_here[0] == DIES_AT.get(os.environ.get("RANK", "0")):
        os.kill(os.getpid(), signal.SIGKILL)


@tool
def leak(number: int) -> str:  # knows its process: no split could learn the same
    note_call()
    return str(calls_here[0])


class Game:
    """An environment that owns its reward; how much it says is a matter of the row."""

    def reset(self, size: int = 1, **kwargs: Any) -> str | None:
        self.size, self.calls = size, 0
        return None if size % 3 else " go"

    @tool
    def count(self, number: int) -> str:
        note_call()
        self.calls += 1
        return count(number)

    @tool
    def tell(self, number: int) -> str:
        note_call()
        self.calls += 2
        return "so " * (self.size + number % 3)

    def get_reward(self) -> float:
        happened.append(type(self).__name__)
        return self.calls / (1 + self.size)


class Broken(Game):
    """One that hangs in the rows of one size, and fails in those of another."""

    @tool
    def tell(self, number: int) -> str:
        if self.size == HANGS:
            happened.append("hung")
            time.sleep(600)
        if self.size == FAILS:
            happened.append("failed")
            raise ValueError(f"out of order {number % 2}")
        return super().tell(number)


class Partial(Game):
    """One whose reward knows its process: no split could learn the same."""

    def get_reward(self) -> float:
        return super().get_reward() + int(os.environ.get("RANK", "0")) * self.calls


class Shop:
    """Another one, which answers and judges later."""

    def reset(self, **kwargs: Any) -> str:
        self.asked: list[int] = []
        return "shop"

    @tool
    async def ask(self, number: int) -> str:
        await asyncio.sleep(DELAYS.uniform(0, 0.004))
        self.asked.append(number)
        return f"is {len(self.asked)}"

    async def get_reward(self) -> float:
        happened.append(type(self).__name__)
        await asyncio.sleep(0)
        return sum(self.asked) % 5 / 5


class Silent(Game):
    """One that owns no reward."""

    get_reward = None  # type: ignore[assignment]


@tool
async def wait(number: int) -> str:
    await asyncio.sleep(600 if number % 5 == 0 else 0)
    return "done"


def by_sum(names: list[str]) -> Callable[[list[int]], list[str]]:
    """Which tools the tokens of a completion call: none, one, or several at once."""
    return lambda ids: [names[sum(ids) % len(names)] for _ in range(1 + sum(ids) % 3)] if sum(ids) % 4 else []


def all_at_once(names: list[str]) -> Callable[[list[int]], list[str]]:
    return lambda ids: names if sum(ids) % 3 else []


def sampled(called: Callable[[list[int]], list[str]]) -> Any:
    """A tokenizer that finds calls in any tokens."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return with_calls(tokenizer, lambda ids: [(name, sum(ids) + place) for place, name in enumerate(called(ids))])


@dataclass(frozen=True)
class Case:
    """One thing to train."""

    parts: dict[str, Any]
    names: list[str] = field(default_factory=list)
    called: Callable[[list[str]], Callable[[list[int]], list[str]]] = by_sum
    config: dict[str, Any] = field(default_factory=dict)
    kinds: list[str] | None = None
    company: bool = False  # every process makes as many calls of generate, as with an engine that shares weights


KINDS = {"game": Game, "shop": Shop, "silent": Silent}
CASES = {
    "tools": Case({"tools": [count, tell, fail]}, ["count", "tell", "fail", "unknown", "count"]),
    "async": Case(
        {"tools": [ask, refuse, count]},
        ["ask", "count", "refuse", "ask"],
        all_at_once,
        config={"global_batch_size": 12},
    ),
    "hanging": Case({"tools": [wait]}, ["wait"], config={"tool_timeout": 0.15, "max_completion_length": 120}),
    "environments": Case(
        {"environment_factory": KINDS}, ["ask", "tell", "count"], kinds=[*KINDS], config={"max_steps": 2}
    ),
    "company": Case(
        {"tools": [count, tell]},
        ["count", "tell"],
        company=True,
        config={"global_batch_size": 12, "rollout_chunk_size": 4},
    ),
    # on two processes one has no prompts; it may not go on with what it was lent
    "few": Case({"tools": [count, tell]}, ["count", "tell"], company=True, config={"global_batch_size": 4}),
    "ahead": Case(  # with evaluations, whose turns are among those that were seen
        {"environment_factory": KINDS},
        ["ask", "tell", "count"],
        kinds=[*KINDS],
        config={
            **{"max_steps": 3, "rollout_lag": 1, "tool_timeout": 5.0, "eval_strategy": "steps", "eval_steps": 2},
            "global_batch_size": 12,
        },
    ),
    # on two processes both ask two kinds of environments for rewards, and those of one hang and fail
    "rewarding": Case(
        {"environment_factory": {"game": Game, "broken": Broken}},
        ["tell", "count"],
        kinds=["game", "broken"],
        config={"tool_timeout": 0.7, "global_batch_size": 32, "rollout_chunk_size": 16, "max_completion_length": 120},
    ),
    "leak": Case({"tools": [leak]}, ["leak"], config={"global_batch_size": 16}),
    "partial": Case({"environment_factory": Partial}, ["tell", "count"], config={"global_batch_size": 16}),
}


def rows(case: Case) -> Dataset:
    columns: dict[str, Sequence[Any]] = {"size": (1, 4, 2, 6, 3, 5, 9)}
    if case.kinds is not None:
        columns["environment"] = case.kinds
    return conversations(22, **{name: [values[n % len(values)] for n in range(22)] for name, values in columns.items()})


def transcript_reward(completions: Any, log_extra: Any, log_metric: Any, **kwargs: Any) -> list[float]:
    """Turns and words of a transcript, which becomes a column of the table."""
    log_extra("transcript", [json.dumps(messages) for messages in completions])
    log_metric("turns", sum(map(len, completions)) / len(completions))
    return [len(messages) - 0.1 * len(set(str(messages[-1]["content"]))) for messages in completions]


def always_calling() -> dict[str, Any]:
    """Arguments of `make` for a run whose model calls `count` at the end of every turn."""
    return {
        **{"train_dataset": conversations(), "processing_class": sampled(lambda ids: ["count"])},
        **{"reward": transcript_reward, "tools": [count], "max_tool_calling_iterations": 2},
        **{"max_completion_length": 80, "max_steps": 1, "global_batch_size": 8, "rollout_chunk_size": 8},
    }


def parts(name: str) -> dict[str, Any]:
    """The arguments of a case's trainer, beside the model and the settings."""
    case = CASES[name]
    tokenizer = sampled(case.called(case.names))
    arguments = {"reward_funcs": transcript_reward, "train_dataset": rows(case), "processing_class": tokenizer}
    if "eval_steps" in case.config:
        arguments["eval_dataset"] = rows(case).select(range(5))
    return {**arguments, **case.parts}


def train(folder: Path, name: str, size: int, resume: str | None = None, **settings: Any) -> dict[str, Any]:
    """Train on this process; returns the results, and for every sampled turn its key, place, prompt and tokens."""
    case, turns = CASES[name], []
    arguments = parts(name)
    tokenizer = arguments["processing_class"]
    model = tiny_model(max_position_embeddings=4096)
    torch.manual_seed(0)
    model.resize_token_embeddings(len(tokenizer))  # draws the new ones
    settings = {**SETTINGS, **case.config, **settings, "per_device_train_batch_size": size}
    trainer = make(folder / name, model, **arguments, **settings)
    if case.company:
        share_forwards(trainer)
    sample = engine.sample_chunk

    def recorded(model: Any, rows: Any, *rest: Any) -> list[Any]:
        new = sample(model, rows, *rest)
        turns.extend((row.key, len(row.ids), row.prompt_ids + row.ids, turn.ids) for row, turn in zip(rows, new))
        return new

    engine.sample_chunk = recorded
    calls_here[0] = 0
    happened.clear()
    before = parameters(trainer)
    try:
        trainer.train(resume_from_checkpoint=resume)
    finally:
        engine.sample_chunk = sample
    rollout: Any = trainer._rollouts.current.batch
    timed = ("step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second", "total_flos")
    log = [
        {key: value for key, value in line.items() if key not in timed and not key.startswith(("profiling", "time/"))}
        for line in trainer.state.log_history
    ]
    table = {key: list(trainer._logs[key]) for key in ("prompt", "completion", "advantages")}
    table |= {key: list(values) for key, values in [*trainer._logs["extra"].items(), *trainer._logs["rewards"].items()]}
    return {
        "update": parameters(trainer) - before,
        "log": log,
        "table": table,
        "rollout": {key: list(rollout[key]) for key in ("prompt_ids", "completion_ids", "tool_mask")}
        | {"completion_mask": list(rollout.completion_masks)},
        "weights": parameters(trainer),
        "turns": turns,
        "calls": calls_here[0],
        "happened": list(happened),
    }


def main(folder: Path, runs: list[list[Any]]) -> None:
    """Runs are (case, micro-batch size, settings); `dies_at` among these is `DIES_AT`."""
    for name, size, settings in runs:
        DIES_AT.clear()
        DIES_AT.update(settings.pop("dies_at", {}))
        torch.save(train(folder, name, size, **settings), folder / f"{name}-{size}-{os.environ.get('RANK', '0')}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
    leave(Path(sys.argv[1]))
