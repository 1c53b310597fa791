"""What users override is called as TRL calls it, and what it does counts: beside stock TRL, on one process.

A `compute_loss` may read sizes from `args`, for every micro-batch size. Beside each is a run that must differ, or a
refusal. Parts of a micro-batch are in test_loss_parts, what is refused where processes have other shares in
tests/distributed/test_collectives.
"""

import importlib.util
import threading
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from transformers import TrainerCallback

from grpo_ext import GRPOTrainer
from grpo_ext.algorithms import policy_losses
from grpo_ext.batching.prompt_order import StepRows
from grpo_ext.errors import ConfigError
from grpo_ext.forward import rows
from grpo_ext.forward.runner import ForwardRunner
from grpo_ext.rollouts.batch import RolloutBatch
from tests.support.beside_trl import Loss, build, learns_as_in_trl, log_probs_of
from tests.support.selection import few_of
from tests.support.tiny import given_rollout, prompts, stock_scores, tiny_model, tokenizer_with
from tests.support.trainers import WithoutSuper, change, error, make, passing_on, watched
from tests.tolerances import DIFFERENT, UPDATE

# Different by design: `training_step` comes once for an optimizer step, however many micro-batches; `compute_loss` and
# `_compute_loss` are given more inputs; scoring comes without keywords about images, which are None; `log` is given
# more values
OVERRIDDEN = (
    *("training_step", "_generate_single_turn", "_generate_and_score_completions"),
    *("_calculate_rewards", "compute_loss", "_compute_loss", "_get_per_token_logps_and_entropies"),
    *("log", "create_optimizer", "create_scheduler"),
)
NO_ROWS = [0]  # of a step that goes on with a rollout batch
MORE_INPUTS = {"attention_mask", "grpo_ext_row"}


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
    logps, mask = log_probs_of(trainer, model, inputs), inputs["completion_mask"]
    mean = ((logps * mask).sum(1) / mask.sum(1)).mean()
    return 0.3 * mean / trainer.current_gradient_accumulation_steps


class OwnTerm:
    def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        return super()._compute_loss(model, inputs) + length_penalty(self, model, inputs)


class OwnTermOutside(Loss):
    def own(self: Any, model: Any, inputs: Any, inner: Any) -> Any:
        return inner(inputs) + length_penalty(self, model, inputs)


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


def noted(calls: list[Any], function: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(function)
        return function(*args, **kwargs)

    return call


@pytest.mark.parametrize(("override", "padded"), [(None, False), (OwnTerm, True), (HalfLogps, True)], ids=str)
def test_tokens_are_padded_for_a_loss_only_where_an_override_reads_them(tmp_path, monkeypatch, override, padded):
    calls: list[Any] = []

    class Seen(GRPOTrainer):
        def _loss_of(self, model: Any, micro_batch: Any) -> torch.Tensor:
            assert {"prompt_ids", "completion_ids"}.isdisjoint(micro_batch.padded) is not padded
            assert all(column.dim() == 1 or column.size(1) == 1 for column in micro_batch.columns.values())
            return super()._loss_of(model, micro_batch)

    for owner, name in ((RolloutBatch, "as_trl"), (rows, "pad_sequence"), (policy_losses, "pad_sequence")):
        monkeypatch.setattr(owner, name, noted(calls, getattr(owner, name)))
    build(tmp_path, Seen, override, max_steps=1).train()
    assert bool(calls) is padded


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
    tokenizer = tokenizer_with(chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}")
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


SIZES = ("gradient_accumulation_steps", "steps_per_generation", "generation_batch_size", "per_device_train_batch_size")


class BySizes(Loss):
    """Adds a mean over completions, divided by the accumulation as `args` has it."""

    def own(self: Any, model: Any, inputs: Any, inner: Any) -> Any:
        self.read = {name: getattr(self.args, name) for name in SIZES}
        self.args.noted = self.args.learning_rate
        mean = (log_probs_of(self, model, inputs) * inputs["completion_mask"]).sum(1).mean()
        return inner(inputs) + 0.01 * mean / self.args.gradient_accumulation_steps


TWO_STEPS = {"loss_type": "grpo", "max_steps": 2}


@stock_scores
@pytest.mark.full
def test_sizes_of_args_are_those_of_the_micro_batch(tmp_path):
    stock = build(tmp_path / "stock", trl.GRPOTrainer, BySizes, 4, gradient_accumulation_steps=4, **TWO_STEPS)
    expected = change(stock)
    for size in (4, 8, 6):  # 6: 2 2/3 micro-batches, and a last one of 4
        ours = build(tmp_path / str(size), GRPOTrainer, BySizes, size, **TWO_STEPS)
        assert error(expected, change(ours)) < UPDATE
        last = {4: stock.read, 8: dict(zip(SIZES, (2, 2, 16, 8))), 6: dict(zip(SIZES, (4, 4, 16, 4)))}
        assert ours.read == last[size]
        assert (ours.args.gradient_accumulation_steps, ours.args.noted) == (1, 1e-2)  # a write reaches the arguments
    ours.evaluate(prompts(5))  # micro-batches of 6 and 7
    assert ours.read["gradient_accumulation_steps"] == pytest.approx(20 / ours.read["per_device_train_batch_size"])
    assert error(expected, change(build(tmp_path / "plain", GRPOTrainer, size=4, **TWO_STEPS))) > DIFFERENT


class Noting(TrainerCallback):
    """Notes the sizes of `args` in every event."""

    def __init__(self, seen: list[Any]) -> None:
        self.seen = seen

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)
        return lambda args, *others, **kwargs: self.seen.append((name, [getattr(args, size) for size in SIZES]))


