"""The comparison itself: it tells same from different, and never passes on nothing."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch

from grpo_ext.errors import ConfigError, LaunchError
from grpo_ext.step.optimizer_step import Attempt
from grpo_ext.step.statistics import CONTEXT_KEY, loss_mask
from grpo_ext.tools.check import runs, splits
from grpo_ext.tools.check.comparison import compare, gradient_error, metric_difference, update_error
from grpo_ext.tools.check.report import CheckReport, Split, SplitResult
from grpo_ext.tools.check.runs import Run, RunResult
from grpo_ext.tools.check.splits import check, splits_of
from grpo_ext.tools.stock import OURS, STOCK
from tests.support import forks
from tests.support.float64 import float64_throughout
from tests.support.launches import run_all
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


def with_gradient(*values: float, norm: float = 1.0, loss: float = 1.0, update: float = 1.0, **log: float) -> RunResult:
    """A run of two steps; its first log line has this norm, its second one this loss."""
    lines = [{"grad_norm": norm, **log}, {"loss": loss}]
    return RunResult("a", delta(update), lines, gradients={"w": torch.tensor(values)})


def test_the_gradient_error_is_that_of_the_first_gradient_and_of_its_norm():
    reference = with_gradient(3.0, 4.0)
    assert gradient_error(reference, reference) == 0.0
    assert gradient_error(reference, with_gradient(3.0, 4.5)) == pytest.approx(0.1)
    assert gradient_error(reference, with_gradient(3.0, 4.0, norm=2.0)) == pytest.approx(1.0)  # clipping hides it
    assert gradient_error(with_gradient(0.0), with_gradient(1e-9)) == math.inf
    assert gradient_error(reference, RunResult("b", log=[{"grad_norm": 1.0}])) == math.inf


def test_a_value_that_is_no_number_in_one_log_alone_is_a_difference():
    nan = float("nan")
    assert metric_difference([{"kl": nan}], [{"kl": nan}]) == (0.0, "")
    for a, b in ((nan, 1.0), (1.0, nan)):
        assert metric_difference([{"kl": a}], [{"kl": b}]) == (float("inf"), "kl")


def test_metric_difference_finds_the_worst_value_and_leaves_timings_out():
    a = [{"loss": 1.0, "step_time": 1.0, "rewards/time_bonus/mean": 0.5, "train_runtime": 3.0}]
    b = [{"loss": 1.0, "step_time": 9.0, "rewards/time_bonus/mean": 0.7, "train_runtime": 4.0}]
    gap, name = metric_difference(a, b)
    assert name == "rewards/time_bonus/mean"
    assert gap == pytest.approx(0.2)
    assert metric_difference(a, a * 2)[0] == math.inf
    assert metric_difference([{"x": math.nan}], [{"x": math.nan}])[0] == 0.0
    assert metric_difference([{"x": 1.0}], [{}])[0] == math.inf


def verdict(reference: RunResult, other: RunResult, trace: bool = False, **changes: Any) -> SplitResult:
    run = replace(run_of({}, trace=trace, gradients=not trace), **changes)
    return compare(run, Split(1), reference, other)


@pytest.mark.parametrize(
    ("changes", "expected", "reason"),
    [
        ({}, "same", ""),
        ({"update": 1.0 + 1e-6, "loss": 1.0 + 1e-5}, "same", ""),
        ({"update": 1.005}, "rounding", ""),  # the gradient agrees, and Adam enlarges rounding
        ({"loss": 1.005}, "rounding", ""),  # of a later step
        ({"update": 1.02}, "differs", "largest difference 2.00e-02 (mean 2.00e-02) in w"),
        ({"loss": 1.02}, "differs", "only the log differs, most in loss"),
        ({"entropy": 2.005}, "differs", "only the log differs, most in entropy"),  # of the same weights
        ({"update": 1.005, "entropy": 2.005}, "differs", "largest difference"),
        ({"norm": 1.0001}, "differs", "the gradient differs, but the update hides it"),
        ({"update": 1.005, "norm": 1.0001}, "differs", "largest difference"),
        ({"update": 1.005, "norm": math.nan}, "differs", "largest difference"),
    ],
)
def test_verdicts(changes, expected, reason):
    reference = with_gradient(1.0, entropy=2.0)
    assert verdict(reference, reference).verdict == "reference"
    result = verdict(reference, with_gradient(1.0, **{"entropy": 2.0, **changes}))
    assert result.verdict == expected
    assert result.reason.startswith(reason)
    assert bool(result.reason) is bool(reason)


def test_a_split_that_ends_with_an_error_is_refused():
    result = verdict(with_gradient(1.0), RunResult("b", error="GrpoExtError: too small\nmore"))
    assert (result.verdict, result.reason) == ("refused", "too small")
    assert str(result) == "grpo_ext, 1 x 1: refused: too small"


def test_a_token_that_was_sampled_differently_is_named_with_its_step():
    one, other = with_gradient(1.0), with_gradient(1.0, update=1.5)
    one.log[1]["num_tokens"], other.log[1]["num_tokens"] = 40, 41
    assert (
        verdict(one, other).reason == "completions differ from step 2 on, by rounding or a fault; --steps 1 tells which"
    )
    one.log[0]["num_tokens"], other.log[0]["num_tokens"] = 40, 41
    assert verdict(one, other).reason.startswith("largest difference")
    assert verdict(one, other, trainer=STOCK).reason.startswith("the first rollout differs")


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


def test_check_bitwise_trains_under_several_splits(fork_launches, tmp_path):
    report = check(saved(tmp_path, TRAINED), [Split(8), Split(3)], steps=2, bitwise=True)
    assert [r.verdict for r in report.results] == ["reference", "same bits"]
    assert report.conclusion() == "Every split of grpo_ext learns the same, to the bit."


QUANTISED = object()  # stands for a BitsAndBytesConfig


@pytest.mark.parametrize(
    ("settings", "parts", "expected"),
    [
        ({}, {}, "differs"),
        ({"bf16": True}, {}, "rounding"),
        ({"fp16": True}, {}, "rounding"),
        ({}, {"quantization": QUANTISED}, "differs"),
        ({}, {"quantization": QUANTISED, "trainer": STOCK}, "rounding"),  # its adapters are bfloat16
    ],
)
def test_half_precision_has_wider_bounds(settings, parts, expected):
    one, other = with_gradient(1.0), with_gradient(1.01, norm=1.001, update=1.2)
    result = compare(run_of(settings, gradients=True, **parts), Split(3), one, other)
    assert result.verdict == expected
    assert CheckReport([result], 1).ok is (expected == "rounding" or result.trainer == STOCK)


@pytest.mark.parametrize(
    ("changes", "expected", "reason"),
    [
        ({"norm": 0.2004, "update": 1.2, "loss": 9.0}, "rounding", ""),  # other completions in later steps
        ({"sampling/ratio_max": 1.3}, "rounding", ""),  # of sampler and trainer: rounding itself
        ({"norm": 0.202}, "differs", "grad_norm differs by 1.0e-02 in the first log line, more than 16-bit rounding"),
        ({"entropy": 2.02}, "differs", "entropy differs by 1.0e-02 in the first log line"),
        ({"update": 1.6}, "differs", "largest difference"),
    ],
)
def test_verdicts_in_half_precision(changes, expected, reason):
    usual = {"norm": 0.2, "entropy": 2.0, "sampling/ratio_max": 1.1}
    one, other = with_gradient(3.0, 4.0, **usual), with_gradient(3.0, 4.05, **{**usual, **changes})
    result = verdict(one, other, config={"bf16": True})
    assert result.verdict == expected
    assert result.reason.startswith(reason)
    assert bool(result.reason) is bool(reason)
    far = verdict(one, with_gradient(3.0, 4.6, **usual), config={"bf16": True})
    assert (far.verdict, far.reason) == ("differs", "the gradient differs by more than 16-bit rounding (0.1)")


@contextlib.contextmanager
def mean_of_means(model: Any) -> Iterator[None]:
    """Inside, every micro-batch divides by its own tokens."""
    whole = Attempt.micro_batch

    def micro_batch(attempt: Attempt, part: Any) -> Any:
        inputs = whole(attempt, part)
        context = inputs[CONTEXT_KEY]
        counts = replace(context.step.counts, tokens=float(loss_mask(inputs).sum()) * len(attempt.plan))
        return {**inputs, CONTEXT_KEY: replace(context, step=replace(context.step, counts=counts))}

    with mock.patch.object(Attempt, "micro_batch", micro_batch):
        yield


@pytest.mark.parametrize(
    ("parts", "settings", "verdicts"),
    [
        ({}, {}, ["reference", "same", "rounding"]),  # whole groups; sizes that cut them
        ({}, {"float32_weight_gradients": False}, ["reference", "rounding", "rounding"]),
        ({"within": mean_of_means}, {"loss_type": "bnpo"}, ["reference", "differs", "differs"]),
    ],
)
def test_the_command_tells_rounding_from_a_fault_in_bfloat16(monkeypatch, tmp_path, parts, settings, verdicts):
    from typer.testing import CliRunner

    from grpo_ext.tools import cli

    monkeypatch.setattr(splits, "train", train_forked)
    sizes = {"global_batch_size": 16, "num_generations": 4, "rollout_chunk_size": 8}
    config = {**TRAINED, **sizes, "learning_rate": 1e-3, "adam_epsilon": 1e-4, "bf16": True, **settings}
    run = replace(saved(tmp_path, config), **parts)
    monkeypatch.setattr("grpo_ext.tools.check.task.load_run", lambda *args: (run, ""))
    command = ["check", "--processes", "1", "--micro-batch-sizes", "16,4,3", "--json", str(tmp_path / "json")]
    done = CliRunner().invoke(cli.app, command)
    report = json.loads((tmp_path / "json").read_text())
    assert [result["verdict"] for result in report["results"]] == verdicts, done.output
    assert done.exit_code == ("differs" in verdicts)
    errors = [result["gradient_error"] for result in report["results"]]
    assert errors[2] > 1e-3
    assert (errors[1] < 1e-6) is (verdicts[1] == "same")


def test_three_splits_by_default_one_of_them_on_two_processes():
    assert splits_of(32, (1, 2)) == [Split(32), Split(5), Split(8, 2)]
    assert splits_of(32, (1, 2, 3, 4)) == [Split(32), Split(5), Split(8, 2), Split(5, 3), Split(4, 4)]
    assert splits_of(6, (2,)) == [Split(6, 2), Split(4, 2)]
    assert splits_of(1, (1, 2)) == [Split(1), Split(1, 2)]
    assert splits_of(8, (1, 2), (8, 3)) == [Split(8), Split(3), Split(8, 2), Split(3, 2)]


class Hangs:
    """Never unpickled: the processes of a launch hang before their first run."""

    name, model_path = "hangs", "none"

    def __reduce__(self) -> Any:
        return time.sleep, (100,)


def workers_of(pid: int) -> list[psutil.Process]:
    return [p for p in psutil.Process(pid).children(recursive=True) if any(runs.WORKER in w for w in p.cmdline())]


def test_no_process_is_left_of_a_launch_that_takes_too_long():
    started: list[Any] = []

    def start(*parts: Any) -> Any:
        started.append(runs.launched(*parts))
        return started[-1]

    with pytest.raises(LaunchError, match=r"1 run\(s\) on 2 process\(es\): one took more than 0.5 s"):
        list(runs.train([Hangs()], 2, timeout_s=0.5, start=start))
    assert [process.returncode for process in started] == [-9, -9]


@pytest.mark.full
def test_the_processes_of_a_launch_end_with_their_caller(tmp_path):
    script, said = tmp_path / "script.py", tmp_path / "said"
    script.write_text("from tests.unit.tools.test_check import Hangs, runs; list(runs.train([Hangs()], 2))")
    caller = forks.start([str(script)], {**os.environ, **forks.SERVED}, tmp_path, said, said)
    until = time.monotonic() + 90
    while len(workers := workers_of(caller.pid)) < 2:
        assert time.monotonic() < until
        time.sleep(0.1)
    caller.kill()
    caller.join()
    assert psutil.wait_procs(workers, timeout=60)[1] == []


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


def test_a_repetition_in_float64_leaves_nothing_of_what_is_called_rounding(tmp_path):
    # a Llama computes its norms in float32 whatever its weights are: with those the update differs by 1e-5
    run = replace(saved(tmp_path, {**TRAINED, "max_steps": 3}, tiny_model("llama")), gradients=True)
    parts = [replace(run, name=str(n), config={**run.config, "per_device_train_batch_size": n}) for n in (8, 3)]
    exact = [replace(run, name=f"exact-{run.name}", within=float64_throughout) for run in parts]
    one, other, *results = run_all([*parts, *exact], 1)
    assert compare(run, Split(3), one, other, tolerance=1e-9).verdict == "rounding"
    assert update_error(*(result.delta for result in results)) < 1e-10 < update_error(one.delta, other.delta)


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
    assert "allow_split_dependent" in str(report.results[1])
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
