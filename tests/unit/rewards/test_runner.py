"""`RewardRunner` gives what stock TRL's `_calculate_rewards` gives, and calls functions by chunks."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import threading
from contextvars import ContextVar
from typing import Any

import pytest
import torch
import trl
from transformers import AutoModelForSequenceClassification, TrainerState

from grpo_ext.errors import RewardError
from grpo_ext.rewards.guard import Faults, columns_of, metrics_of
from grpo_ext.rewards.runner import RewardFunctions, RewardRows, RewardRunner
from grpo_ext.rewards.worker import RewardCall
from tests.support.rewards import functions_of, score
from tests.support.tiny import prompts, tiny_model, tiny_tokenizer

INPUTS = [
    {"prompt": p, "completion": "left out", "answer": p[::-1], "level": i} for i, p in enumerate(["ab", "c", "de"])
]
TEXTS = (["ab", "c", "de"], ["abba", "cc", "edd"])
CHATS = tuple(
    [[{"role": role, "content": text}] for text in texts] for role, texts in zip(("user", "assistant"), TEXTS)
)
IDS = [[3, 4, 4, 3], [5, 5], [7, 6, 6]]


def rows(texts: Any = TEXTS, **settings: Any) -> RewardRows:
    return RewardRows(INPUTS, *map(list, texts), IDS, **settings)


def stock(folder: Any, functions: list[Any], tokenizers: Any = None) -> trl.GRPOTrainer:
    args = trl.GRPOConfig(str(folder), report_to="none", bf16=False, use_cpu=True, per_device_train_batch_size=8)
    parts = {"processing_class": tiny_tokenizer(), "reward_processing_classes": tokenizers}
    trainer = trl.GRPOTrainer(tiny_model(), functions, args, prompts(8), **parts)
    trainer.state = TrainerState(global_step=7)
    return trainer


def sources_of(trainer: Any) -> RewardFunctions:
    options = trainer.chat_template_kwargs
    return RewardFunctions(trainer.reward_funcs, trainer.reward_func_names, trainer.reward_processing_classes, options)


def compute(trainer: Any, rows: RewardRows) -> tuple[torch.Tensor, list[RewardCall]]:
    runner = RewardRunner(trainer.accelerator.device, async_loop=getattr(trainer, "async_loop", None))
    return runner.compute(sources_of(trainer), dataclasses.replace(rows, state=trainer.state))


def both(trainer: Any, rows: RewardRows) -> tuple[torch.Tensor, list[RewardCall]]:
    """The rewards and the calls of the runner, after a comparison with stock TRL's rewards, metrics and columns."""
    trainer.environments = rows.environments
    trainer._pending_metrics.clear()
    trainer._pending_extra_logs.clear()
    expected_BF = trainer._calculate_rewards(rows.inputs, rows.prompts, rows.completions, rows.completion_ids)
    rewards_BF, calls = compute(trainer, rows)
    assert rewards_BF.dtype == expected_BF.dtype == torch.float32
    assert torch.equal(rewards_BF.nan_to_num(-77.0), expected_BF.nan_to_num(-77.0)), (rewards_BF, expected_BF)
    assert not rewards_BF.requires_grad
    assert metrics_of(calls) == dict(sorted(trainer._pending_metrics.items()))
    assert columns_of(calls, len(rows.prompts)) == dict(sorted(trainer._pending_extra_logs.items()))
    return rewards_BF, calls


# ---- The same as stock TRL ------------------------------------------------------------------------------------------


def length(prompts, completions, completion_ids, answer, level, trainer_state, log_metric, log_extra, **kwargs):
    assert not kwargs
    log_metric("mean", sum(map(len, completion_ids)) / len(completion_ids))
    log_extra("answer", answer)
    return [len(ids) + 10.0 * n + 100.0 * trainer_state.global_step for ids, n in zip(completion_ids, level)]


async def later(completions, log_metric, **kwargs):
    await asyncio.sleep(0)
    log_metric("later", 2.0)
    return [0.1 * len(c) for c in completions]


def sparse(completions, level, **kwargs):
    return [None if n == 1 else 1.0 / 3.0 for n in level]


async def sparse_later(completions, level, **kwargs):
    return [0.25 if n == 1 else None for n in level]


class Object:
    async def __call__(self, completions, **kwargs):
        return [float(len(c)) for c in completions]


def tensor(completions, **kwargs):
    return torch.arange(len(completions))


def reward_model(dtype: torch.dtype = torch.float32) -> Any:
    config = tiny_model("llama").config
    config.num_labels = 1
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_config(config).to(dtype)
    model.config._name_or_path = "scorer"
    return model


@pytest.mark.parametrize(
    ("texts", "dtype"), [(TEXTS, torch.float32), (CHATS, torch.bfloat16)], ids=["text", "chat, a model in bfloat16"]
)
def test_rewards_and_logs_of_functions_and_models_are_those_of_stock_trl(tmp_path, texts, dtype):
    functions = [later, length, functools.partial(later, extra=1), sparse, reward_model(dtype), Object(), tensor]
    trainer = stock(tmp_path, functions, [None] * 4 + [tiny_tokenizer(chat=True), None, None])
    rewards_BF, calls = both(trainer, rows(texts))
    assert len(set(rewards_BF[:, 4].tolist())) == 3
    places = sorted((call.number, call.function, call.first, call.rows) for call in calls)
    assert places == [(number, name, 0, 3) for number, name in enumerate(trainer.reward_func_names)]
    both(stock(tmp_path, [sparse, sparse_later]), rows(texts))


