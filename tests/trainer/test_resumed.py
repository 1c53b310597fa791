"""A resumed run goes on as the run would have; what makes a run another run beside its settings.

Callbacks with a state, runs that were stopped early, data in order; the model's configuration, the tools, every row.
"""

import dataclasses
import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.trainer_callback import ExportableState

from grpo_ext import GRPOConfig, GRPOTrainer
from grpo_ext.errors import CheckpointError
from grpo_ext.run.checkpoint import FINGERPRINT, write_listing
from grpo_ext.run.interrupts import TrainingInterrupted
from tests.support import tool_runs, trainers
from tests.support.selection import few_of
from tests.support.tiny import config_kwargs, letter_reward, own_config, prompts, tiny_model, tiny_tokenizer
from tests.support.tool_runs import always_calling, count, tell
from tests.support.trainers import SAVE, make, parameters, ran, signals, stopping

EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "eval_reward", "max_steps": 6}


def other(folder: Path, **changes: Any) -> GRPOTrainer:
    """A trainer that saves a checkpoint of every step; few tokens are enough."""
    return trainers.other(folder, **{"max_completion_length": 6, **changes})


def as_good(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [1.0] * len(completions)


def early(folder: Path, patience: int = 2, **changes: Any) -> Any:
    """A trainer that stops after `patience` evaluations: with 2 after the third step, the first is the best."""
    parts = {"reward": as_good, "eval_dataset": prompts(4, seed=1), "callbacks": [EarlyStoppingCallback(patience)]}
    return other(folder, **{**EVALUATED, **parts, **changes})


class Counting(TrainerCallback, ExportableState):
    """Adds its weight at each step; `handle` is no part of its state."""

    def __init__(self, weight: int) -> None:
        self.weight, self.total, self.handle = weight, 0, None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.total += self.weight

    def state(self) -> dict[str, Any]:
        return {"args": {"weight": self.weight}, "attributes": {"total": self.total}}


@pytest.mark.parametrize("restored", few_of([False, True], [False]))
def test_patience_is_restored(tmp_path, restored):
    """Also where transformers is asked to restore callbacks, and where a run begins with an evaluation."""
    settings = {"restore_callback_states_from_checkpoint": restored, "eval_on_start": restored}
    whole = ran(early(tmp_path / "whole", **settings))
    checkpoint = tmp_path / "whole" / f"checkpoint-{whole.state.global_step - 1}"
    again = ran(early(tmp_path / "again", **settings), checkpoint)
    assert again.state.global_step == whole.state.global_step < 6
    evaluations = [[line["step"] for line in run.state.log_history if "eval_reward" in line] for run in (whole, again)]
    assert evaluations[0] == evaluations[1]


@pytest.mark.full
def test_a_run_that_was_stopped_early_stays_stopped_until_it_is_allowed_to_go_on(tmp_path, caplog):
    whole = ran(early(tmp_path))
    assert whole.state.global_step == 3
    again = ran(early(tmp_path), "latest")
    assert again.state.global_step == 3
    assert torch.equal(parameters(whole), parameters(again))
    said = caplog.text
    assert "stopped early, after step 3 of 6" in said
    assert "allow_changed_on_resume=['stopped_early']" in said
    going_on = ran(early(tmp_path, patience=4, allow_changed_on_resume=["stopped_early"]), "latest")
    assert going_on.state.global_step == 5  # two evaluations of four were made before
    longer = {"max_steps": 4, "callbacks": [], "allow_changed_on_resume": ["stopped_early", "max_steps"]}
    trained = ran(early(tmp_path / "b", **longer), tmp_path / "checkpoint-3")
    assert trained.state.global_step == 4


@pytest.mark.parametrize("stops", few_of([True, False], [True]))
def test_an_interrupt_in_the_step_that_stops_a_run_hides_no_stop(tmp_path, caplog, stops):
    stop = stopping("on_step_end", at=2 if stops else 9)
    trainer = other(tmp_path, callbacks=[stop, signals(1, signal.SIGTERM)])
    with pytest.raises(TrainingInterrupted):
        trainer.train()
    again = ran(other(tmp_path), "latest")
    assert again.state.global_step == (2 if stops else 3)
    assert ("stopped early" in caplog.text) is stops


def test_the_state_of_every_callback_is_restored_into_its_object(tmp_path):
    """Also where there are two of a class, or one that the checkpoint does not know."""
    pair = [Counting(1), Counting(10)]
    other(tmp_path / "whole", callbacks=pair).train()
    again, handle = [Counting(1), Counting(10)], object()
    again[1].handle = handle
    early(tmp_path / "again", max_steps=3, callbacks=[*again, EarlyStoppingCallback(5)], reward=letter_reward).train(
        str(tmp_path / "whole" / "checkpoint-2")
    )
    assert [callback.total for callback in again] == [callback.total for callback in pair] == [3, 30]
    assert again[1].handle is handle
    third = [Counting(1), Counting(10)]
    other(tmp_path / "third", callbacks=third).train(str(tmp_path / "again" / "checkpoint-3"))
    assert [callback.total for callback in third] == [3, 30]


class ReadOnly(Counting):
    """Saves a property that cannot be set."""

    double = property(lambda self: 2 * self.total)

    def state(self) -> dict[str, Any]:
        return {"args": {"weight": self.weight}, "attributes": {"double": self.double}}


@pytest.mark.full
def test_a_state_that_cannot_be_restored_is_a_warning(tmp_path, caplog):
    """And the other callbacks have theirs."""
    other(tmp_path, callbacks=[ReadOnly(1), Counting(1)]).train()
    assert "was not restored" not in caplog.text
    again = [ReadOnly(1), Counting(1)]
    trainer = ran(other(tmp_path, callbacks=again), tmp_path / "checkpoint-2")
    assert trainer.state.global_step == 3
    assert [callback.total for callback in again] == [1, 3]
    assert "The state of ReadOnly in" in caplog.text
    assert "was not restored (AttributeError: property 'double'" in caplog.text


@pytest.mark.parametrize(("restored", "total"), [(False, 7), (True, 3)])
@pytest.mark.full
def test_arguments_that_a_user_changed_count_unless_the_checkpoints_are_asked_for(tmp_path, restored, total):
    other(tmp_path, callbacks=[Counting(1)]).train()
    settings = {"callbacks": [Counting(5)], "restore_callback_states_from_checkpoint": restored}
    trainer = ran(other(tmp_path, **settings), tmp_path / "checkpoint-2")
    (counting,) = (part for part in trainer.callback_handler.callbacks if isinstance(part, Counting))
    assert counting.total == total


def test_what_would_train_on_the_same_prompts_again_is_refused(tmp_path):
    other(tmp_path, max_steps=2).train()
    with pytest.raises(CheckpointError, match=r"ignore_data_skip=True .* leave it out"):
        other(tmp_path, max_steps=2, ignore_data_skip=True).train(str(tmp_path / "checkpoint-1"))
    other(tmp_path / "new", max_steps=1, ignore_data_skip=True).train()  # nothing is skipped


@pytest.mark.full
def test_pass_at_k_is_logged_after_a_resume_where_it_would_have_been(tmp_path):
    """Rewards of an early evaluation that are not 0 or 1 say what later ones mean."""

    def graded_at_first(prompts: list[str], completions: list[str], trainer_state: Any, **columns: Any) -> list[float]:
        return [0.5 if trainer_state.global_step < 2 else float("a" in text) for text in completions]

    settings = {"reward": graded_at_first, "callbacks": [], "num_generations_eval": 4, "max_steps": 3}
    whole, again = (early(tmp_path / name, **settings) for name in ("whole", "again"))
    whole.train()
    again.train(str(tmp_path / "whole" / "checkpoint-2"))
    names = [[line["step"], *sorted(line)] for line in whole.state.log_history if "eval_reward" in line]
    assert names == [[line["step"], *sorted(line)] for line in again.state.log_history if "eval_reward" in line]
    assert len(names) == 3


def saved_run(folder: Path, **changes: Any) -> Path:
    other(folder, **{"max_steps": 1, **changes}).train()
    return folder / "checkpoint-1"


def test_a_model_by_its_path_is_compared_with_what_was_loaded(tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")

    def train(resume: str | None = None, **loading: Any) -> None:
        parts = {"model": str(tmp_path / "model"), "processing_class": None}
        other(tmp_path / "out", **parts, max_steps=1, bf16=True, model_init_kwargs=loading).train(resume)

    train()
    checkpoint = str(tmp_path / "out" / "checkpoint-1")
    with pytest.raises(CheckpointError, match=r"model\.config\.rms_norm_eps: 1e-06 in the checkpoint, 0\.01 now"):
        train(checkpoint, rms_norm_eps=1e-2)
    train(checkpoint, attn_implementation="eager")  # how it is computed, not what


class Game(tool_runs.Game):
    def give_up(self) -> str:
        """Give up."""
        return "over"


def with_tools(folder: Path, **parts: Any) -> GRPOTrainer:
    usual = {**always_calling(), "tools": None, "max_completion_length": 8}
    return other(folder, model=tiny_model(max_position_embeddings=4096), **{**usual, **parts})


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ({"tools": [count]}, {"tools": [count, tell]}, r"tools\.tell: null in the checkpoint"),
        ({"environment_factory": tool_runs.Game}, {"environment_factory": Game}, r"tools\.Game\.give_up: null"),
    ],
)
def test_other_tools_are_refused_and_named(tmp_path, before, after, named):
    with_tools(tmp_path / "out", **before).train()
    checkpoint = str(tmp_path / "out" / "checkpoint-1")
    with pytest.raises(CheckpointError, match=named):
        with_tools(tmp_path / "other", **after).train(resume_from_checkpoint=checkpoint)
    with_tools(tmp_path / "other", **before).train(resume_from_checkpoint=checkpoint)


