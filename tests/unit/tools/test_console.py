"""The console: what it says, how it fits, that nothing tears the bar, and that it is quiet where it should be.
Two runs are real, on a pseudo terminal and into a pipe; the others call the events themselves."""

from __future__ import annotations

import io
import logging
import re
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console as RichConsole
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.trainer_callback import CallbackHandler

from grpo_ext.runtime.quiet import quiet_libraries
from grpo_ext.tools.console import Console
from tests.support import forks
from tests.support.terminal import screen

ROOT = Path(__file__).parents[3]
LOGS = {
    "loss": 0.1,
    "grad_norm": 0.5312,
    "reward": 0.625,
    "reward_std": 0.41,
    "completions/mean_length": 45.2,
    "completions/clipped_ratio": 0.03125,
    "entropy": 0.71,
    "frac_reward_zero_std": 0.25,
    "kl": 0.0123,
    "clip_ratio/region_mean": 0.012,
    "step_time": 1.234,
    "layout/useful_tokens_per_second": 4100.4,
}
WHOLE = (
    "step   12/150  reward  0.62 +- 0.41  length   45  truncated  3%  entropy 0.71  no variance 25%  kl 0.012  "
    "clipped 1.2%  grad 0.53  s/step 1.23  tokens/s 4,100"
)


def on_stream(width: int | None = None, main: bool = True, samples: bool = False, **console):
    """(console, its stream, state, a way to call an event): a terminal of `width` columns, or a file."""
    stream = io.StringIO()
    out = RichConsole(file=stream, force_terminal=width is not None, width=width or 80, _environ={"TERM": "xterm"})
    watched = Console(out=out, **console)
    state = SimpleNamespace(is_world_process_zero=main, global_step=12, max_steps=150)
    args, control = SimpleNamespace(log_completions=samples), SimpleNamespace(should_log=True)

    def event(name, **kwargs):
        getattr(watched, f"on_{name}")(args, state, control, **kwargs)

    return watched, stream, state, event


# ---- Lines ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [None, 80])
def test_a_file_gets_the_whole_line_and_a_narrow_terminal_a_cropped_one(width):
    _, stream, _, event = on_stream(width)
    event("train_begin")
    event("log", logs=dict(LOGS))
    event("train_end")
    if width is None:
        assert stream.getvalue() == WHOLE + "\n"  # no control characters
        return
    shown = screen(stream.getvalue().replace("\n", "\r\n"), width)
    assert [text for text in shown if text.startswith("step")] == [WHOLE[:79] + "…"]
    assert sum(text.startswith("GRPO") for text in shown) == 1


def test_what_is_not_logged_is_not_shown():
    _, stream, _, event = on_stream()
    event("log", logs={"reward": None, "entropy": 0.5, "grad_norm": float("nan")})
    event("log", logs={"train_runtime": 3.0})
    assert stream.getvalue() == "step   12/150  entropy 0.50  grad nan\n"


def test_an_evaluation_says_pass_at_1_and_at_the_last_k_of_every_set():
    _, stream, _, event = on_stream()
    event("log", logs={"eval_reward": 0.5, "eval_pass@1": 0.5, "eval_pass@4": 0.75, "eval_pass@8": 0.875})
    event("log", logs={"eval_math_pass@1": 0.25, "eval_math_pass@2": 0.5, "eval_math_mean@2": 0.25})
    assert stream.getvalue() == (
        "eval   12/150  pass@1 0.50  pass@8 0.88  reward  0.50\neval   12/150  math_pass@1 0.25  math_pass@2 0.50\n"
    )


def test_own_figures_stand_first_in_the_line_of_their_step_which_is_logged():
    watched, stream, state, event = on_stream(60, measure=lambda model: {"held out": model}, every=6)
    event("train_begin")
    control = SimpleNamespace(should_log=False)
    watched.on_step_end(None, state, control, model=0.875)
    assert control.should_log
    event("log", logs=dict(LOGS))
    state.global_step, control.should_log = 13, False
    watched.on_step_end(None, state, control, model=1.0)
    assert not control.should_log
    event("log", logs=dict(LOGS))
    event("train_end")
    lines = [text for text in screen(stream.getvalue().replace("\n", "\r\n"), 60) if text.startswith("step")]
    assert lines == ["step   12/150  held out 0.88  reward  0.62 +- 0.41  length …"]
    assert watched.measured == {12: {"held out": 0.875}}


