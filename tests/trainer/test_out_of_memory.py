"""Out of memory in a step or an evaluation: smaller micro-batches, the same update and metrics."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from grpo_ext import GRPOTrainer
from grpo_ext.errors import MemoryShortageError, RewardError
from grpo_ext.forward import prefix_cache, runner
from grpo_ext.rollouts import engine as sampling
from grpo_ext.run.state import load_state
from grpo_ext.step import optimizer_step
from tests.support.tiny import letter_reward, prompts
from tests.support.trainers import change, error, make, parameters, update
from tests.tolerances import METRIC, UPDATE


class Limited(GRPOTrainer):
    """Pretends that forwards with gradients over more than `most` completions do not fit."""

    most = 3
    fails_at = range(10**6)  # attempts that fail

    def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        loss = super()._compute_loss(model, inputs)  # so that part of the work is done, and metered
        self.attempts = getattr(self, "attempts", 0) + 1
        if inputs["completion_ids"].size(0) > self.most and self.attempts in self.fails_at:
            loss.backward()  # leaves gradients behind
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


@pytest.mark.parametrize("settings", [{}, {"micro_batch_tokens": 150}, {"auto_find_batch_size": True}], ids=str)
def test_the_update_is_that_of_a_run_with_enough_memory(tmp_path, capsys, settings):
    expected, reference = enough(tmp_path / "a", **settings)
    trainer = limited(tmp_path / "b", **settings)
    assert error(expected, change(trainer)) <= UPDATE
    assert trainer._step_planner.limits.failures >= 1
    if "micro_batch_tokens" not in settings:
        assert trainer._step_planner.limits.rows == 2  # 8 -> 4 -> 2
    assert "What fits here: per_device_train_batch_size=" in capsys.readouterr().out
    for line, other in zip(reference.state.log_history, trainer.state.log_history):
        if "entropy" in line:
            assert line["entropy"] == pytest.approx(other["entropy"], rel=1e-6)
            assert line["loss"] == pytest.approx(other["loss"], abs=1e-6)


def test_no_cache_of_a_failed_attempt_survives(tmp_path, monkeypatch):
    def kept() -> int:
        return sum("_Recorded" in type(thing).__name__ for thing in gc.get_objects())

    found = []
    clear = optimizer_step.clear_device_cache
    monkeypatch.setattr(optimizer_step, "clear_device_cache", lambda **how: (clear(**how), found.append(kept())))
    trainer = limited(tmp_path, forward="prefix", max_steps=1)
    trainer.most, alive = 3, []
    inner = prefix_cache._continued
    monkeypatch.setattr(prefix_cache, "_continued", lambda *args: (alive.append(kept()), inner(*args))[1])
    trainer.train()
    assert max(alive) > 0, "the caches have to be seen while there are some"
    assert found == [0] * len(found)
    assert found


def test_without_throwing_the_gradients_away_the_update_would_differ(tmp_path, monkeypatch):
    monkeypatch.setattr("grpo_ext.step.gradients.NativeGradients.discard", lambda self: None)
    expected, _ = update(tmp_path / "a")
    trainer = limited(tmp_path / "b")
    assert error(expected, change(trainer)) > 1e-3


def test_one_completion_that_does_not_fit_says_what_was_tried(tmp_path):
    trainer = limited(tmp_path)
    trainer.most = 0
    with pytest.raises(MemoryShortageError, match=r"one completion of \d+ tokens .*gradient_checkpointing=True"):
        trainer.train()


def test_scoring_and_generation_halve_too(tmp_path, monkeypatch):
    settings = {"num_iterations": 2, "beta": 0.1}
    expected, _ = update(tmp_path / "a", **settings)
    trainer = make(tmp_path / "b", **settings)
    failed = set()

    def once(name: str, work: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if name not in failed:
                failed.add(name)
                raise torch.OutOfMemoryError("out of memory")
            return work(*args, **kwargs)

        return wrapped

    monkeypatch.setattr(sampling, "sample_chunk", once("generation", sampling.sample_chunk))
    monkeypatch.setattr(runner, "run_rows", once("scoring", runner.run_rows))
    assert error(expected, change(trainer)) <= UPDATE
    assert failed == {"generation", "scoring"}
    assert trainer._rollouts.memory.limit is not None
    assert trainer._forwards.memory.limit is not None


def test_bitwise_mode_runs_its_units_again_and_gives_the_same_bits(tmp_path):
    exact = {"bitwise_invariant": True}
    _, reference = enough(tmp_path / "a", **exact)
    trainer = limited(tmp_path / "b", **exact)
    trainer.fails_at = range(2, 3)
    trainer.train()
    assert trainer._step_planner.limits.failures == 1
    assert torch.equal(parameters(reference), parameters(trainer))
    always = limited(tmp_path / "c", **exact)
    with pytest.raises(MemoryShortageError, match="canonical_unit_size"):
        always.train()


@pytest.mark.parametrize(
    "change",
    [{}, {"device": "H200"}, {"gradient_checkpointing": True}, {"per_device_train_batch_size": 16}],
    ids=str,
)
def test_a_resume_keeps_what_fits_where_device_and_configuration_are_the_same_alone(
    tmp_path, capsys, monkeypatch, change
):
    """And the plan says what will run."""
    saves = {"save_strategy": "steps", "save_steps": 1, "num_iterations": 2, "beta": 0.1}
    first = limited(tmp_path, **saves, max_steps=2)
    first._rollouts.memory.limit, first._forwards.memory.limit = 4, 5
    first.train()
    assert "micro-batch             up to 8 completions" in capsys.readouterr().out
    settings = dict(change)
    if kind := settings.pop("device", None):
        monkeypatch.setattr("grpo_ext.run.keeper.device_kind", lambda device: kind)
    again = limited(tmp_path, **saves, **settings, max_steps=3, allow_changed_on_resume=["max_steps"])
    again.most = 16 if change else 3
    again.train("latest")
    said, limits, rows = capsys.readouterr().out, again._step_planner.limits, again.args.per_device_train_batch_size
    assert (limits.rows, limits.failures) == ((rows, 0) if change else (2, first._step_planner.limits.failures))
    assert (again._rollouts.memory.limit, again._forwards.memory.limit) == ((None, None) if change else (4, 5))
    assert f"micro-batch             up to {limits.rows} completions" in said
    for line in ("generation: up to 4 at a time", "computing log-probabilities: up to 5 at a time"):
        assert (line in said) is not bool(change)


# ---- Evaluations ----------------------------------------------------------------------------------------------------

EACH_STEP: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}


class LimitedEvaluation(GRPOTrainer):
    """Pretends that forwards of an evaluation over more than `most` completions do not fit."""

    most = 10**6

    def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        loss = super()._compute_loss(model, inputs)
        if not self.model.training and inputs["completion_ids"].size(0) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return loss


def evaluating(folder: Any, most: int = 10**6, **settings: Any) -> GRPOTrainer:
    trainer = make(folder, cls=LimitedEvaluation, eval_dataset=prompts(5, seed=1), **{**EACH_STEP, **settings})
    trainer.most = most
    return trainer


def evaluations(trainer: GRPOTrainer) -> list[dict[str, float]]:
    timed = ("runtime", "per_second")
    lines = [line for line in trainer.state.log_history if "eval_reward" in line]
    return [{name: v for name, v in line.items() if not name.endswith(timed)} for line in lines]


@pytest.mark.parametrize("settings", [{}, {"top_entropy_quantile": 0.5, "micro_batch_tokens": 400}], ids=str)
def test_an_evaluation_that_does_not_fit_runs_again_in_smaller_micro_batches(tmp_path, settings):
    settings = {"max_steps": 2, "save_strategy": "no", **settings}
    reference, trainer = evaluating(tmp_path / "a", **settings), evaluating(tmp_path / "b", most=3, **settings)
    expected = change(reference)
    assert error(expected, change(trainer)) <= UPDATE
    assert len(evaluations(trainer)) == 2
    for ours, theirs in zip(evaluations(trainer), evaluations(reference), strict=True):
        assert ours == pytest.approx(theirs, rel=METRIC, abs=METRIC, nan_ok=True)
    planner = trainer._step_planner
    assert (planner.limits.failures, planner.limits.rows) == (0, 8)
    assert planner.eval_limits.failures > 0


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

    def reward(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
        if set(prompts) <= set(held_out):
            raise OSError("the judge cannot be reached")
        return letter_reward(prompts, completions)

    with pytest.raises(RewardError, match="judge"):
        evaluating(tmp_path, reward=reward).train()
    state = load_state(tmp_path / "checkpoint-1")
    assert state is not None
    assert state["interrupts"]["evaluation_due"]