def test_sizes_of_a_micro_batch_are_seen_in_its_loss_alone(tmp_path, monkeypatch):
    """Not by callbacks, nor by what the thread that samples ahead reads; an error in a loss restores them."""
    seen: list[Any] = []
    settings = {"rollout_lag": 1, "beta": 0.1, **TWO_STEPS}
    trainer = build(tmp_path, GRPOTrainer, BySizes, 3, lambda: {"model": tiny_model()}, **settings)
    sizes = [getattr(trainer.args, size) for size in SIZES]
    trainer.add_callback(Noting(seen))
    read = ForwardRunner.rollout_log_probs

    def noted(self: Any, model: Any, rows: Any, limits: Any, *others: Any) -> Any:
        seen.append((threading.current_thread() is threading.main_thread(), limits.completions))
        return read(self, model, rows, limits, *others)

    monkeypatch.setattr(ForwardRunner, "rollout_log_probs", noted)
    trainer.train()
    events = {name for name, _ in seen if isinstance(name, str)}
    assert {"on_substep_end", "on_step_end", "on_log"} <= events
    assert all(values == sizes for name, values in seen if isinstance(name, str))
    assert (False, 3) in seen  # on the thread
    assert trainer.read["gradient_accumulation_steps"] > 1


def test_sizes_are_restored_after_an_error_in_a_loss(tmp_path):
    class Fails(Loss):
        def own(self: Any, model: Any, inputs: Any, inner: Any) -> Any:
            self.args.per_device_train_batch_size = 2
            raise RuntimeError("of the user")

    trainer = build(tmp_path, GRPOTrainer, Fails, 4)
    with pytest.raises(RuntimeError, match="of the user"):
        trainer.train()
    assert (trainer.args.per_device_train_batch_size, trainer.args.gradient_accumulation_steps) == (4, 1)


class Gmpo:
    """As one who has copied the loss of TRL's experimental trainer."""

    def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        from trl.experimental.gmpo import GMPOTrainer

        return GMPOTrainer._compute_loss(self, model, inputs)


class OfTheMicroBatch(TrlsLoss):
    """A mask of the micro-batch, as TRL's method computes it."""

    def get_high_entropy_mask(self, *args: Any) -> torch.Tensor:
        return trl.GRPOTrainer.get_high_entropy_mask(self, *args)


class OtherQuantile(TrlsLoss):
    def get_high_entropy_mask(self, entropies: Any, mask: Any, threshold: float) -> torch.Tensor:
        return super().get_high_entropy_mask(entropies, mask, 0.5)


def with_quantile(folder: Any, mixin: type, size: int) -> torch.Tensor:
    settings = {"num_iterations": 2, "per_device_train_batch_size": size, "top_entropy_quantile": 0.3}
    return change(build(folder, GRPOTrainer, mixin, size, **settings))


LOSSES = [TrlsLoss] + ([Gmpo] if importlib.util.find_spec("trl.experimental.gmpo") is not None else [])


@pytest.mark.parametrize("mixin", few_of(LOSSES, [TrlsLoss]), ids=lambda mixin: mixin.__name__)
def test_a_copied_loss_has_the_entropy_threshold_of_the_step(tmp_path, mixin):
    expected = with_quantile(tmp_path / "16", mixin, 16)
    for size in (4, 3):
        assert error(expected, with_quantile(tmp_path / str(size), mixin, size)) < UPDATE
    plain = change(build(tmp_path / "all", GRPOTrainer, mixin, num_iterations=2))
    assert error(expected, plain) > DIFFERENT  # the quantile counts


def test_a_mask_of_the_micro_batch_depends_on_its_size(tmp_path, caplog):
    whole, parts = (with_quantile(tmp_path / str(size), OfTheMicroBatch, size) for size in (16, 4))
    assert error(whole, parts) > DIFFERENT
    assert "Own.get_high_entropy_mask has no effect here, unless your own code calls it" in caplog.text


def test_a_threshold_that_the_step_does_not_have_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"quantile 0.5, and top_entropy_quantile=0.3.*Set top_entropy_quantile=0.5"):
        with_quantile(tmp_path, OtherQuantile, 4)


def test_outside_a_step_the_entropy_mask_is_trls(tmp_path):
    entropies, mask = torch.arange(8.0).view(2, 4), torch.ones(2, 4)
    ours = build(tmp_path, GRPOTrainer).get_high_entropy_mask(entropies, mask, 0.5)
    assert torch.equal(ours, entropies >= 3.5)
