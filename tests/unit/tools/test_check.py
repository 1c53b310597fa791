"""The comparison itself: it tells same from different, and never passes on nothing."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save_file

from grpo_ext.errors import ConfigError
from grpo_ext.rewards.worker import pack
from grpo_ext.tools.check import runs, splits
from grpo_ext.tools.check.comparison import compare, gradient_error, metric_difference, update_error
from grpo_ext.tools.check.report import CheckReport, Split, SplitResult
from grpo_ext.tools.check.runs import Run, RunResult
from grpo_ext.tools.check.splits import check, splits_of
from grpo_ext.tools.stock import OURS, STOCK
from tests.support.launches import train as train_forked
from tests.support.tiny import letter_reward, prompts, stock_scores, tiny_model, tiny_tokenizer

SIZES = {"global_batch_size": 8, "num_generations": 4}
TRAINED = {**SIZES, "max_completion_length": 8, "gradient_checkpointing": False}


def run_of(config: dict[str, Any], **others: Any) -> Run:
    return Run(OURS, "model", "data", (letter_reward,), config, **others)


def delta(*values: float) -> dict[str, torch.Tensor]:
    return {"w": torch.tensor(values, dtype=torch.float64)}


def test_update_error_is_the_relative_distance_of_the_updates():
    assert update_error(delta(3.0, 4.0), delta(3.0, 4.5)) == pytest.approx(0.1)
    assert update_error(delta(3.0, 4.0), delta(3.0, 4.0)) == 0.0
    assert update_error(delta(0.0), delta(1.0)) == math.inf
    assert update_error(delta(1.0), {"other": torch.ones(1)}) == math.inf


def test_the_gradient_error_is_that_of_the_worst_step(tmp_path):
    def written(name: str, *values: tuple[float, float]) -> Path:
        file = tmp_path / name
        save_file({f"{step}/{p}": torch.tensor([v[p]]) for step, v in enumerate(values) for p in (0, 1)}, file)
        return file

    reference = written("a", (3.0, 4.0), (30.0, 40.0), (0.0, 0.0))
    assert gradient_error(reference, reference) == 0.0
    assert gradient_error(reference, written("b", (3.0, 4.5), (30.0, 41.0), (0.0, 0.0))) == pytest.approx(0.1)
    # of a step whose gradient is nothing, against a tenth of the largest step's
    assert gradient_error(reference, written("c", (3.0, 4.0), (30.0, 40.0), (0.0, 1.0))) == pytest.approx(0.2)
    zero = written("e", (0.0, 0.0))
    assert gradient_error(zero, zero) == 0.0
    assert gradient_error(zero, written("f", (0.0, 1e-9))) == math.inf
    assert gradient_error(reference, written("d", (3.0, 4.0))) == math.inf


def test_metric_difference_finds_the_worst_value_and_leaves_timings_out():
    a = [{"loss": 1.0, "step_time": 1.0, "rewards/time_bonus/mean": 0.5, "train_runtime": 3.0}]
    b = [{"loss": 1.0, "step_time": 9.0, "rewards/time_bonus/mean": 0.7, "train_runtime": 4.0}]
    gap, name = metric_difference(a, b)
    assert name == "rewards/time_bonus/mean"
    assert gap == pytest.approx(0.2)
    assert metric_difference(a, a * 2)[0] == math.inf
    assert metric_difference([{"x": math.nan}], [{"x": math.nan}])[0] == 0.0
    assert metric_difference([{"x": 1.0}], [{}])[0] == math.inf


def verdict(reference: RunResult, other: RunResult, trace: bool = False) -> SplitResult:
    return compare(run_of({}, trace=trace), Split(1), reference, other)


def test_verdicts():
    reference = RunResult("a", delta(1.0), [{"loss": 1.0}])
    assert verdict(reference, reference).verdict == "reference"
    assert verdict(reference, RunResult("b", delta(1.0 + 1e-7), [{"loss": 1.0}])).verdict == "same"
    assert verdict(reference, RunResult("b", delta(1.1), [{"loss": 1.0}])).verdict == "differs"
    assert verdict(reference, RunResult("b", delta(1.0), [{"loss": 1.1}])).verdict == "differs"
    assert verdict(reference, RunResult("b", error="no")).verdict == "refused"


def test_a_run_that_learned_nothing_is_no_success():
    still = RunResult("a", delta(0.0), [{"loss": 0.0}])
    result = verdict(still, still)
    assert result.verdict == "nothing learned"
    assert not CheckReport([result], steps=1).ok


def test_bits_are_compared_by_hashes_and_the_first_difference_is_named():
    trace = [{"parameter/a": "1", "optimizer/a/exp_avg": "2"}, {"parameter/a": "3", "optimizer/a/exp_avg": "4"}]
    other = [trace[0], {"parameter/a": "3", "optimizer/a/exp_avg": "5"}]
    one = RunResult("a", delta(1.0), [{"loss": 1.0}], trace=trace)

    def reason(trace, loss=1.0):
        result = verdict(one, RunResult("b", delta(1.0), [{"loss": loss}], trace=trace), trace=True)
        assert result.verdict == ("differs" if result.reason else "same bits")
        return result.reason

    assert reason(trace) == ""
    assert reason(other) == "the first difference is in optimizer/a/exp_avg after step 2"
    assert reason(trace[:1]) == "2 against 1 steps"
    assert reason(trace, 1.0 + 1e-12) == "only the log differs, most in loss"


def saved(folder: Path, config: dict[str, Any], model: Any = None, rewards: Sequence[Any] = (letter_reward,)) -> Run:
    (model or tiny_model()).save_pretrained(folder / "m")
    tiny_tokenizer().save_pretrained(folder / "m")
    prompts().save_to_disk(str(folder / "d"))
    return Run("r", str(folder / "m"), str(folder / "d"), tuple(rewards), config)


@pytest.fixture
def fork_launches(monkeypatch):
    """The launches of `check` come from the tests' server."""
    monkeypatch.setattr(splits, "train", train_forked)


