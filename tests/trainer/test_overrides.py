"""What users override is called as TRL calls it, and what it does counts: beside stock TRL, on one process.

What is refused where processes have other shares is in tests/distributed/test_collectives.
"""

from typing import Any

import pytest
import torch
import trl
from datasets import Dataset

from grpo_ext import GRPOTrainer
from grpo_ext.batching.prompt_order import StepRows
from grpo_ext.errors import ConfigError
from tests.support.beside_trl import build, learns_as_in_trl
from tests.support.tiny import given_rollout, stock_scores, tiny_tokenizer
from tests.support.trainers import WithoutSuper, make, passing_on, watched

# Different by design: `training_step` comes once for an optimizer step, however many micro-batches; `compute_loss` and
# `_compute_loss` are given more inputs; scoring comes without keywords about images, which are None; `log` is given
# more values
OVERRIDDEN = (
    *("training_step", "_generate", "_generate_single_turn", "_generate_and_score_completions"),
    *("_calculate_rewards", "compute_loss", "_compute_loss", "_get_per_token_logps_and_entropies"),
    *("log", "_log_metric", "create_optimizer", "create_scheduler"),
)
NO_ROWS = [0]  # of a step that goes on with a rollout batch
MORE_INPUTS = {"attention_mask"}


def shown(value: Any) -> Any:
    """A value as far as it has to be alike: shapes, keys, lengths."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, StepRows):
        value = list(value.rows)
    if isinstance(value, dict):
        return {name: shown(part) for name, part in value.items() if name not in MORE_INPUTS}
    if isinstance(value, (list, tuple)):
        return [len(value), *(shown(part) for part in value[:2])]
    return value if value is None or isinstance(value, (str, bool, int)) else type(value).__name__


def recording(base: type, seen: list[tuple[str, Any, Any, Any]]) -> type:
    """A subclass that overrides every method of the table."""

    def override(name: str) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = getattr(base, name)(self, *args, **kwargs)
            seen.append((name, shown(args), shown(kwargs), shown(result)))
            return result

        return method

    return type("Recording", (base,), {name: override(name) for name in OVERRIDDEN})


@stock_scores
def test_every_override_is_called_with_what_trl_gives_it(tmp_path):
    graded = watched(lambda log_metric, **columns: log_metric("share", 0.5))

    def calls(base: type) -> dict[str, list[Any]]:
        seen: list[Any] = []
        build(tmp_path, recording(base, seen), reward=graded, num_iterations=2, rollout_chunk_size=16).train()
        return {name: [call[1:] for call in seen if call[0] == name] for name in OVERRIDDEN}

    stock, ours = calls(trl.GRPOTrainer), calls(GRPOTrainer)
    for name in OVERRIDDEN:
        assert len(stock[name]) == len(ours[name]) > 0, name
        for (args, kwargs, result), (our_args, our_kwargs, our_result) in zip(stock[name], ours[name]):
            if name == "log":
                assert args[1].keys() - our_args[1].keys() == set()
                continue
            if name == "training_step" and our_args[-1] == NO_ROWS:
                our_args = [*our_args[:-1], args[-1]]
            assert our_args == args, name
            if name == "_get_per_token_logps_and_entropies":
                assert all(value is None for value in (kwargs.pop(n) for n in kwargs.keys() - our_kwargs.keys()))
            assert our_kwargs == kwargs, name
            assert our_result == result, name


class HalfLogps:
    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        logps, entropies, aux_loss = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        return logps * 0.5, entropies, aux_loss


def length_penalty(trainer: Any, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """A term of the user's own, divided as TRL divides: a mean over completions, over the accumulation steps."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    width = inputs["completion_ids"].size(1)
    logps, _, _ = trainer._get_per_token_logps_and_entropies(model, ids, mask, width)
    mean = ((logps * inputs["completion_mask"]).sum(1) / inputs["completion_mask"].sum(1)).mean()
    return 0.3 * mean / trainer.current_gradient_accumulation_steps


class OwnTerm:
    def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        return super()._compute_loss(model, inputs) + length_penalty(self, model, inputs)


class OwnTermOutside:
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return loss + length_penalty(self, model, inputs)


REUSED = {"loss_type": "grpo", "num_iterations": 2, "beta": 0.1}


class TrlsLoss:
    """As one who has copied TRL's loss into a subclass to change a line of it."""

    def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        return trl.GRPOTrainer._compute_loss(self, model, inputs)


def one_group_teaches(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
    """Most groups have no variance, so what is learned from them is the user's own term alone."""
    return [float(i % 4) if prompt == prompts[0] else 0.5 for i, prompt in enumerate(prompts)]


@stock_scores
@pytest.mark.parametrize(
    ("override", "settings"),
    [(HalfLogps, REUSED), (OwnTerm, {"loss_type": "dapo"}), (OwnTermOutside, REUSED), (TrlsLoss, REUSED)],
    ids=str,
)
def test_what_an_override_does_to_the_loss_counts_for_every_micro_batch_size(tmp_path, override, settings):
    settings = {"reward": one_group_teaches, "rollout_chunk_size": 16, **settings}
    learns_as_in_trl(tmp_path, override, differs=override is not TrlsLoss, **settings)


@pytest.mark.parametrize(("override", "padded"), [(None, False), (OwnTerm, True), (HalfLogps, True)], ids=str)
def test_tokens_are_padded_for_a_loss_only_where_an_override_reads_them(tmp_path, override, padded):
    class Seen(GRPOTrainer):
        def _loss_of(self, model: Any, micro_batch: Any) -> torch.Tensor:
            assert {"prompt_ids", "completion_ids"}.isdisjoint(micro_batch.columns) is not padded
            return super()._loss_of(model, micro_batch)

    build(tmp_path, Seen, override, max_steps=1).train()


def test_what_is_not_called_is_said(tmp_path, caplog):
    build(tmp_path, passing_on("get_high_entropy_mask"))
    assert "Own.get_high_entropy_mask has no effect here" in caplog.text


def test_an_override_without_super_is_said_once_and_refused_in_bitwise_mode(tmp_path, caplog):
    make(tmp_path / "plain", cls=WithoutSuper, max_steps=2).train()
    assert caplog.text.count("_generate_and_score_completions does not call super(), so it may sample") == 1
    with pytest.raises(ConfigError, match="bitwise_invariant=True needs this trainer's own sampling"):
        make(tmp_path / "bitwise", cls=WithoutSuper, bitwise_invariant=True).train()


def test_a_rollout_func_may_write_to_its_prompts(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": "ab"}]} for _ in range(12)]
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    seen: list[int] = []

    def rollout(messages: list[Any], trainer: Any) -> dict[str, Any]:
        for conversation in messages:
            conversation.append({"role": "assistant", "content": "c"})
        return given_rollout(["ab"] * len(messages), trainer)

    def reward(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
        seen.extend(map(len, prompts))
        return [float(i % 4) for i in range(len(completions))]

    parts = {"reward_funcs": reward, "train_dataset": Dataset.from_list(rows), "processing_class": tokenizer}
    make(tmp_path, max_steps=1, rollout_func=rollout, **parts).train()
    assert seen == [1] * 16
