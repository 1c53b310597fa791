"""Out of memory in a step or an evaluation: smaller micro-batches, the same update and metrics."""

import re
import shutil
import weakref
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from grpo_ext import GRPOTrainer
from grpo_ext.errors import MemoryShortageError, RewardError
from grpo_ext.run.state import load_state
from tests.support.cuts import Cuts, cutting
from tests.support.selection import few_of
from tests.support.tiny import prompts
from tests.support.trainers import SAVE, change, error, make, parameters, ran, update, watched
from tests.tolerances import METRIC, UPDATE


class Limited(GRPOTrainer):
    """Pretends that forwards of training, or of an evaluation, over more than `most` completions do not fit."""

    most, failures, in_training = 3, 0, True
    fails_at = range(10**6)  # attempts that fail

    def check(self, loss: torch.Tensor) -> None:
        """Look at a loss."""

    def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        loss = super()._compute_loss(model, inputs)  # so that part of the work is done, and metered
        self.attempts = getattr(self, "attempts", 0) + 1
        self.check(loss)
        if inputs["completion_ids"].size(0) > self.most and self.attempts in self.fails_at:
            if model.training is not self.in_training:
                return loss
            self.failures += 1
            if model.training:
                loss.backward()
                self.left_behind = sum(float(p.grad.norm()) for p in model.parameters() if p.grad is not None)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return loss


def limited(folder: Any, **settings: Any) -> GRPOTrainer:
    trainer = make(folder, **settings)
    trainer.__class__ = Limited
    return trainer


def enough(folder: Any, **settings: Any) -> tuple[torch.Tensor, GRPOTrainer]:
    """The update of the same class where everything fits; an overridden loss is given every completion."""
    trainer = limited(folder, **settings)
    trainer.most = 10**6
    return change(trainer), trainer


AUTO = {"auto_find_batch_size": True}


@pytest.mark.parametrize("settings", few_of([{}, {"micro_batch_tokens": 150}, AUTO], [AUTO]), ids=str)
def test_the_update_is_that_of_a_run_with_enough_memory(tmp_path, caplog, monkeypatch, settings):
    settings = {"max_steps": 1 if settings else 2, **settings}
    expected, reference = enough(tmp_path / "a", **settings)
    trainer = limited(tmp_path / "b", **settings)
    assert error(expected, change(trainer)) <= UPDATE
    assert trainer.left_behind > 0  # gradients that have to be thrown away
    rows = r"\d" if "micro_batch_tokens" in settings else "2"  # 8 -> 4 -> 2
    assert re.search(f"What fits here: per_device_train_batch_size={rows}", caplog.text)
    for line, other in zip(reference.state.log_history, trainer.state.log_history):
        if "entropy" in line:
            assert line["entropy"] == pytest.approx(other["entropy"], rel=1e-6)
            assert line["loss"] == pytest.approx(other["loss"], abs=1e-6)
    monkeypatch.setattr("grpo_ext.step.gradients.NativeGradients.discard", lambda self: None)
    assert error(expected, change(limited(tmp_path / "c", **settings))) > 1e-3  # they have to be


class Logging(Limited):
    """Logs a value of every micro-batch, and one of the first alone, whose attempt fails."""

    def check(self, loss: torch.Tensor) -> None:
        for mode in ("train", "eval"):
            self._metrics[mode]["attempts"].append(float(self.attempts))
        if self.attempts == 1:
            self._metrics["train"]["only the first"].append(1.0)


def test_what_an_override_logs_of_an_attempt_that_failed_is_not_logged(tmp_path):
    trainer = limited(tmp_path / "a", max_steps=1)
    trainer.__class__ = Logging
    trainer.train()
    line = trainer.state.log_history[0]
    assert trainer.failures == 2  # 8 -> 4 -> 2 completions
    attempts = range(trainer.failures + 1, trainer.attempts + 1)
    assert line["attempts"] == sum(attempts) / len(attempts)
    assert trainer._metrics["eval"]["attempts"] == list(attempts)
    assert "only the first" not in line
    whole = limited(tmp_path / "b", max_steps=1)  # the control: where all fits, all is logged
    whole.__class__, whole.most = Logging, 16
    whole.train()
    assert whole.state.log_history[0]["only the first"] == 1.0