@pytest.fixture
def pretend(monkeypatch):
    """Launches without processes: a function from a run to its result stands for them.

    Returns what happened in its order: numbers of processes, and (micro-batch size, name, type) of runs.
    """
    happened: list[Any] = []

    def install(result_of: Callable[[Run], RunResult]) -> list[Any]:
        def train(runs: Sequence[Run], processes: int) -> Iterator[RunResult]:
            happened.append(processes)
            for run in runs:
                happened.append((run.config["per_device_train_batch_size"], run.name.split("_")[0], run.dtype))
                yield result_of(run)

        monkeypatch.setattr(splits, "train", train)
        return happened

    return install


def test_check_bitwise_trains_under_several_splits(fork_launches, tmp_path):
    report = check(saved(tmp_path, TRAINED), [Split(8), Split(3)], steps=2, bitwise=True)
    assert [r.verdict for r in report.results] == ["reference", "same bits"]
    assert report.conclusion() == "Every split of grpo_ext learns the same, to the bit."


QUANTISED = object()  # stands for a BitsAndBytesConfig


@pytest.mark.parametrize(
    ("wrong", "settings", "verdicts", "types"),
    [
        ((0.0, 0.0), {}, ["reference", "same"], ["float32"]),
        ((0.5, 0.5), {}, ["reference", "differs"], ["float32", "float64"]),
        ((0.5, 0.0), {}, ["reference", "rounding"], ["float32", "float64"]),
        ((0.5, 0.5), {"bf16": True}, ["reference", "same"], ["float32"]),  # rounding of 16 bits tells nothing
    ],
)
def test_a_wrong_gradient_that_the_update_hides_differs(pretend, wrong, settings, verdicts, types):
    def train(run):
        if run.gradients is not None:
            assert (run.config["learning_rate"], run.config["max_grad_norm"]) == (0.0, 0.0)
            off = wrong[run.dtype == "float64"] if run.config["per_device_train_batch_size"] == 3 else 0.0
            save_file({"0/w": torch.tensor([1.0, off])}, run.gradients)
        return RunResult(run.name, delta(1.0), [{"loss": 1.0}])

    happened = pretend(train)
    report = check(run_of({**SIZES, **settings}), [Split(8), Split(3)])
    assert [r.verdict for r in report.results] == verdicts
    assert list(dict.fromkeys(event[2] for event in happened if isinstance(event, tuple))) == types
    assert ("the gradient differs" in " ".join(report.notes())) == ("differs" in verdicts)