def test_a_data_column_gives_way_to_what_trl_hands_over(tmp_path):
    def graded(trainer_state, log_metric, environments, **kwargs):
        assert trainer_state.global_step == 7
        log_metric("m", 1.0)
        return [float(value) for value in environments]

    taken = [{**row, "trainer_state": "x", "log_metric": "x", "environments": 5} for row in INPUTS]
    trainer = stock(tmp_path, [graded])
    both(trainer, dataclasses.replace(rows(), inputs=taken))
    both(trainer, dataclasses.replace(rows(environments=[1, 2, 3]), inputs=taken))
    with pytest.raises(TypeError, match="multiple values for keyword argument 'prompts'"):
        compute(trainer, dataclasses.replace(rows(), inputs=[{**row, "prompts": "x"} for row in INPUTS]))


def test_an_environment_that_is_retired_has_no_reward_and_reward_functions_see_it():
    class Slotted:
        __slots__ = ()

        def get_reward(self) -> float:
            return 1.0

    def of_slotted(environments, _env_type=Slotted, **kwargs):
        return [e.get_reward() if type(e) is _env_type else None for e in environments]

    def others(environments, **kwargs):
        return [float(isinstance(e, Slotted)) for e in environments]

    some = [Slotted() for _ in range(3)]
    sources = RewardFunctions([of_slotted, others], ["a", "b"], [None, None])
    scored = rows(environments=some, retired={id(some[1])})
    rewards_BF, _ = RewardRunner(torch.device("cpu")).compute(sources, scored)
    assert rewards_BF.nan_to_num(-1.0).tolist() == [[1.0, 1.0], [-1.0, 1.0], [1.0, 1.0]]


def test_a_reward_model_scores_all_rows_in_one_forward_and_keeps_company_by_itself(tmp_path):
    model, shapes, called = reward_model(), [], []

    def graded(completions, **kwargs):
        called.append(len(completions))
        return [0.0] * len(completions)

    model.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(kwargs["input_ids"].shape[0]), with_kwargs=True
    )
    trainer = stock(tmp_path, [graded, model], [None, tiny_tokenizer()])
    compute(trainer, rows(chunk=1))
    assert (called, shapes) == ([1, 1, 1], [3])
    RewardRunner(torch.device("cpu")).join_remaining_forwards(sources_of(trainer), rows())
    assert (called, shapes) == ([1, 1, 1], [3, 3])


# ---- What is our own ------------------------------------------------------------------------------------------------


def test_a_share_is_scored_chunk_by_chunk_with_everything_that_has_an_entry_for_each_completion():
    received = []

    def graded(completions, **kwargs):
        received.append({"completions": completions, **kwargs})
        return [len(c) for c in completions]

    rewards, calls = score([graded, graded], environments=list("vwxyz"), state=[0, 1, 2, 3, 4])
    assert rewards == [[1, 2, 3, 4, 5]] * 2
    for chunks in (received[:3], received[3:]):
        assert [chunk["completions"] for chunk in chunks] == [["a", "bb"], ["ccc", "dddd"], ["eeeee"]]
        assert [chunk["level"] for chunk in chunks] == [[1, 2], [3, 4], [5]]
        assert [chunk["environments"] for chunk in chunks] == [["v", "w"], ["x", "y"], ["z"]]
        assert all(chunk["trainer_state"] == [0, 1, 2, 3, 4] for chunk in chunks)
    places = [(call.first, call.rows, call.number) for call in calls]
    assert places == [(20, 2, 0), (20, 2, 1), (22, 2, 0), (22, 2, 1), (24, 1, 0), (24, 1, 1)]


def test_chunks_of_all_asynchronous_functions_run_at_once_on_the_loop_after_the_synchronous_ones():
    events: list[str] = []
    threads: set[int] = set()
    variable: ContextVar[str] = ContextVar("variable")
    variable.set("around the training")

    def graded(completions, **kwargs):
        events.append("sync")
        return [1.0] * len(completions)

    async def meets(completions, **kwargs):
        events.append("async")
        threads.add(threading.get_ident())
        assert variable.get() == "around the training"
        while events.count("async") < 6:
            await asyncio.sleep(0.001)
        return [2.0] * len(completions)

    rewards, _ = score([meets, graded, meets], faults=Faults(timeout=30.0))
    assert rewards == [[2.0] * 5, [1.0] * 5, [2.0] * 5]
    assert events == ["sync"] * 3 + ["async"] * 6
    assert threading.get_ident() not in threads
    assert len(threads) == 1


def test_an_asynchronous_function_without_a_loop_is_refused_with_the_remedy():
    with pytest.raises(RewardError, match=r"'function_1' is asynchronous, .* when the trainer is built"):
        RewardRunner(torch.device("cpu")).compute(functions_of([sparse, later]), rows())


def test_a_process_without_completions_calls_nothing():
    empty = RewardRows([], [], [], [])
    rewards_BF, calls = RewardRunner(torch.device("cpu")).compute(functions_of([sparse, later]), empty)
    assert rewards_BF.shape == (0, 2)
    assert calls == []