def test_the_same_rows_are_the_same_data_however_they_are_held(tmp_path):
    rows = prompts(12)
    checkpoint = saved_run(tmp_path / "out", train_dataset=rows)
    rows.to_json(tmp_path / "rows.jsonl")
    backwards = Dataset.from_list(rows.to_list()[::-1])
    for same in (
        Dataset.from_json(str(tmp_path / "rows.jsonl"), cache_dir=str(tmp_path / "cache")),
        backwards.select(range(11, -1, -1)),  # through an indices mapping
    ):
        trainer = ran(other(tmp_path, train_dataset=same, max_steps=1), checkpoint)
        assert trainer.state.global_step == 1
    with pytest.raises(CheckpointError, match=r"data\.by_column\.prompt: "):
        other(tmp_path, train_dataset=backwards, max_steps=1).train(resume_from_checkpoint=str(checkpoint))


@pytest.mark.full
def test_latest_of_another_trainer_goes_back_to_a_checkpoint_that_has_everything(tmp_path, caplog):
    folder = tmp_path / "out"
    make(folder, **SAVE, max_steps=3).train()
    for path in [*folder.glob("checkpoint-*/grpo_ext_*"), *folder.glob("checkpoint-*/checkpoint.json")]:
        path.unlink()
    (folder / "checkpoint-3" / "trainer_state.json").unlink()
    (folder / "checkpoint-2" / "scheduler.pt").unlink()
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    trainer = ran(make(folder, **SAVE, max_steps=3), "latest")
    assert "checkpoint-3 has neither checkpoint.json nor trainer_state.json" in caplog.text
    assert "checkpoint-2 holds no learning-rate schedule" in caplog.text
    assert [line["step"] for line in trainer.state.log_history if "loss" in line] == [1, 2, 3]
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_weights_alone_are_no_run_to_go_on_with(tmp_path):
    checkpoint = saved_run(tmp_path / "out", save_only_model=True)
    for wanted in (str(checkpoint), "latest", "auto"):
        with pytest.raises(CheckpointError, match="no optimizer state and no learning-rate schedule") as refused:
            other(tmp_path / "out", save_only_model=True).train(resume_from_checkpoint=wanted)
        assert f"model='{checkpoint}'" in str(refused.value)
    with pytest.raises(CheckpointError, match=r"out is a run, not a checkpoint; the newest in it is .*checkpoint-1"):
        other(tmp_path / "out").train(resume_from_checkpoint=str(tmp_path / "out"))
    make(tmp_path / "new", model=type(tiny_model()).from_pretrained(checkpoint), max_steps=1).train()


