"""The comparison itself: it tells same from different, and never passes on nothing."""

import itertools
import json
import math
import os
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from typer.testing import CliRunner

from grpo_ext.errors import ConfigError, LaunchError
from grpo_ext.run.diff import compare_runs, read_run
from grpo_ext.run.log import RunLog
from grpo_ext.run.record import STEPS
from grpo_ext.tools.check import runs, splits
from grpo_ext.tools.check.comparison import CheckReport, Split, SplitResult, compare, update_error
from grpo_ext.tools.check.runs import Run, RunResult
from grpo_ext.tools.check.splits import check, splits_of
from grpo_ext.tools.check.worker import _write_record
from grpo_ext.tools.cli import app, main
from grpo_ext.tools.stock import OURS, STOCK
from tests.support.cases import Bench
from tests.support.forks import SERVED, serves
from tests.support.launches import run_all
from tests.support.launches import train as train_forked
from tests.support.tiny import STOCK_SCORES, letter_reward, prompts, stock_scores, tiny_model, tiny_tokenizer

SIZES = {"global_batch_size": 8, "num_generations": 4}
TRAINED = {**SIZES, "max_completion_length": 8, "gradient_checkpointing": False}


def run_of(config: dict[str, Any], folder: Path = Path()) -> Run:
    return Run(OURS, str(folder / "m"), str(folder / "d"), (letter_reward,), config)


def delta(*values: float) -> dict[str, torch.Tensor]:
    return {"w": torch.tensor(values, dtype=torch.float64)}


def test_update_error_is_the_relative_distance_of_the_updates():
    assert update_error(delta(3.0, 4.0), delta(3.0, 4.5)) == pytest.approx(0.1)
    assert update_error(delta(3.0, 4.0), delta(3.0, 4.0)) == 0.0
    assert update_error(delta(0.0), delta(1.0)) == math.inf
    assert update_error({}, {}) == 0.0
    assert update_error(delta(1.0), {"other": torch.ones(1)}) == math.inf


@pytest.fixture
def trained(tmp_path):
    """Makes the result of a run of two steps, and its folder."""
    numbers = itertools.count()

    def run(
        *gradient: float, update: float = 1.0, tokens: str = "b", half: bool = False, steps: int = 2, **values: float
    ) -> RunResult:
        """The second step has this loss, and a completion of these tokens; the first step the other values."""
        folder, log, loss = tmp_path / f"run{next(numbers)}", RunLog(), values.pop("loss", 1.0)
        folder.mkdir()
        log.begin(folder, None, 0, {"trail": True, "settings": {"bf16": half}})
        rounds = {"count": 4, "rows": [5], "group": 4, "prompts": ["a"], "rewards": {}}
        for step, last in enumerate(("b", tokens)[:steps], 1):
            batch = {"rounds": [{**rounds, "completions": ["b", "b", "b", last]}], "chosen": None, "advantages": [0.5]}
            log.append({"line": "rollout", "step": step, **batch})
            first = {"grad_norm": 0.2, "entropy": 2.0, "sampling/ratio_max": 1.1, **values}
            log.step(step, first if step == 1 else {"loss": loss}, None)
        log.end(steps, {"ended": "finished"})
        return RunResult("a", str(folder), delta(update), gradients={"w": torch.tensor(gradient or (3.0, 4.0))})

    return run


def verdict(reference: RunResult, other: RunResult, trace: bool = False, **changes: Any) -> SplitResult:
    return compare(replace(run_of({"max_steps": 2}), trace=trace, **changes), Split(1), reference, other)


def test_the_gradient_error_is_that_of_the_first_gradient_and_of_its_norm(trained):
    reference = trained(3.0, 4.0)
    assert verdict(reference, reference).gradient_error == 0.0
    assert verdict(reference, trained(3.0, 4.5)).gradient_error == pytest.approx(0.1)
    assert verdict(reference, trained(3.0, 4.0, grad_norm=0.4)).gradient_error == pytest.approx(
        0.5
    )  # clipping hides it
    assert verdict(trained(0.0), trained(1e-9)).gradient_error == math.inf
    assert verdict(reference, replace(reference, gradients={})).gradient_error == math.inf


