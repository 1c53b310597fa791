"""The console shows a line for every logged step and evaluation, and TRL's table of completions stays whole."""

import re

from grpo_ext.tools.console import Console
from tests.support.tiny import prompts
from tests.support.trainers import make


def test_a_file_gets_whole_lines_and_no_bar(tmp_path, capsys, caplog):
    settings = {"log_completions": True, "num_completions_to_print": 1, "eval_strategy": "steps", "eval_steps": 2}
    trainer = Console().install(make(tmp_path, eval_dataset=prompts(4, seed=1), **settings, max_steps=2))
    assert Console().install(trainer) is trainer  # one takes the place of the other
    trainer.train()
    shown = capsys.readouterr().out.splitlines()
    lines = [line for line in shown if re.match(r"(step|eval) +\d/2  ", line)]
    assert [line[:9] for line in lines] == ["step    1", "step    2", "eval    2"]
    assert re.search(r"reward +-?\d+\.\d\d \+- \d+\.\d\d  length +\d+ .*entropy \d\.\d\d .*tokens/s", lines[0])
    assert lines[0].endswith(" left")
    assert lines[1].endswith("elapsed, 00:00 left")
    assert caplog.text.count(f"Each log shows 1 of the completions; all are in {tmp_path}/completions.") == 1
    assert sum(line.startswith("╭─") and line.endswith("─╮") for line in shown) == 4  # TRL prints the last one twice
    assert not [line for line in shown if re.search(r"/s[\],]", line)], "a bar"
