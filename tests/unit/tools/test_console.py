"""The console: what its lines say, how they fit, and that the bar and TRL's table stand whole beside each other."""

from __future__ import annotations

import io
import os
import re
import sys

import pytest
from tqdm.auto import tqdm

from grpo_ext.tools.console import Console
from tests.support.tiny import prompts
from tests.support.trainers import make

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