def test_a_run_without_a_gradient_has_learned_nothing(trained):
    reference = replace(trained(update=0.0), gradients={})
    found = verdict(reference, reference)
    assert (found.verdict, found.gradient_error) == ("nothing learned", 0.0)
    assert verdict(trained(), trained()).verdict != "nothing learned"


BEYOND = "{}: the exact difference is more than rounding ({})".format
CHANGED = "completions at step 2: generation 3 of row 5 has other tokens"
ROUGH = (3.0, 4.05)  # a gradient that half precision has rounded


@pytest.mark.parametrize(
    ("half", "gradient", "changes", "expected", "reason"),
    [
        (False, (), {"loss": 1.00005}, "same", ""),
        (False, (), {"update": 1.005}, "rounding", ""),  # the gradient agrees, and Adam enlarges rounding
        # the record says rounding, the exact changes do not
        (False, (), {"update": 1.02}, "differs", BEYOND("weights", 0.01)),
        (False, (), {"update": math.nan}, "differs", BEYOND("weights", 0.01)),
        (False, (3.0, 4.001), {}, "differs", BEYOND("gradient", "1e-05")),
        (False, (), {"grad_norm": 0.20001}, "differs", BEYOND("gradient", "1e-05")),
        # the exact changes agree, the records do not
        (False, (), {"loss": 1.005}, "differs", "values at step 2: loss is 1 and 1.005"),
        (False, (), {"entropy": 2.005}, "differs", "values at step 1: entropy is 2 and 2.005"),
        (False, (), {"tokens": "c"}, "differs", CHANGED),
        (False, (), {"grad_norm": math.nan}, "differs", "values at step 1: grad_norm is 0.2 and None"),
        (True, (), {}, "same", ""),
        (True, (), {"loss": 1.001}, "rounding", ""),
        (True, ROUGH, {"grad_norm": 0.2004, "update": 1.2}, "rounding", ""),
        (True, ROUGH, {"tokens": "c", "update": 1.2, "loss": 9.0}, "rounding", CHANGED),  # later steps are other ones
        (True, ROUGH, {"tokens": "c", "update": 1.6}, "rounding", CHANGED),  # from there it is another run
        (True, ROUGH, {"tokens": "c", "update": math.nan}, "differs", BEYOND("weights", "inf")),
        (True, ROUGH, {"sampling/ratio_max": 1.3}, "rounding", ""),  # of sampler and trainer: rounding itself
        (True, ROUGH, {"grad_norm": 0.202}, "differs", "values at step 1: grad_norm is 0.2 and 0.202"),
        (True, ROUGH, {"entropy": 2.02}, "differs", "values at step 1: entropy is 2 and 2.02"),
        (True, ROUGH, {"loss": 1.1}, "differs", "values at step 2: loss is 1 and 1.1"),
        (True, ROUGH, {"update": 1.6}, "differs", BEYOND("weights", 0.5)),
        (True, (3.0, 4.6), {}, "differs", BEYOND("gradient", 0.1)),
    ],
)
def test_verdicts(trained, half, gradient, changes, expected, reason):
    reference = trained(half=half)
    assert verdict(reference, reference).verdict == "reference"
    result = verdict(reference, trained(*gradient, half=half, **changes))
    assert (result.verdict, result.reason) == (expected, reason)


def test_the_largest_difference_of_a_logged_value_is_reported(trained):
    reference = trained()
    assert verdict(reference, trained(loss=1.00005)).metric_error == pytest.approx(5e-5, rel=1e-3)
    assert verdict(reference, trained(loss=2.0, entropy=2.0001)).metric_error == pytest.approx(0.5)
    assert verdict(reference, trained(loss=2.0, tokens="c")).metric_error == 0.0


def test_stock_trl_is_told_that_its_first_rollout_differs(trained):
    one = trained(num_tokens=40)
    assert verdict(one, trained(num_tokens=40, entropy=3.0), trainer=STOCK).reason.startswith("values at step 1")
    assert verdict(one, trained(num_tokens=41), trainer=STOCK).reason.startswith("the first rollout differs")


def test_a_run_that_learned_nothing_is_not_ok(trained):
    still = trained(update=0.0)
    report = CheckReport([verdict(still, still)], steps=1)
    assert report.conclusion() == "Nothing was learned, so there is nothing to compare."
    assert not report.ok


