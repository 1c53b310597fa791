"""The console: what its lines say, how they fit, and that the bar and TRL's table stand whole beside each other."""

from __future__ import annotations

import io
import os
import re
import sys
from types import SimpleNamespace

import pytest
from tqdm.auto import tqdm

from grpo_ext.tools.console import Console
from tests.support.tiny import prompts
from tests.support.trainers import make

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


_TOKEN = re.compile(r"\x1b\[(\??[\d;]*)([A-Za-z])|(\r)|(\n)|([^\x1b\r\n]+)")


class Terminal(io.StringIO):
    """A terminal of 80 columns, in place of standard output and standard error until the test ends."""

    def __init__(self, monkeypatch) -> None:
        super().__init__()
        monkeypatch.setenv("COLUMNS", "80")
        monkeypatch.setattr(os, "get_terminal_size", lambda *fd: os.terminal_size((80, 24)))
        monkeypatch.setattr(sys, "stdout", self)
        monkeypatch.setattr(sys, "stderr", self)

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return 1

    def screen(self) -> list[str]:
        """The lines that stand on it at the end; no line may be wider than it."""
        lines, row, column = [""], 0, 0
        for number, letter, back, feed, text in _TOKEN.findall(self.getvalue()):
            if letter == "A":
                row = max(row - int(number or 1), 0)
            elif back:
                column = 0
            elif feed:
                row, column = row + 1, 0
                lines += [""] * (row + 1 - len(lines))
            elif text:
                old = lines[row].ljust(column)
                lines[row] = old[:column] + text + old[column + len(text) :]
                column += len(text)
                assert column <= 80, f"a terminal of 80 columns would wrap {lines[row]!r}"
        return [line.rstrip() for line in lines]


def watched(main: bool = True, **console):
    """(console, the loop's state after step 12, a way to call an event, which returns the loop's control)."""
    callback = Console(**console)
    state = SimpleNamespace(is_world_process_zero=main, global_step=12, max_steps=150)

    def event(name, **kwargs):
        control = SimpleNamespace(should_log=False)
        getattr(callback, f"on_{name}")(SimpleNamespace(log_completions=True), state, control, **kwargs)
        return control

    return callback, state, event


def test_a_file_gets_the_whole_line_and_no_bar(capsys):
    _, state, event = watched()
    event("train_begin")
    state.global_step = 13
    event("step_begin")
    event("step_end")
    event("prediction_step", eval_dataloader=[1])
    event("log", logs=LOGS)
    event("train_end")
    assert capsys.readouterr() == (WHOLE.replace("12/", "13/") + "\n", "")


def test_a_narrow_terminal_gets_a_cropped_line_above_a_bar_that_begins_where_the_run_resumes(monkeypatch):
    terminal, (_, state, event) = Terminal(monkeypatch), watched()
    event("train_begin")
    assert "| 12/150 [" in terminal.screen()[0]
    event("log", logs=LOGS)
    assert terminal.screen()[1] == "", "TRL prints its table next"
    event("step_begin")
    assert "| 12/150 [" in terminal.screen()[1]
    state.global_step = 13
    event("step_end")
    event("train_end")
    line, bar, _ = terminal.screen()
    assert line == WHOLE[:79] + "…"
    assert re.fullmatch(r"  9%\|.+\| 13/150 \[.+step/s, reward 0\.62\]", bar)


def test_measured_steps_are_logged_and_they_and_the_last_one_have_a_line(capsys):
    console, state, event = watched(measure=lambda model: {"held out": model}, every=6)
    event("train_begin")
    for step, model in ((12, 0.875), (13, 1.0), (150, 0.5)):
        state.global_step = step
        assert event("step_end", model=model).should_log == (step % 6 == 0)
        event("log", logs={"reward": 0.25})
    state.global_step = state.max_steps = 151
    event("log", logs={"reward": 0.75})
    assert capsys.readouterr().out == (
        "step   12/150  held out 0.88  reward  0.25\nstep  150/150  held out 0.50  reward  0.25\n"
        "step  151/151  reward  0.75\n"
    )
    assert console.measured == {12: {"held out": 0.875}, 150: {"held out": 0.5}}


@pytest.mark.parametrize("makes_room", [True, False])
def test_the_bars_make_room_for_trls_table_which_would_be_torn_otherwise(tmp_path, monkeypatch, makes_room):
    settings = {"log_completions": True, "num_completions_to_print": 1, "eval_strategy": "steps", "eval_steps": 2}
    trainer = Console().install(make(tmp_path, eval_dataset=prompts(4, seed=1), **settings, max_steps=2))
    terminal = Terminal(monkeypatch)
    if not makes_room:
        monkeypatch.setattr(tqdm, "clear", lambda self, nolock=False: None)
        trainer.train()
        with pytest.raises(AssertionError, match="a terminal of 80 columns would wrap"):
            terminal.screen()
        return
    trainer.train()
    shown = terminal.screen()
    lines = [line for line in shown if re.match(r"(step|eval) +\d/2  ", line)]
    assert [line[:9] for line in lines] == ["step    1", "step    2", "eval    2"]
    assert sum(line.startswith("╭─") and line.endswith("─╮") for line in shown) == 4  # TRL prints the last one twice
    assert [line[:5] for line in shown if re.search(r"/s[\],]", line)] == ["100%|"], "bars, or what is left of them"