def test_the_last_step_has_a_line_whether_it_is_measured_or_not():
    _, stream, state, event = on_stream(measure=lambda model: {"held out": model}, every=100)
    event("log", logs={"reward": 0.5})
    assert stream.getvalue() == ""
    state.global_step = state.max_steps
    event("log", logs={"reward": 0.75})
    assert stream.getvalue() == "step  150/150  reward  0.75\n"


def test_only_the_main_process_speaks_and_measures():
    measured = []
    _, stream, _, event = on_stream(100, main=False, measure=measured.append, every=1)
    for name in ("train_begin", "step_begin", "step_end", "train_end"):
        event(name)
    event("log", logs=dict(LOGS))
    assert stream.getvalue() == ""
    assert measured == []


# ---- Beside others --------------------------------------------------------------------------------------------------


class FakeTrainer:
    def __init__(self) -> None:
        noisy = [ProgressCallback(), PrinterCallback(), TrainerCallback()]
        self.callback_handler = CallbackHandler(noisy, None, None, None, None)
        self.add_callback = self.callback_handler.add_callback
        self.remove_callback = self.callback_handler.remove_callback


def test_install_takes_the_place_of_the_other_progress_callbacks():
    trainer, watched = FakeTrainer(), Console()
    assert watched.install(trainer) is trainer
    assert [type(c) for c in trainer.callback_handler.callbacks] == [TrainerCallback, Console]


def test_the_terminal_is_given_back_when_training_ends_with_an_error():
    watched, stream, _, event = on_stream(100)
    watched.install(FakeTrainer())
    before = sys.stdout, sys.stderr
    event("train_begin")
    assert sys.stdout is not before[0]
    watched.on_run_end()  # GRPOTrainer.train calls it, also after an error
    assert (sys.stdout, sys.stderr) == before
    assert stream.getvalue().rindex("\x1b[?25h") > stream.getvalue().rindex("\x1b[?25l")


@pytest.mark.parametrize("samples", [True, False])
def test_the_bar_makes_room_for_a_table_that_is_written_past_it_and_would_be_torn_otherwise(samples):
    _, stream, _, event = on_stream(100, samples=samples)
    event("train_begin")
    event("log", logs=dict(LOGS))
    stream.write("a row of a table\n")
    event("step_begin")
    event("train_end")
    written = stream.getvalue().replace("\n", "\r\n")
    if samples:
        shown = screen(written, 100)
        assert "a row of a table" in shown
        assert sum("GRPO" in line for line in shown) == 1
    else:
        with pytest.raises(AssertionError, match=r"would wrap 'GRPO .*a row of a table'"):
            screen(written, 100)


def test_quiet_libraries_leaves_the_warnings_of_this_project():
    names = ("trl", "datasets", "accelerate", "peft", "torch.distributed", "huggingface_hub")
    levels = {name: logging.getLogger(name).level for name in names}
    try:
        with warnings.catch_warnings(record=True) as seen:
            quiet_libraries()
            warnings.warn_explicit("theirs", UserWarning, "trl.py", 1, module="trl.trainer")
            warnings.warn_explicit("ours", UserWarning, "window.py", 1, module="grpo_ext.step.loss")
        assert [str(warning.message) for warning in seen] == ["ours"]
        assert logging.getLogger("grpo_ext.trainer").isEnabledFor(logging.WARNING)
        assert not logging.getLogger("trl").isEnabledFor(logging.WARNING)
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


# ---- Real runs ------------------------------------------------------------------------------------------------------


def test_a_pipe_gets_plain_lines_also_where_colour_is_forced():
    done = forks.python("-m", "tests.unit.tools.console_run", FORCE_COLOR="1")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "/3  reward" in line]
    assert [line[:9] for line in lines] == ["step    1", "step    2", "eval    2", "step    3", "eval    3"]
    assert all(re.fullmatch(r"[\x20-\x7e]+", line) for line in lines), lines
    assert "GRPO " not in done.stdout
    assert "a warning of the project" in done.stderr