def test_bits_are_compared_by_hashes_and_the_first_difference_is_named(trained):
    trace = [{"parameter/a": "1", "optimizer/a/exp_avg": "2"}, {"parameter/a": "3", "optimizer/a/exp_avg": "4"}]
    other = [trace[0], {"parameter/a": "3", "optimizer/a/exp_avg": "5"}]
    one = replace(trained(), trace=trace)

    def reason(trace, **changes):
        result = verdict(one, replace(trained(**changes), trace=trace), trace=True)
        assert result.verdict == ("differs" if result.reason else "same bits")
        return result.reason

    assert reason(trace) == ""
    assert reason(other) == "the state of the optimizer differs"
    for tensors in (trace, other):  # rounding too
        assert reason(tensors, loss=1.0 + 1e-12) == "values at step 2: loss is 1 and 1.000000000001"
    assert reason(trace, loss=1.0 + 1e-12, entropy=3.0) == "values at step 1: entropy is 2 and 3"


@pytest.fixture
def status(monkeypatch):
    """The exit status of the command for two splits with these results."""

    def command(*results: RunResult) -> Any:
        monkeypatch.setattr(splits, "train", lambda jobs, processes: results)
        monkeypatch.setattr(splits, "load_run", lambda *args: (run_of(SIZES), ""))
        monkeypatch.setattr(sys, "argv", ["grpo-ext", "check", "--processes", "1", "--steps", "2"])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code

    return command


def test_the_exit_status_tells_a_difference_from_a_run_that_was_not_compared(status, trained):
    assert not status(trained(), trained())
    assert status(trained(), trained(update=1.02)) == 1
    assert status(trained(), trained(loss=1.005)) == 1
    assert status(trained(), RunResult("b", error="GrpoExtError: no")) == 2
    assert status(trained(update=0.0), trained(update=0.0)) == 2


def test_a_run_whose_record_lacks_steps_is_not_compared(status, tmp_path, trained):
    short, damaged, lost = trained(steps=1), trained(), trained()
    record = Path(damaged.folder) / STEPS
    record.write_bytes(record.read_bytes().replace(b'"loss": 1.0', b'"loss": 1.1'))
    (Path(lost.folder) / STEPS).unlink()
    messages = ("the records have 1 of 2 steps", "is not as it was written", f"it has no {STEPS}")
    kinds = (LaunchError, ConfigError, ConfigError)
    for other, kind, message in zip((short, damaged, lost), kinds, messages, strict=True):
        assert status(trained(), other) == 2
        with pytest.raises(kind, match=message):
            check(run_of(SIZES), [Split(8), Split(4)], tmp_path, steps=2)


def test_the_record_of_stock_trl_says_nothing_of_rollouts_and_its_steps_are_compared(tmp_path):
    args = SimpleNamespace(output_dir=str(tmp_path), bf16=True, fp16=False)
    state = SimpleNamespace(global_step=1, log_history=[{"step": 1, "loss": 0.5}, {"step": 1, "train_loss": 0.5}])
    _write_record(SimpleNamespace(args=args, state=state, model=torch.nn.Linear(1, 1)))
    run = read_run(tmp_path)
    assert "trail" not in run.record.starts[0]
    assert compare_runs(run, run).text == "The runs have the same bits."
    assert run.record.steps[1]["values"]["loss"] == 0.5


def saved(folder: Path, config: dict[str, Any], model: Any = None) -> Run:
    (model or tiny_model()).save_pretrained(folder / "m")
    tiny_tokenizer().save_pretrained(folder / "m")
    prompts().save_to_disk(str(folder / "d"))
    return run_of(config, folder)


@pytest.fixture
def fork_launches(monkeypatch):
    """The launches of `check` come from the tests' server."""
    monkeypatch.setattr(splits, "train", train_forked)