@pytest.mark.parametrize(
    ("settings", "quantization", "in_float32"),
    [({"fp16": True}, None, False), ({}, QUANTISED, True)],
)
def test_half_precision_and_quantised_weights_are_not_repeated_in_float64(pretend, settings, quantization, in_float32):
    happened = pretend(lambda run: RunResult(run.name, delta(off(run)), [{"loss": 1.0}]))
    report = check(run_of({**SIZES, **settings}, quantization=quantization), [Split(8), Split(3)])
    assert [r.verdict for r in report.results] == ["reference", "differs"]
    assert {event[2] for event in happened if isinstance(event, tuple)} == {"float32"}
    sentence = "At least one split learns something else."
    assert report.conclusion() == (sentence if in_float32 else "Splits differ, by 16-bit rounding or more.")
    assert any("float32 would tell" in note for note in report.notes()) is not in_float32


def off(run: Run) -> float:
    """An update that depends on the split."""
    return 1.0 + 0.1 * (run.config["per_device_train_batch_size"] == 3)


def test_three_splits_by_default_one_of_them_on_two_processes():
    assert splits_of(32, (1, 2)) == [Split(32), Split(5), Split(8, 2)]
    assert splits_of(32, (1, 2, 3, 4)) == [Split(32), Split(5), Split(8, 2), Split(5, 3), Split(4, 4)]
    assert splits_of(6, (2,)) == [Split(6, 2), Split(4, 2)]
    assert splits_of(1, (1, 2)) == [Split(1), Split(1, 2)]
    assert splits_of(8, (1, 2), (8, 3)) == [Split(8), Split(3), Split(8, 2), Split(3, 2)]


def test_no_process_is_left_of_a_launch_that_is_ended(tmp_path):
    """Its processes have sessions of their own: ending the launcher alone would leave them."""
    (tmp_path / "wait.py").write_text("import time\ntime.sleep(100)\n")
    command = runs.launch_command(2, [str(tmp_path / "wait.py")])
    started = runs.Processes(command, {**os.environ, "OMP_NUM_THREADS": "1"}, tmp_path / "output.txt")
    until = time.monotonic() + 60
    while sum(str(tmp_path) in words for words in command_lines()) < 3 and time.monotonic() < until:
        time.sleep(0.1)
    assert sum(str(tmp_path) in words for words in command_lines()) == 3
    started.kill()
    assert not any(str(tmp_path) in words for words in command_lines())


def test_the_processes_of_a_launch_end_with_their_caller(tmp_path):
    class Hangs:
        def __reduce__(self) -> Any:
            return time.sleep, (100,)

    (tmp_path / "runs.pickle").write_bytes(pack(Hangs()))
    code = "import os, sys, time; from pathlib import Path; from grpo_ext.tools.check.runs import launched; "
    code += "launched(Path(sys.argv[1]), 1, dict(os.environ)); time.sleep(100)"
    caller = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    until = time.monotonic() + 90
    while not any("check.worker" in words and str(tmp_path) in words for words in command_lines()):
        assert time.monotonic() < until
        time.sleep(0.1)
    caller.terminate()
    caller.wait()
    while any(str(tmp_path) in words for words in command_lines()):
        assert time.monotonic() < until
        time.sleep(0.1)


