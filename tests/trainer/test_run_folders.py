"""Runs that go back to an earlier checkpoint, and which of an output_dir's runs is the latest."""

import json
import re
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback, TrainerState

from grpo_ext.errors import CheckpointError
from grpo_ext.run import checkpoint
from grpo_ext.run.checkpoint import checkpoints, run_to_resume, why_broken
from grpo_ext.run.record import STEPS, read_record
from tests.support.forks import ROOT
from tests.support.tiny import prompts, tiny_model
from tests.support.trainers import SAVE, make, on, other, parameters, ran


@pytest.mark.full
def test_the_latest_run_is_one_that_went_back_also_before_its_first_checkpoint(tmp_path):
    run = tmp_path / "run"
    ran(make(run, **SAVE))
    fails = on("on_step_end", lambda state: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        make(run, **SAVE, callbacks=[fails]).train(f"{run}/checkpoint-1")
    assert [path.name for path in checkpoints(tmp_path / "run-2")] == ["checkpoint-1"]  # where it goes on from
    trainer = make(run, **SAVE)
    trainer.train("latest")
    assert trainer.args.output_dir == f"{run}-2"
    assert [path.name for path in checkpoints(tmp_path / "run-2")] == [f"checkpoint-{n}" for n in (1, 2, 3)]
    assert read_record(tmp_path / "run-2").trained == [1, 2, 3]
    shutil.copytree(tmp_path / "run-2", tmp_path / "run-7")  # a copy does not belong to this output_dir
    assert run_to_resume("latest", run) == tmp_path / "run-2"


@pytest.mark.full
def test_a_run_that_goes_back_in_the_current_folder_is_found(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path / "run")
    ran(make(Path("."), **SAVE))
    trainer = ran(make(Path("."), **SAVE), "checkpoint-1")
    assert Path(trainer.args.output_dir).samefile(tmp_path / "run-2")
    assert run_to_resume("latest", ".") == tmp_path / "run-2"


BEST = {"load_best_model_at_end": True, "metric_for_best_model": "eval_reward", "greater_is_better": True}
EVALUATED = {**SAVE, **BEST, "eval_strategy": "steps", "eval_steps": 1, "max_steps": 3}


class Falling(TrainerCallback):
    """Lets the first evaluation be the best."""

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
        metrics["eval_reward"] = -state.global_step


@pytest.mark.parametrize("limit", [None, 1])
@pytest.mark.full
def test_the_best_checkpoint_comes_along_to_the_folder_of_a_run_that_went_back(tmp_path, limit):
    def build(**settings: Any) -> Any:
        callbacks, data = [Falling()], prompts(4, seed=1)
        return make(tmp_path / "run", **EVALUATED, **settings, callbacks=callbacks, eval_dataset=data)

    first = ran(build())
    best = parameters(first)  # those after the first step, which are loaded at the end
    back = build(save_total_limit=limit)
    back.train(f"{tmp_path}/run/checkpoint-2")
    assert back.args.output_dir == f"{tmp_path}/run-2"
    assert back.state.best_model_checkpoint == f"{tmp_path}/run-2/checkpoint-1"
    assert torch.equal(parameters(back), best)
    shutil.rmtree(tmp_path / "run")  # nothing of it is needed any more
    steps = [1, 2, 3] if limit is None else [1]
    assert [path.name for path in checkpoints(tmp_path / "run-2")] == [f"checkpoint-{n}" for n in steps]
    assert all(why_broken(path) is None for path in checkpoints(tmp_path / "run-2"))


@pytest.mark.parametrize(
    ("identity", "copies"), [("same", ["checkpoint-1", "checkpoint-2"]), ("other", ["checkpoint-2"])]
)
def test_the_path_of_the_best_checkpoint_is_not_taken_from_another_run(tmp_path, identity, copies):
    first, moved, run = tmp_path / "first", tmp_path / "moved" / "checkpoint-2", tmp_path / "run-2"
    for folder, text in ((first / "checkpoint-1", identity), (moved, "same")):
        folder.mkdir(parents=True)
        (folder / checkpoint.FINGERPRINT).write_text(text)
        checkpoint.write_listing(folder, {})
    checkpoint.folder_beside(tmp_path / "run")
    best = str(first / "checkpoint-1")
    state = TrainerState(global_step=2, best_global_step=1, best_model_checkpoint=best)
    checkpoint.take_along(moved, run, state)
    assert [path.name for path in checkpoints(run)] == copies


@pytest.mark.full
def test_a_kill_after_the_first_of_both_checkpoints_leaves_the_best_to_the_next_start(tmp_path, monkeypatch):
    def build(**settings: Any) -> Any:
        callbacks, data = [Falling()], prompts(4, seed=1)
        return make(tmp_path / "run", **EVALUATED, **settings, callbacks=callbacks, eval_dataset=data)

    best, link = parameters(ran(build())), checkpoint.link

    def link_once(source: Path, copy: Path) -> None:
        link(source, copy)
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "link", link_once)
    with pytest.raises(KeyboardInterrupt):
        build().train(f"{tmp_path}/run/checkpoint-2")
    monkeypatch.setattr(checkpoint, "link", link)
    assert [path.name for path in checkpoints(tmp_path / "run-2")] == ["checkpoint-2"]
    back = build()
    back.train("latest")
    assert back.args.output_dir == f"{tmp_path}/run-2"
    assert back.state.best_model_checkpoint == f"{tmp_path}/run-2/checkpoint-1"
    assert torch.equal(parameters(back), best)
    assert [path.name for path in checkpoints(tmp_path / "run-2")] == [f"checkpoint-{n}" for n in (1, 2, 3)]


