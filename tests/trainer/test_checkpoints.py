"""What a trainer resumes from, refuses to resume from, and leaves behind."""

import ast
import gc
import json
import re
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import Trainer

from grpo_ext.errors import CheckpointError
from grpo_ext.forward.snapshot import Weights
from grpo_ext.rollouts.source import saved_waiting
from grpo_ext.run import checkpoint, state
from grpo_ext.run.checkpoint import FINGERPRINT, checkpoints, lock_to_resume, why_broken, write_listing
from grpo_ext.run.interrupts import TrainingInterrupted
from grpo_ext.run.record import read_record
from grpo_ext.run.state import STATE, load_state, save_state
from tests.support.selection import few_of
from tests.support.tiny import prompts, sparse_reward, tiny_model, tokenizer_with
from tests.support.trainers import (
    LORA,
    SAVE,
    make,
    noted_events,
    on,
    other,
    parameters,
    ran,
    signals,
    stopping,
    watched,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run of three steps with a checkpoint of each."""
    folder = tmp_path_factory.mktemp("run") / "out"
    make(folder, **SAVE).train()
    return folder


@pytest.fixture
def copy(run, tmp_path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "out"))


def beside(folder: Path) -> list[str]:
    """The checkpoints of the second run of an output_dir."""
    return [path.name for path in checkpoints(f"{folder}-2")]


def times(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def damage(folder: Path, name: str = "optimizer.pt") -> None:
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 4
    (folder / name).write_bytes(content)


def test_the_newest_whole_one_is_taken_and_what_was_skipped_is_said(copy, caplog):
    damage(copy / "checkpoint-3")
    (copy / "checkpoint-2" / "checkpoint.json").unlink()
    before = times(copy)
    trainer = ran(make(copy, **SAVE), True)
    assert (trainer.state.global_step, trainer._step) == (3, 3)  # `_step` is TRL's, for its users
    assert "checkpoint-3/optimizer.pt has changed" in caplog.text
    assert "checkpoint-2 has lost its checkpoint.json" in caplog.text
    assert times(copy) == before  # broken or not, they are the user's
    assert beside(copy) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]  # the first is that of the other folder


def test_the_loss_that_train_returns_is_that_of_all_steps(tmp_path):
    """Also where a checkpoint was saved between two log lines."""
    settings = {**SAVE, "logging_steps": 2, "max_steps": 3}
    whole = make(tmp_path / "out", **settings).train()
    resumed = make(tmp_path / "other", **settings).train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))
    assert resumed.training_loss == pytest.approx(whole.training_loss, rel=1e-6, abs=1e-9) != 0.0


def test_nothing_whole_is_an_error(copy, tmp_path):
    for folder in checkpoints(copy):
        damage(folder)
    with pytest.raises(CheckpointError, match=r"optimizer.pt has changed since it was written.*'latest'"):
        make(copy, **SAVE).train(resume_from_checkpoint=str(copy / "checkpoint-2"))
    for word in (True, "auto"):  # what is broken is no reason to start anew
        with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
            make(copy, **SAVE).train(resume_from_checkpoint=word)
    with pytest.raises(CheckpointError, match="does not exist"):
        make(copy, **SAVE).train(resume_from_checkpoint=str(tmp_path / "gone"))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 4}, ["seed: 3 in the checkpoint, 4 now"]),
        ({"global_batch_size": 8, "beta": 0.1}, ["global_batch_size: 16 in the checkpoint", "beta"]),
        ({"train_dataset": prompts(12, seed=5)}, ["data.by_column.prompt: ", "allow_changed_on_resume=['data']"]),
        ({"reward_funcs": sparse_reward}, ["rewards: "]),
        ({"rollout_lag": 2}, ["rollout_lag: 0 in the checkpoint, 2 now"]),
        ({"model": tiny_model(hidden_size=64)}, ["model.parameters: ", "model.sha256: "]),
        ({"processing_class": tokenizer_with(chat_template="{{ messages }}")}, ["tokenizer: "]),
        ({"processing_class": tokenizer_with(eos_token="a")}, ["end_tokens: [1] in the checkpoint"]),
        ({"peft_config": LoraConfig(**LORA)}, ["model.adapters.default: "]),
    ],
)
def test_another_run_is_refused_and_each_change_is_named(copy, changes, named):
    with pytest.raises(CheckpointError, match="belongs to another run") as refused:
        other(copy, **changes).train(resume_from_checkpoint=str(copy / "checkpoint-2"))
    assert not Path(f"{copy}-2").exists()
    for text in named:
        assert text in str(refused.value)
    remedy = re.search(r"allow_changed_on_resume=(\[.*?\])", str(refused.value))
    assert (remedy is None) == ("model.parameters" in str(refused.value))
    if remedy is not None:
        trainer = other(copy, **changes, allow_changed_on_resume=ast.literal_eval(remedy[1]))
        trainer.train(resume_from_checkpoint=str(copy / "checkpoint-2"))
        assert trainer.state.global_step == 3
    else:
        trainer = other(copy, **changes, allow_changed_on_resume=["model"])
        with pytest.raises(CheckpointError, match=r"keeps the checkpoint's model\.parameters\."):
            trainer.train(resume_from_checkpoint=str(copy / "checkpoint-2"))


@pytest.mark.parametrize(
    ("file", "part", "entry"),
    [(STATE, None, "conditions"), (STATE, "rollouts", "waiting"), (FINGERPRINT, None, "model")],
)
def test_another_format_is_refused_with_what_is_missing(copy, file, part, entry):
    folder = copy / "checkpoint-2"
    content = load_state(folder) if file == STATE else json.loads((folder / file).read_text())
    assert content is not None
    del (content if part is None else content[part])[entry]
    save_state(folder, content) if file == STATE else (folder / file).write_text(json.dumps(content))
    write_listing(folder, {"processes": 1})
    with pytest.raises(CheckpointError, match=f"has no entry '{entry}', because another version.* NEW_FOLDER"):
        make(copy, **SAVE).train(str(folder))


@pytest.mark.full
def test_a_checkpoint_keeps_its_chunks(tmp_path):
    """Where no size is set."""
    scored: list[int] = []
    letters = watched(lambda prompts, **columns: scored.append(len(prompts)))
    other(tmp_path / "out", reward=letters, rollout_chunk_size=16).train()
    assert scored == [16] * 3
    saved = str(tmp_path / "out" / "checkpoint-2")
    trainer = make(tmp_path / "out", reward=letters)
    assert (trainer.geometry.rollout_chunk_size, trainer.geometry.together) == (4, True)
    trainer.train(resume_from_checkpoint=saved)
    assert trainer.geometry.rollout_chunk_size == 16
    assert scored == [16] * 4
    trainer.train()  # a new run has those of its configuration
    assert trainer.geometry.rollout_chunk_size == 4
    assert scored[4:] == [4] * 12
    with pytest.raises(CheckpointError, match="rollout_chunk_size: 16 in the checkpoint, 8 now"):
        make(tmp_path / "out", reward=letters, rollout_chunk_size=8).train(resume_from_checkpoint=saved)
    allowed = ran(make(tmp_path / "out", reward=letters, allow_changed_on_resume=["rollout_chunk_size"]), saved)
    assert allowed.geometry.rollout_chunk_size == 4


def test_a_write_that_fails_half_way_leaves_nothing_behind(copy, monkeypatch):
    shutil.rmtree(copy / "checkpoint-3")
    trainer = make(copy, **SAVE)

    def full(folder: str, **kwargs: Any) -> None:
        Path(folder).mkdir(parents=True)
        Path(folder, "half").write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trainer, "save_model", full)
    with pytest.raises(CheckpointError, match=r"checkpoint-3 could not be written .*No space left.*untouched"):
        trainer.train(resume_from_checkpoint=str(copy / "checkpoint-2"))
    assert read_record(copy).starts[-1]["ended"] == "failed"
    assert [why_broken(folder) for folder in checkpoints(copy)] == [None] * 2
    assert not list(copy.glob("_writing*"))


@pytest.mark.parametrize("part", [(checkpoint, "file_hash"), (checkpoint, "_sync"), (state, "publish")])
def test_no_older_checkpoint_goes_before_the_newer_one_is_complete(tmp_path, monkeypatch, part):
    """An error on a thread that hashes or syncs is that of the checkpoint."""

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    spoil = on("on_pre_optimizer_step", lambda state: monkeypatch.setattr(*part, full), at=1)
    with pytest.raises(CheckpointError, match=r"checkpoint-2 could not be written .*No space left.*untouched"):
        make(tmp_path, **SAVE, save_total_limit=1, callbacks=[spoil]).train()
    monkeypatch.undo()
    assert [(path.name, why_broken(path)) for path in checkpoints(tmp_path)] == [("checkpoint-1", None)]
    assert not list(tmp_path.glob("_writing*"))


def test_a_checkpoint_that_a_callback_asks_for_again_is_the_one_that_is_there(tmp_path):
    trainer = make(tmp_path, **SAVE, max_steps=2, callbacks=[stopping("on_epoch_end", save=True)])
    events = noted_events(trainer, "on_save")
    trainer.train()
    assert len(events) == 3
    assert [why_broken(path) for path in checkpoints(tmp_path)] == [None] * 2


def test_a_run_that_goes_back_begins_beside_so_that_latest_means_it(copy, caplog):
    before = times(copy)
    allowed = {"allow_changed_on_resume": ["max_steps"]}
    other(copy, max_steps=2, **allowed).train(copy / "checkpoint-1")
    assert times(copy) == before
    assert beside(copy) == ["checkpoint-1", "checkpoint-2"]
    assert f"holds an earlier run, which is left alone. This run saves to {copy}-2" in caplog.text
    other(copy, max_steps=3, **allowed).train("latest")
    assert beside(copy) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    assert times(copy) == before


def test_going_on_from_elsewhere_leaves_another_runs_folder_alone(run, copy, caplog):
    before = times(copy)
    make(copy, **SAVE).train(run / "checkpoint-2")
    assert times(copy) == before
    assert beside(copy) == ["checkpoint-2", "checkpoint-3"]
    assert "which is left alone" in caplog.text


@pytest.mark.parametrize("word", few_of(["checkpoint-1", "latest", "auto"], ["auto"]))
def test_a_run_beside_an_earlier_one_is_resumed_where_it_is(run, copy, word):
    """By its path, "latest" and "auto": one folder and one log, and the bits of the run that was not interrupted."""
    beside = Path(f"{copy}-2")
    with pytest.raises(TrainingInterrupted) as interrupted:
        make(copy, **SAVE, callbacks=[signals(0, signal.SIGTERM)]).train()
    assert interrupted.value.checkpoint == str(beside / "checkpoint-1")
    again = ran(make(copy, **SAVE), str(beside / word) if word.startswith("checkpoint") else word)
    assert again.args.output_dir == str(beside)
    whole = load_file(run / "checkpoint-3" / "model.safetensors")
    assert all(torch.equal(whole[name], value) for name, value in again.model.named_parameters())
    assert [entry["step"] for entry in read_record(beside).entries if "loss" in entry["values"]] == [1, 2, 3]
    assert [folder.name for folder in checkpoints(beside)] == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    assert not Path(f"{copy}-3").exists()
    assert [folder.name for folder in checkpoints(copy)] == [folder.name for folder in checkpoints(run)]


def test_latest_is_of_the_newest_run_that_has_saved(copy, caplog):
    make(copy, **SAVE, max_steps=1).train()
    make(copy, max_steps=1).train()  # in `-3`, and saves nothing
    make(copy, **SAVE, max_steps=1).train("latest")
    assert f"Resuming from {copy}-2/checkpoint-1.\n" in caplog.text
    make(copy, **SAVE).train(copy / "checkpoint-3")  # a path says which
    make(copy, **SAVE, max_steps=1).train("latest")
    assert caplog.text.count(f"Resuming from {copy}-2/checkpoint-1.\n") == 2
    assert not Path(f"{copy}-4").exists()


def test_another_run_of_the_same_trainer_belongs_to_its_output_dir(copy):
    trainer = make(copy, **SAVE, max_steps=1)
    for number in (2, 3):
        trainer.train()
        assert trainer.args.output_dir == f"{copy}-{number}"
    trainer.args.output_dir = f"{copy}-b"  # the user's
    trainer.train()
    assert (Path(f"{copy}-b") / "checkpoint-1").is_dir()


def test_a_finished_run_that_is_resumed_stays_as_it_is(tmp_path, caplog):
    usual = {"lr_scheduler_type": "constant", "max_steps": -1, "num_train_epochs": 1}
    whole = ran(other(tmp_path, **usual))
    steps = whole.state.global_step
    again = ran(other(tmp_path, **usual), "latest")
    assert again.state.global_step == steps
    assert torch.equal(parameters(whole), parameters(again))
    assert [int(folder.name.split("-")[1]) for folder in checkpoints(tmp_path)][-1] == steps
    assert f"Resuming after step {steps} of {steps}." in caplog.text


@pytest.mark.parametrize(
    ("changes", "dropped"),
    [({"advantage_estimator": "leave_one_out"}, True), ({"rollout_batch_size": 16}, True), ({}, False)],
    ids=str,
)
def test_a_changed_rollout_is_sampled_anew(tmp_path, caplog, changes, dropped):
    usual = {"rollout_batch_size": 32, "global_batch_size": 16, "max_steps": 2, "save_steps": 1}
    other(tmp_path, **usual).train()
    changes = {**usual, **changes, "max_grad_norm": 2.0}
    allowed = sorted(name for name in changes if changes[name] != usual.get(name))
    checkpoint = str(tmp_path / "checkpoint-1")  # in the middle of a rollout batch
    with pytest.raises(CheckpointError, match=re.escape(f"allow_changed_on_resume={allowed}")):
        other(tmp_path, **changes).train(checkpoint)
    calls: list[int] = []
    counted = watched(lambda completions, **columns: calls.append(len(completions)))
    trainer = ran(other(tmp_path, **changes, reward=counted, allow_changed_on_resume=allowed), checkpoint)
    assert trainer.state.global_step == 2
    assert bool(calls) is dropped
    assert ("changed, so the rollout batches of the checkpoint are not used" in caplog.text) is dropped


def test_deepspeeds_shards_want_as_many_processes(copy):
    write_listing(copy / "checkpoint-2", {"processes": 3})
    trainer = make(copy, **SAVE)
    trainer.is_deepspeed_enabled = True
    with pytest.raises(CheckpointError, match=r"written by 3 processes.* this run has 1. Start 3, or export"):
        trainer.train(str(copy / "checkpoint-2"))


def test_the_best_checkpoint_is_known_by_its_final_name(tmp_path):
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_reward", "greater_is_better": True}
    settings = {**best, "eval_strategy": "steps", "eval_steps": 1, "save_total_limit": 1}
    trainer = ran(other(tmp_path, eval_dataset=prompts(4, seed=1), **settings))
    named = Path(trainer.state.best_model_checkpoint)
    assert named.parent == tmp_path
    assert named.is_dir()
    for folder in checkpoints(tmp_path):
        state = json.loads((folder / "trainer_state.json").read_text())
        assert Path(state["best_model_checkpoint"]).parent == tmp_path
        assert state["best_global_step"] in (1, 2, 3)
        assert why_broken(folder) is None


def test_a_checkpoint_is_pushed_under_the_name_it_has_once_it_is_whole(tmp_path, monkeypatch):
    pushed = []

    def push(self, folder):
        pushed.append((Path(folder).name, why_broken(folder)))

    monkeypatch.setattr(Trainer, "init_hf_repo", lambda self, token=None: None)
    monkeypatch.setattr(Trainer, "_push_from_checkpoint", push)
    make(tmp_path / "out", push_to_hub=True, max_steps=2, **SAVE).train()
    assert pushed == [("checkpoint-1", None), ("checkpoint-2", None)]


@pytest.mark.full
def test_what_a_checkpoint_has_loaded_is_freed(tmp_path):
    """The weights that sampled ahead among it; the control holds them."""

    def states() -> int:
        gc.collect()
        return sum(type(thing) is Weights for thing in gc.get_objects())

    settings = {**SAVE, "rollout_lag": 1, "max_steps": 2}
    make(tmp_path, **settings).train()
    trainer = ran(make(tmp_path, **settings), tmp_path / "checkpoint-1")
    assert states() == 0, trainer
    saved = load_state(tmp_path / "checkpoint-1")
    assert saved is not None
    held = saved_waiting(saved["rollouts"]["waiting"])
    assert states() == 1, held


def test_a_run_that_starts_beside_another_saves_elsewhere(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(checkpoint, "_PATIENCE", 0.0)
    folder, refusals = tmp_path / "out", []
    first, second = make(folder, **SAVE), make(folder, **SAVE)

    def resume_too(state: Any) -> None:
        with pytest.raises(CheckpointError) as refused:
            make(folder, **SAVE).train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        refusals.append(str(refused.value))

    first.add_callback(on("on_step_end", lambda state: second.train(), at=1))  # before the first has saved anything
    first.add_callback(on("on_step_end", resume_too, at=3))
    first.train()
    for trainer, name in ((first, "out"), (second, "out-2")):
        assert Path(str(trainer.args.output_dir)) == tmp_path / name
        assert [why_broken(path) for path in checkpoints(tmp_path / name)] == [None] * 3
        assert read_record(tmp_path / name).starts[-1]["ended"] == "finished"
    assert "out belongs to another run, which" in caplog.text
    assert "two runs would overwrite each other's checkpoints" in refusals[0]
    make(folder, **SAVE).train(resume_from_checkpoint=str(folder / "checkpoint-2"))  # free again


def test_latest_is_looked_for_once_the_folder_is_free(copy, tmp_path):
    (copy / "checkpoint-3").rename(tmp_path / "checkpoint-3")
    lock = lock_to_resume(copy)

    def other_run() -> None:
        time.sleep(0.2)
        (tmp_path / "checkpoint-3").rename(copy / "checkpoint-3")  # it saves, and ends
        lock.release()

    thread = threading.Thread(target=other_run)
    second = make(copy, **SAVE)
    thread.start()
    second.train(resume_from_checkpoint="latest")
    thread.join()
    assert second.state.global_step == 3
    assert (copy / "checkpoint-3").is_dir()
    assert not Path(f"{copy}-2").exists()


def test_bitwise_mode_does_not_go_on_with_other_rounding(tmp_path):
    other(tmp_path, max_steps=1, bitwise_invariant=True).train()
    with pytest.raises(CheckpointError, match='forward: "auto" in the checkpoint, "padded" now'):
        other(tmp_path, max_steps=1, bitwise_invariant=True, forward="padded").train("latest")