def command_lines() -> list[str]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
    return found


def test_wrong_sizes_and_names_are_refused_before_anything_starts():
    with pytest.raises(ConfigError, match="against='verl' is unknown"):
        check(run_of(SIZES), [Split(8)], against="verl")
    with pytest.raises(ConfigError, match="global_batch_size=15"):
        check(run_of({**SIZES, "global_batch_size": 15}), [Split(8)])


@stock_scores
def test_check_trains_and_compares_with_a_local_reward(fork_launches, tmp_path):
    factor = 2.0  # a closure reaches the processes too

    def scaled(prompts, completions, **kwargs):
        return [factor * r for r in letter_reward(prompts, completions)]

    config = {**TRAINED, "learning_rate": 1e-3, "adam_epsilon": 1e-4}
    report = check(saved(tmp_path, config, rewards=[scaled]), [Split(8), Split(3)], against="trl")
    assert [r.verdict for r in report.of(OURS)] == ["reference", "same"]
    assert [r.verdict for r in report.of(STOCK)] == ["reference", "refused"]
    assert report.ok
    assert 0.0 < report.of(OURS)[1].gradient_error < 2e-6


def test_in_float64_a_check_leaves_nothing_but_its_rounding(fork_launches, tmp_path):
    # a Llama computes its norms in float32 whatever its weights are: with those the update differs by 1e-5
    report = check(saved(tmp_path, TRAINED, tiny_model("llama")), [Split(8), Split(3)], tolerance=1e-9)
    assert [r.verdict for r in report.results] == ["reference", "rounding"]
    assert report.results[1].float64_error < 1e-10 < report.results[1].update_error


def test_settings_that_no_split_can_be_trained_with_end_the_check(fork_launches, tmp_path):
    with pytest.raises(ConfigError, match=r"no split could be trained: .*reward weights \(2\)"):
        check(saved(tmp_path, {**SIZES, "reward_weights": [1.0, 2.0]}), [Split(8)])


def test_json_holds_no_nan():
    refused = SplitResult(Split(8), OURS, "refused", "because")
    plain = json.loads(json.dumps(CheckReport([refused], 1).as_dict(), allow_nan=False))
    assert plain["results"][0]["update_error"] is None
    assert plain["results"][0]["reason"] == "because"


def test_dropout_makes_a_split_differ_and_is_blamed(fork_launches, tmp_path):
    # the negative control of the comparison: noise drawn per micro-batch
    config = {**TRAINED, "learning_rate": 1e-3, "allow_split_dependent": True}
    noisy = saved(tmp_path, config, tiny_model("gpt2", resid_pdrop=0.2))
    report = check(noisy, [Split(8), Split(4)], steps=2)
    assert [r.verdict for r in report.results] == ["reference", "differs"]
    assert not report.ok
    assert "allow_split_dependent" in report.notes()[0]
    assert report.results[1].gradient_error > 1e-2


@pytest.mark.parametrize(
    ("verdict", "status", "words"), [("rounding", 0, "learns the same"), ("differs", 1, "learns something else")]
)
def test_the_exit_status_of_the_command_is_the_verdict(monkeypatch, verdict, status, words):
    from typer.testing import CliRunner

    from grpo_ext.tools import cli

    result = SplitResult(Split(1), OURS, verdict)
    monkeypatch.setattr("grpo_ext.tools.check.task.load_run", lambda *args: (run_of({"global_batch_size": 1}), ""))
    monkeypatch.setattr("grpo_ext.tools.check.check", lambda *args, **kwargs: CheckReport([result], steps=1))
    done = CliRunner().invoke(cli.app, ["check", "--processes", "1", "--micro_batch_sizes", "1"])
    assert done.exit_code == status, done.output
    assert words in done.output
