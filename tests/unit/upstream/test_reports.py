"""The scripts of the second part of docs/upstream.md still print what they say: else a repair is superfluous."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny import tiny_model, tiny_tokenizer

PAGE = (Path(__file__).parents[3] / "docs" / "upstream.md").read_text().partition("\n# Repairs\n")[2]
SCRIPTS = re.findall(r"## ([^\n]+)\n(?:(?!\n## |```).)*```python\n(.*?)```\n\n```text\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def models(tmp_path, monkeypatch):
    """Tiny models under the names of the hub's."""
    monkeypatch.chdir(tmp_path)
    for kind, name in {"qwen2": "Qwen2ForCausalLM-2.5", "qwen3_moe": "Qwen3MoeForCausalLM"}.items():
        tiny_model(kind).save_pretrained(f"trl-internal-testing/tiny-{name}")
        tiny_tokenizer().save_pretrained(f"trl-internal-testing/tiny-{name}")


@pytest.mark.full  # about the pinned versions: beside newer ones a repair that is superfluous does no harm
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("code", "output"), [pytest.param(*rest, id=title) for title, *rest in SCRIPTS])
def test_the_fault_is_still_there(code: str, output: str, models: None, capsys: Any) -> None:
    exec(code, {})
    printed = iter(capsys.readouterr().out.splitlines())
    assert [line for line in output.splitlines() if line not in printed] == []  # in this order, among the trainer's


def test_every_file_has_a_report_and_every_script_an_output():
    files = {path.name for path in (Path(__file__).parents[3] / "grpo_ext" / "upstream").glob("[a-z]*.py")}
    assert files == set(re.findall(r"`(\w+\.py)`", PAGE))
    assert len(SCRIPTS) == PAGE.count("```python") == PAGE.count("```text")