class Watched(Limited):
    """Notes how many losses of earlier micro-batches, and so their graphs, are alive when another one begins."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.alive.append(sum(loss() is not None for loss in self.seen))
        return super().compute_loss(model, inputs, *args, **kwargs)

    def check(self, loss: torch.Tensor) -> None:
        self.seen.append(weakref.ref(loss))
        self.held = [loss] if self.holds else []


@pytest.mark.parametrize("holds", [False, True])
def test_no_graph_of_a_failed_attempt_survives(tmp_path, holds):
    """The control keeps the last one."""
    trainer = limited(tmp_path, forward="prefix", max_steps=1)
    trainer.__class__, trainer.seen, trainer.alive, trainer.holds = Watched, [], [], holds
    trainer.train()
    assert len(trainer.alive) > 4
    assert any(trainer.alive) is holds


def test_one_completion_that_does_not_fit_says_what_was_tried(tmp_path):
    trainer = limited(tmp_path)
    trainer.most = 0
    with pytest.raises(MemoryShortageError, match=r"one completion of \d+ tokens .*gradient_checkpointing=True"):
        trainer.train()


def with_room_for(trainer: GRPOTrainer, tokens: int) -> GRPOTrainer:
    """The trainer, where forwards with gradients over more tokens do not fit."""
    trainer._forwards.choose_forms(trainer._view.models)  # no comparison runs again in smaller batches

    def forward(module: Any, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled() and kwargs["input_ids"].numel() > tokens:
            raise torch.OutOfMemoryError("out of memory")

    trainer.model.model.register_forward_pre_hook(forward, with_kwargs=True)
    return trainer


ONE_ROW = 22  # tokens of the longest: 10 of the prompt, 12 of the completion


@pytest.mark.parametrize(
    "settings",
    [pytest.param({}, marks=pytest.mark.full), {"importance_sampling_level": "sequence", "num_iterations": 2}],
    ids=str,
)
def test_a_completion_of_several_rows_that_does_not_fit_runs_in_pieces(tmp_path, caplog, settings):
    settings = {"beta": 0.1, "rollout_batch_size": 16, "max_steps": 2, "per_device_train_batch_size": 2, **settings}
    with cutting(Cuts()):
        expected, _ = update(tmp_path / "a", **settings)
        trainer = with_room_for(make(tmp_path / "b", **settings), ONE_ROW)
        assert error(expected, change(trainer)) <= UPDATE
    assert re.search(r"What fits here: per_device_train_batch_size=1.*micro_batch_tokens=\d", caplog.text)


@pytest.mark.parametrize(("cuts", "tokens"), [(None, ONE_ROW - 4), pytest.param(Cuts(), 8, marks=pytest.mark.full)])
def test_a_row_that_does_not_fit_ends_the_run(tmp_path, cuts, tokens):
    """A completion of one row, and a row of one that has several."""
    trainer = with_room_for(make(tmp_path), tokens)
    with cutting(cuts), pytest.raises(MemoryShortageError, match=r"one completion of \d+ tokens"):
        trainer.train()


def short_once(trainer: GRPOTrainer) -> list[str]:
    """Let memory run out once while sampling and once while computing log-probabilities; what has failed so far."""
    failed: list[str] = []
    trainer._forwards.choose_forms(trainer._view.models)  # no comparison runs again in smaller batches

    def forward(module: Any, args: Any, kwargs: Any) -> None:
        work = "generation" if kwargs.get("use_cache") else "computing log-probabilities"
        if not torch.is_grad_enabled() and work not in failed:
            failed.append(work)
            raise torch.OutOfMemoryError("out of memory")

    trainer.model.model.register_forward_pre_hook(forward, with_kwargs=True)
    return failed


SCORING = {"num_iterations": 2, "beta": 0.1, "forward": "padded"}


def test_scoring_and_generation_halve_too(tmp_path):
    expected, _ = update(tmp_path / "a", **SCORING, max_steps=2)
    trainer = make(tmp_path / "b", **SCORING, max_steps=2)
    failed = short_once(trainer)
    assert error(expected, change(trainer)) <= UPDATE
    assert failed == ["generation", "computing log-probabilities"]


@pytest.mark.parametrize(
    ("forward", "remedy"), [("auto", "set forward='padded'"), ("padded", "use a device with more memory")]
)
def test_a_comparison_that_does_not_fit_ends_the_run(tmp_path, forward, remedy):
    """Padding is not taken for right where nothing could be compared."""
    trainer = make(tmp_path, forward=forward, max_steps=1)

    def forwards(module: Any, args: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    trainer._forwards._check_training_forward = lambda model: None
    trainer.model.model.register_forward_pre_hook(forwards)
    with pytest.raises(MemoryShortageError, match=f"comparing two forms of the forward .*{remedy}"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_resume_keeps_what_fits_where_device_and_configuration_are_the_same_alone(tmp_path, caplog, monkeypatch):
    """And the plan says what will run."""
    saves = {**SAVE, **SCORING}
    first = limited(tmp_path / "first", **saves, max_steps=2)
    short_once(first)
    first.train()
    assert "micro-batch             up to 8 completions" in caplog.text
    further = {**saves, "max_steps": 3, "allow_changed_on_resume": ["max_steps"]}
    another = {"device": "another"}
    for changes in ({}, {"gradient_checkpointing": True}, {"per_device_train_batch_size": 16}, another):
        folder = shutil.copytree(tmp_path / "first", tmp_path / "-".join(["again", *changes]))
        caplog.clear()
        if changes is another:
            monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=2**50))
        again = ran(make(folder, **further, **({} if changes is another else changes)), "latest")
        said, rows = caplog.text, again.args.per_device_train_batch_size if changes else 2
        assert f"micro-batch             up to {rows} completions" in said, changes
        for work in ("generation", "computing log-probabilities"):
            assert bool(re.search(rf"{work}: up to \d at a time", said)) is not bool(changes), changes


EACH_STEP: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, **SAVE}


def evaluating(folder: Any, most: int = 10**6, **settings: Any) -> GRPOTrainer:
    trainer = make(folder, cls=Limited, eval_dataset=prompts(5, seed=1), **{**EACH_STEP, **settings})
    trainer.most, trainer.in_training = most, False
    return trainer


def evaluations(trainer: GRPOTrainer) -> list[dict[str, float]]:
    timed = ("runtime", "per_second")
    lines = [line for line in trainer.state.log_history if "eval_reward" in line]
    return [{name: v for name, v in line.items() if not name.endswith(timed)} for line in lines]


@pytest.mark.parametrize(
    "settings", few_of([{}, {"top_entropy_quantile": 0.5, "micro_batch_tokens": 400}], [{}]), ids=str
)
def test_an_evaluation_that_does_not_fit_runs_again_in_smaller_micro_batches(tmp_path, settings):
    settings = {"max_steps": 1, "save_strategy": "no", **settings}
    reference, trainer = evaluating(tmp_path / "a", **settings), evaluating(tmp_path / "b", most=3, **settings)
    expected = change(reference)
    assert error(expected, change(trainer)) <= UPDATE
    assert len(evaluations(trainer)) == 1
    for ours, theirs in zip(evaluations(trainer), evaluations(reference), strict=True):
        assert ours == pytest.approx(theirs, rel=METRIC, abs=METRIC, nan_ok=True)
    assert trainer.failures > 0


@pytest.mark.full
def test_an_evaluation_that_can_not_fit_does_not_lose_the_checkpoint_of_its_step(tmp_path):
    stopped = evaluating(tmp_path / "a", most=0, max_steps=2)
    with pytest.raises(MemoryShortageError, match="with one completion of"):
        stopped.train()
    assert stopped.state.global_step == 1
    resumed, undisturbed = evaluating(tmp_path / "a", max_steps=2), evaluating(tmp_path / "b", max_steps=2)
    resumed.train(resume_from_checkpoint="latest")
    undisturbed.train()
    assert torch.equal(parameters(resumed), parameters(undisturbed))
    assert evaluations(resumed) == evaluations(undisturbed)  # that of the first step too


def test_an_evaluation_whose_reward_function_fails_does_not_either(tmp_path):
    held_out = prompts(5, seed=1)["prompt"]

    def fail(prompts: list[str], **columns: Any) -> None:
        if set(prompts) <= set(held_out):
            raise OSError("the judge cannot be reached")

    with pytest.raises(RewardError, match="judge"):
        evaluating(tmp_path, reward=watched(fail)).train()
    state = load_state(tmp_path / "checkpoint-1")
    assert state is not None
    assert state["interrupts"]["evaluation_due"]
    best = {"metric_for_best_model": "eval_reward"}  # the evaluation decides which one that is
    with pytest.raises(RewardError, match="judge"):
        evaluating(tmp_path / "best", reward=watched(fail), **best).train()
    assert not list((tmp_path / "best").glob("checkpoint-*"))


def test_bitwise_mode_runs_its_units_again_and_gives_the_same_bits(tmp_path, caplog):
    exact = {"bitwise_invariant": True, "max_steps": 1}
    _, reference = enough(tmp_path / "a", **exact)
    trainer = limited(tmp_path / "b", **exact)
    trainer.fails_at = range(2, 3)
    trainer.train()
    assert "Memory ran out 1 time." in caplog.text
    assert torch.equal(parameters(reference), parameters(trainer))
    always = limited(tmp_path / "c", **exact)
    with pytest.raises(MemoryShortageError, match="canonical_unit_size"):
        always.train()