SHORT = {**SAVE, "max_steps": 1, "max_completion_length": 6}


def test_other_suppressed_tokens_are_another_run(tmp_path):
    ran(make(tmp_path, **SHORT))
    suppressing = own_config(suppress_tokens=[*range(5, 20)])
    with pytest.raises(CheckpointError, match=r"generation_config\.suppress_tokens: null in the checkpoint"):
        ran(make(tmp_path, suppressing, **SHORT), True)
    ran(make(tmp_path, suppressing, allow_changed_on_resume=["generation_config"], **SHORT), True)


def test_an_identity_without_the_newer_parts_resumes(tmp_path):
    ran(make(tmp_path, **SHORT))
    for path in tmp_path.rglob(FINGERPRINT):
        identity = json.loads(path.read_text())
        identity["data"].pop("by_column")
        newer = ("template", "generation_config", "tool_code")
        path.write_text(json.dumps({name: value for name, value in identity.items() if name not in newer}))
        write_listing(path.parent, {"processes": 1})
    ran(make(tmp_path, **SHORT), True)


class Scale:
    """Shown with its address, which is another in every process."""


@dataclasses.dataclass
class OwnConfig(GRPOConfig):
    """A user's configuration, whose fields no table knows."""

    curriculum: float = 0.5
    scale: Any = None


def test_fields_of_a_users_own_are_compared(tmp_path):
    def build(**own: Any) -> Any:
        config = OwnConfig(**config_kwargs(tmp_path, **SHORT), **own)
        parts = {"model": tiny_model(), "reward_funcs": letter_reward, "processing_class": tiny_tokenizer()}
        return GRPOTrainer(args=config, train_dataset=prompts(12), **parts)

    ran(build(scale=Scale()))
    with pytest.raises(CheckpointError, match=r"curriculum: 0\.5 in the checkpoint, 0\.75 now"):
        ran(build(curriculum=0.75, scale=Scale()), True)
    ran(build(scale=Scale()), True)
    ran(build(curriculum=0.75, scale=Scale(), allow_changed_on_resume=["curriculum"]), True)
