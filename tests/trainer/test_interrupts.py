"""SIGTERM and Ctrl-C end a run after the current step, with a complete checkpoint and the way to continue."""

import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_ext.run.checkpoint import checkpoints, why_broken
from grpo_ext.run.interrupts import EXIT_STATUS, TrainingInterrupted
from grpo_ext.run.record import read_record
from tests.support.launch import ROOT, environment, two_processes
from tests.support.selection import few_of
from tests.support.tiny import letter_reward, prompts
from tests.support.trainers import make, noted_events, on, parameters, ran, signals, stopping, watched

STEPS, EPOCH = {"eval_strategy": "steps", "eval_steps": 2}, {"eval_strategy": "epoch", "logging_strategy": "epoch"}
EACH_STEP = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 2}
BEST = {"metric_for_best_model": "eval_reward", "greater_is_better": True}
SAVES = {"save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True, **BEST}
TIMES = re.compile(r"time|per_second|epoch_|flos")


@pytest.fixture(scope="module")
def four_steps(tmp_path_factory) -> torch.Tensor:
    """The weights of a run that is not interrupted."""
    return parameters(ran(make(tmp_path_factory.mktemp("whole"), max_steps=4)))


BOTH = (signal.SIGINT, signal.SIGTERM)


@pytest.mark.parametrize("numbers", few_of([(signal.SIGTERM,), BOTH], [BOTH]))
def test_a_signal_ends_the_run_after_its_step(tmp_path, caplog, four_steps, numbers):
    before = {number: signal.getsignal(number) for number in numbers}
    trainer = make(tmp_path / "out", max_steps=4)
    trainer.add_callback(signals(1, *numbers))
    events = noted_events(trainer, "on_save", "on_epoch_end", "on_train_end")
    with pytest.raises(TrainingInterrupted) as stopped:
        trainer.train()
    assert events == ["on_save", "on_epoch_end", "on_train_end"]
    assert stopped.value.code == EXIT_STATUS == 75
    assert trainer.state.global_step == 2
    (folder,) = checkpoints(tmp_path / "out")
    assert folder.name == "checkpoint-2"
    assert why_broken(folder) is None
    said = caplog.text
    assert "Stopping after this step" in said
    assert f"--resume_from_checkpoint {folder}" in said
    assert {number: signal.getsignal(number) for number in numbers} == before
    assert torch.equal(four_steps, parameters(ran(make(tmp_path / "out", max_steps=4), "latest")))


@pytest.mark.full
def test_the_checkpoint_to_go_on_from_is_kept_beside_the_best_one(tmp_path):
    every = {**STEPS, **SAVES, "eval_steps": 1, "save_steps": 1}
    trainer = make(tmp_path, eval_dataset=prompts(4, seed=1), max_steps=4, save_total_limit=1, **every)
    trainer.add_callback(signals(2, signal.SIGTERM))
    evaluated = []
    trainer.add_callback(on("on_evaluate", lambda state: evaluated.append(state.global_step)))
    with pytest.raises(TrainingInterrupted) as stopped:
        trainer.train()
    assert stopped.value.checkpoint == str(tmp_path / "checkpoint-3")
    assert why_broken(tmp_path / "checkpoint-3") is None
    assert Path(trainer.state.best_model_checkpoint).is_dir()
    assert evaluated == [1, 2, 3]


def noisy_reward(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
    """Draws from the process's random numbers, in training and in evaluation."""
    return [len(text) + random.random() + float(torch.rand(())) for text in completions]


def level_reward(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
    """With the same mean in every evaluation."""
    return [float(place % 2) for place in range(len(completions))]


def logged(lines: list[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    """What was logged at which step, without seconds and the summary at the end."""
    values = [(line["step"], line.get("values", line)) for line in lines]
    kept = [(step, {k: v for k, v in line.items() if not TIMES.search(k)}) for step, line in values]
    return [(step, line) for step, line in kept if "train_loss" not in line]


ONCE_BEST = {"save_strategy": "best", "reward": level_reward, **BEST}


@pytest.mark.parametrize(
    ("stop", "settings"),
    [
        # the second evaluation is not the best, so it would save nothing
        (2, EACH_STEP | ONCE_BEST | {"max_steps": 3}),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                (2, STEPS),  # in the middle of an epoch of three steps
                (3, STEPS),
                # in the last step of all, after which a run evaluates too
                (2, {**EACH_STEP, "eval_steps": 3}),
                # with the last step of an epoch too
                (3, {**STEPS, "eval_steps": 3, "max_steps": 3}),
                (3, EPOCH),
                # random numbers in a thread depend on its pace
                (1, {**EACH_STEP, "rollout_lag": 1, "reward": letter_reward, "max_steps": 3}),
                (1, EACH_STEP | SAVES | {"save_steps": 1}),
                (2, STEPS | SAVES),
                (6, EPOCH | ONCE_BEST | {"max_steps": 7}),
            )
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "+".join(value),
)
def test_an_interrupted_run_makes_the_evaluations_of_one_that_was_not(tmp_path, stop, settings):
    """The same weights, random numbers and logged values as without the interrupt."""
    settings = {"max_steps": 4, "eval_dataset": prompts(4, seed=1), "reward": noisy_reward, **settings}
    runs = {name: make(tmp_path / name, **settings) for name in ("whole", "stopped")}
    runs["stopped"].add_callback(signals(stop - 1, signal.SIGTERM))
    for name, ends in (("whole", nullcontext()), ("stopped", pytest.raises(TrainingInterrupted))):
        torch.manual_seed(0)
        random.seed(0)
        with ends:
            runs[name].train()
    evaluated: list[int] = []
    assert runs["stopped"].state.global_step == stop
    again = make(tmp_path / "stopped", **settings)
    again.add_callback(on("on_evaluate", lambda state: evaluated.append(state.global_step)))
    again.train(resume_from_checkpoint="latest")
    assert torch.equal(parameters(runs["whole"]), parameters(again))
    assert logged(again.state.log_history) == logged(runs["whole"].state.log_history)
    whole, resumed = (logged(read_record(tmp_path / name).entries) for name in runs)
    assert resumed == whole
    assert stop not in evaluated
    for name in ("best_metric", "best_global_step"):
        assert getattr(again.state, name) == getattr(runs["whole"].state, name)
    best = runs["whole"].state.best_model_checkpoint
    if best is not None:
        assert Path(str(again.state.best_model_checkpoint)) == tmp_path / "stopped" / Path(best).name


def test_an_evaluation_that_ends_the_run_ends_it_before_another_step(tmp_path):
    settings = {"max_steps": 4, "eval_dataset": prompts(4, seed=1), **STEPS}
    stopped = make(tmp_path, callbacks=[stopping("on_evaluate"), signals(1, signal.SIGTERM)], **settings)
    with pytest.raises(TrainingInterrupted):
        stopped.train()
    again = ran(make(tmp_path, callbacks=[stopping("on_evaluate")], **settings), "latest")
    assert again.state.global_step == 2
    assert torch.equal(parameters(stopped), parameters(again))


def test_a_second_ctrl_c_stops_at_once(tmp_path):
    trainer = make(tmp_path, max_steps=4)
    trainer.add_callback(signals(1, signal.SIGINT, signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.state.global_step == 1
    assert checkpoints(tmp_path) == []


# a run beside an earlier one that is finished; `stop` sends the last process SIGTERM in its second step, in which an
# evaluation is due
BESIDE = """
import os, signal, sys
import torch
from tests.support.tiny import prompts
from tests.support.trainers import SAVE, make, on, parameters
folder, rank = sys.argv[1], os.environ["RANK"]
settings = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2, "eval_dataset": prompts(4, seed=1)}
stop = on("on_pre_optimizer_step", lambda state: rank == "1" and os.kill(os.getpid(), signal.SIGTERM), at=1)
for what in sys.argv[2:]:
    seed = 4 if what == "other" else 3
    trainer = make(folder, **SAVE, **settings, seed=seed, callbacks=[stop] if what == "stop" else None)
    try:
        trainer.train("latest" if what in ("resume", "other") else None)
    except SystemExit as stopped:
        with open(f"{folder}-{what}-{rank}", "w") as file:
            file.write(str(stopped.code))
        raise
    if rank == "0":
        torch.save(parameters(trainer), f"{trainer.args.output_dir}/end.pt")
"""


def test_both_processes_stop_where_one_is_asked_and_resume_beside_an_earlier_run(tmp_path):
    (tmp_path / "script.py").write_text(BESIDE)
    status, output = two_processes(tmp_path / "script.py", str(tmp_path / "out"), "whole", "stop")
    assert status, "the launcher has to tell what waits for the run that it was stopped"
    stopped = {path.name: path.read_text() for path in tmp_path.glob("out-*-?")}
    assert stopped == {f"out-stop-{rank}": str(EXIT_STATUS) for rank in (0, 1)}, output
    status, output = two_processes(tmp_path / "script.py", str(tmp_path / "out"), "resume", "other")
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["out", "out-2"]
    whole, resumed = (tmp_path / name for name in ("out", "out-2"))
    assert torch.equal(torch.load(whole / "end.pt"), torch.load(resumed / "end.pt"))
    assert logged(read_record(whole).entries) == logged(read_record(resumed).entries)
    # another run is refused by both processes, and one reports it
    said = re.split(r"\n[EW]\d+ .*torch/distributed/elastic", output)[0]  # before the launcher's own report
    assert status
    assert said.count("belongs to another run") == said.count("Traceback") == 1, said


LONG = """
import os, sys
from tests.support.trainers import SAVE, make, on
def going(state):
    if os.environ.get("RANK", "0") == "0":
        print("going", flush=True)
make(sys.argv[1], **SAVE, max_steps=500, callbacks=[on("on_step_end", going, at=2)]).train()
"""
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
ACCELERATE = ["-m", "accelerate.commands.launch", "--config_file", "recipes/accelerate/cpu_2.yaml"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("launcher", "status"), [([], 75), (TORCHRUN, 1), (ACCELERATE, 1)], ids=["python", "torchrun", "accelerate"]
)
def test_ctrl_c_ends_in_the_sentence_and_the_launchers_status(tmp_path, launcher, status):
    """As docs/resume-and-faults.md says: torch's traceback follows under a launcher."""
    (tmp_path / "script.py").write_text(LONG)
    command = [sys.executable, *launcher, str(tmp_path / "script.py"), str(tmp_path / "out")]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    env = environment(PYTHONPATH=str(ROOT), ACCELERATE_USE_CPU="1")
    with subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True, **streams) as process:
        try:
            while process.stdout.readline() != "going\n":
                assert process.poll() is None
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to all of its foreground
            said = process.stdout.read()
        finally:
            process.kill()
    assert process.returncode == status
    _, sentence, rest = said.partition("Interrupted after step ")
    assert sentence
    assert ("SignalException" in rest.splitlines()[-1]) == (status == 1), rest
    assert (len(rest.splitlines()) == 1) == (status == 75), rest


def test_what_a_reward_function_forks_can_be_terminated(tmp_path, caplog):
    codes = []

    def fork(**columns: Any) -> None:
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(30,))
        child.start()
        time.sleep(0.2)
        child.terminate()
        child.join(10)
        codes.append(child.exitcode)

    trainer = ran(make(tmp_path / "out", max_steps=1, reward=watched(fork), rollout_chunk_size=16))
    assert codes == [-signal.SIGTERM]
    assert trainer.state.global_step == 1
    assert "Stopping" not in caplog.text


def test_a_trainer_in_another_thread_leaves_signals_alone(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    trainer = make(tmp_path, max_steps=1)
    thread = threading.Thread(target=trainer.train)
    thread.start()
    thread.join()
    assert trainer.state.global_step == 1
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_interrupted_rerun_names_no_checkpoint(tmp_path, caplog):
    """It would be the rerun's, which ends without one."""
    interrupts: list[int] = []

    def interrupting(*args: Any, **kwargs: Any) -> Any:
        for number in interrupts:
            os.kill(os.getpid(), number)
        return letter_reward(*args, **kwargs)

    settings = {"reward": interrupting, "max_steps": 3, "save_strategy": "steps", "save_steps": 1}
    ran(make(tmp_path, **settings))
    interrupts.append(signal.SIGTERM)
    with pytest.raises(TrainingInterrupted) as ended:
        make(tmp_path, **settings).rerun(3, call_rewards=True)
    assert ended.value.checkpoint is None
    assert "Interrupted after step 3; no checkpoint was written." in caplog.text
    assert "with a checkpoint" not in caplog.text
    assert not checkpoints(tmp_path / "rerun" / "step-3")