@pytest.mark.full
def test_weights_that_sampled_ahead_are_those_of_the_same_parameters(tmp_path, caplog):
    """A model with others would not find its own among them; also where it is allowed, they are not used."""
    other(tmp_path, rollout_lag=1).train()
    model = tiny_model()
    model.model.layers[0].requires_grad_(False)
    trainer = other(tmp_path, rollout_lag=1, model=model, allow_changed_on_resume=["model"])
    with pytest.raises(CheckpointError, match=r"keeps the checkpoint's optimizer\.group 0"):
        trainer.train(str(tmp_path / "checkpoint-2"))
    assert "model.sha256 changed, so the rollout batches of the checkpoint are not used" in caplog.text


@pytest.fixture(scope="module")
def went_back(tmp_path_factory) -> Path:
    """The folder of a run that went back to step 1 of another one, which is gone."""
    run = tmp_path_factory.mktemp("back") / "run"
    ran(make(run, **SAVE))
    trainer = ran(make(run, **SAVE), f"{run}/checkpoint-1")
    shutil.rmtree(run)
    return Path(trainer.args.output_dir)


@pytest.mark.full
def test_a_step_of_a_run_that_went_back_runs_again_from_where_it_went_back(went_back, caplog):
    again = make(went_back, **SAVE).rerun(2)
    assert "Running step 2" in caplog.text
    assert "from checkpoint-1" in caplog.text
    assert again.comparison.verdict == "same bits"


def test_the_fields_of_a_record_are_those_of_the_documents(went_back):
    page = (ROOT / "docs" / "tools.md").read_text()
    table = page.partition("| line of `steps.jsonl` |")[2].partition("\n\n")[0]
    documented = defaultdict[str, set[str]](set)
    for row in table.splitlines()[2:]:
        kind, names = row.split("|")[1:3]
        documented[kind.strip(" `")] |= {*re.findall(r"`(\w+)`", names)}
    common, found = documented.pop("all"), defaultdict[str, set[str]](set)
    for text in (went_back / STEPS).read_text().splitlines():
        line = json.loads(text)
        found[line["line"]] |= line.keys() - common
        assert common <= line.keys()
        for part in line.get("rounds", ()):
            found["round"] |= part.keys()
    assert found == documented


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_new_run_leaves_a_finished_one_without_checkpoints_alone(tmp_path, caplog):
    """Also where one trainer trains twice."""
    run = tmp_path / "run"
    trainer = ran(make(run, save_strategy="no", max_steps=2))
    before = files(run)
    assert not checkpoints(run)
    assert ran(make(run, save_strategy="no", max_steps=1)).args.output_dir == f"{run}-2"
    assert f"{run} holds an earlier run, which is left alone. This run saves to {run}-2" in caplog.text
    assert ran(trainer).args.output_dir == f"{run}-3"
    assert files(run) == before
    assert [read_record(f"{run}{beside}").trained for beside in ("", "-2", "-3")] == [[1, 2], [1], [1, 2]]


def test_a_run_that_failed_before_its_first_checkpoint_begins_again_in_its_folder(tmp_path):
    fails = on("on_step_end", lambda state: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        make(tmp_path / "run", save_strategy="no", callbacks=[fails]).train()
    trainer = ran(make(tmp_path / "run", save_strategy="no"))
    assert trainer.args.output_dir == f"{tmp_path}/run"
    assert read_record(tmp_path / "run").trained == [1, 2, 3]