@pytest.mark.parametrize(
    ("settings", "options", "verdicts"),
    [
        # whole groups; sizes that cut them; with stock TRL too below, where it scores on a CPU
        pytest.param({}, [], ["reference", "same", "rounding"], marks=[pytest.mark.full] if STOCK_SCORES else []),
        pytest.param(
            *({"float32_weight_gradients": False}, [], ["reference", "rounding", "rounding"]), marks=pytest.mark.full
        ),
        pytest.param(  # stock TRL divides every micro-batch by its own tokens
            {"loss_type": "bnpo", "max_completion_length": 32},
            ["--against", "trl"],
            ["reference", "same", "rounding", "reference", "differs", "refused"],
            marks=stock_scores,
        ),
    ],
)
def test_the_command_tells_rounding_from_a_fault_in_bfloat16(
    fork_launches, monkeypatch, tmp_path, settings, options, verdicts
):
    sizes = {"global_batch_size": 16, "num_generations": 4, "rollout_chunk_size": 8}
    config = {**TRAINED, **sizes, "learning_rate": 1e-3, "adam_epsilon": 1e-4, "bf16": True, **settings}
    run = saved(tmp_path, config)
    monkeypatch.setattr("grpo_ext.tools.check.splits.load_run", lambda *args: (run, ""))
    command = ["check", "--processes", "1", "--micro-batch-sizes", "16,4,3", "--json", str(tmp_path / "json"), *options]
    done = CliRunner().invoke(app, command)
    report = json.loads((tmp_path / "json").read_text())
    assert [result["verdict"] for result in report["results"]] == verdicts, done.output
    assert done.exit_code == 0
    errors = [result["gradient_error"] for result in report["results"]]
    assert errors[2] > 1e-3
    assert (errors[1] < 1e-6) is (verdicts[1] == "same")


def test_three_splits_by_default_one_of_them_on_two_processes():
    assert splits_of(32, (1, 2)) == [Split(32), Split(5), Split(8, 2)]
    assert splits_of(32, (1, 2, 3, 4)) == [Split(32), Split(5), Split(8, 2), Split(5, 3), Split(4, 4)]
    assert splits_of(6, (2,)) == [Split(6, 2), Split(4, 2)]
    assert splits_of(1, (1, 2)) == [Split(1), Split(1, 2)]
    assert splits_of(8, (1, 2), (8, 3, 8)) == [Split(8), Split(3), Split(8, 2), Split(3, 2)]


def test_each_number_of_processes_is_checked_with_the_sizes_that_divide_it():
    found = [Split(8), Split(8, 2), Split(8, 2, 2), Split(8, 4), Split(8, 4, 2)]
    assert splits_of(8, (1, 2, 4), (8,), (1, 2)) == found
    assert [str(split) for split in found[1:3]] == ["2 x 8", "2 x 8, each over 2"]
    assert splits_of(32, (1, 2), None, (2,)) == [Split(8, 2, 2)]
    with pytest.raises(ConfigError, match="sequence_parallel=3 divides none of processes=1,2"):
        splits_of(8, (1, 2), None, (1, 3))


def test_stock_trl_trains_only_splits_that_share_no_forward(monkeypatch, tmp_path, trained):
    launched: list[tuple[str, int]] = []

    def train(jobs, processes):
        launched.extend((job.trainer, job.config["sequence_parallel_size"]) for job in jobs)
        return [trained() for _ in jobs]

    monkeypatch.setattr(splits, "train", train)
    check(run_of(SIZES), [Split(4, 2), Split(4, 2, 2)], tmp_path, steps=2, against=STOCK)
    assert launched == [(OURS, 1), (OURS, 2), (STOCK, 1)]


@pytest.mark.full
def test_processes_that_share_their_forwards_learn_the_same(fork_launches, monkeypatch, tmp_path):
    config = {**TRAINED, "learning_rate": 1e-3, "adam_epsilon": 1e-4, "rollout_chunk_size": 4}
    run = saved(tmp_path, config)
    monkeypatch.setattr("grpo_ext.tools.check.splits.load_run", lambda *args: (run, ""))
    command = ["check", "--processes", "2", "--micro-batch-sizes", "4", "--sequence-parallel", "1,2", "--steps", "2"]
    done = CliRunner().invoke(app, command)
    assert "grpo_ext, 2 x 4: reference\ngrpo_ext, 2 x 4, each over 2: same (" in done.output
    assert done.exit_code == 0


class Hangs:
    """Never unpickled: the processes of a launch hang before their first run."""

    name, model_path = "hangs", "none"

    def __reduce__(self) -> Any:
        return time.sleep, (100,)


def test_no_process_is_left_of_a_launch_that_takes_too_long():
    started: list[Any] = []

    def start(*parts: Any) -> Any:
        started.append(runs.launched(*parts))
        return started[-1]

    with pytest.raises(LaunchError, match=r"1 run on 2 processes: one took more than 0.5 s"):
        list(runs.train([Hangs()], 2, timeout_s=0.5, start=start))
    assert [process.returncode for process in started] == [-9, -9]


@pytest.mark.full
@pytest.mark.skipif(not serves({**os.environ, **SERVED}), reason="launches are not forked here")
@pytest.mark.parametrize("processes", [1, 2])
def test_a_forked_run_has_the_bits_of_a_launched_one(tmp_path, processes):
    bench = Bench(tmp_path)
    ours = [bench.run(name, 5, trace=True, max_steps=2) for name in ("kl", "moe")]
    for one, other in zip(run_all(ours, processes), run_all(ours, processes, start=runs.launched), strict=True):
        assert one.error is None
        assert one.trace == other.trace
        assert one.log[0]["reward"] == other.log[0]["reward"]
        assert all(torch.equal(one.delta[name], other.delta[name]) for name in other.delta)


def test_wrong_sizes_and_names_are_refused_before_anything_starts():
    with pytest.raises(ConfigError, match="against='verl' is unknown"):
        check(run_of(SIZES), [Split(8)], Path(), against="verl")
    with pytest.raises(ConfigError, match="global_batch_size=15"):
        check(run_of({**SIZES, "global_batch_size": 15}), [Split(8), Split(3)], Path())
    with pytest.raises(ConfigError, match="1 x 8 alone has nothing to be compared with"):
        check(run_of(SIZES), [Split(8)], Path())


def test_dropout_makes_a_split_differ_and_is_blamed(fork_launches, tmp_path):
    # the negative control of the comparison: noise drawn per micro-batch
    config = {**TRAINED, "learning_rate": 1e-3, "allow_split_dependent": True}
    noisy = saved(tmp_path, config, tiny_model("gpt2", attn_pdrop=0.2))
    report = check(noisy, [Split(8), Split(4)], tmp_path / "runs", steps=2)
    assert [r.verdict for r in report.results] == ["reference", "differs"]
    assert not report.ok
    assert "allow_split_dependent" in str(report.results[1])
    assert report.results[1].gradient_error > 1e-2


@pytest.mark.full
@stock_scores
def test_stock_trl_is_not_compared_with_dropout(fork_launches, tmp_path):
    dropping = saved(tmp_path / "gpt2", TRAINED, tiny_model("gpt2", resid_pdrop=0.2))
    adapted = replace(saved(tmp_path / "lora", TRAINED), peft=LoraConfig(lora_dropout=0.05, task_type="CAUSAL_LM"))
    for run, part in ((dropping, r"resid_dropout \(Dropout\): p=0.2"), (adapted, r"lora_dropout.default .*p=0.05")):
        report = check(run, [Split(8)], Path(run.model_path).with_name("runs"), steps=1, against="trl")
        assert re.search(f"draws dropout for each batch.*{part}", str(report))
    off = replace(dropping, config={**dropping.config, "disable_dropout": True})
    assert "draws dropout" not in str(check(off, [Split(8)], tmp_path / "off", steps=1, against="trl"))


class _Later:
    """Adds one to every reward from its fourth call on: in the second run of a process."""

    __name__ = "later"
    calls = 0

    def __call__(self, prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        self.calls += 1
        return [reward + (self.calls > 3) for reward in letter_reward(prompts, completions)]


@pytest.mark.parametrize("bitwise", [False, pytest.param(True, marks=pytest.mark.full)])
def test_the_first_stage_of_trained_runs_is_named(fork_launches, tmp_path, bitwise):
    run = replace(saved(tmp_path, {**TRAINED, "learning_rate": 1e-3}), rewards=(_Later(),))
    report = check(run, [Split(8), Split(4)], tmp_path / "runs", steps=3, bitwise=bitwise)
    assert [r.verdict for r in report.results] == ["reference", "differs"]
    assert report.results[1].reason.startswith("rewards at step 1: later gave "), str(report.results[1])
