"""recipes/tools.py: a few steps of it, with calls and failures in the lines, the log and the report."""

import random
from pathlib import Path

import pytest

from grpo_ext.errors import ConfigError
from tests.support import forks
from tests.support.toy_recipe import load_recipe

RECIPE = Path(__file__).parents[2] / "recipes" / "tools.py"


@pytest.fixture(scope="module")
def recipe():
    return load_recipe("tools")


def test_the_template_renders_what_the_teacher_writes(recipe):
    tokenizer, call = recipe.tool_tokenizer(), {"name": "calculate", "arguments": {"expression": "37*48"}}
    messages = [
        {"role": "user", "content": "37*48"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "name": "calculate", "content": "1776"},
        {"role": "assistant", "content": "1776"},
    ]
    text = "37*48<eos><model><call>calculate(expression=37*48)<eos><answer>1776<eos><model>1776<eos>"
    assert tokenizer.apply_chat_template(messages, tokenize=False) == text
    ids, before = (tokenizer(part)["input_ids"] for part in (text[17:55], text[:17]))
    message = tokenizer.parse_response(ids, prefix=before)
    assert message["tool_calls"][0]["function"] == call
    rng = random.Random(0)
    written = ["".join(text for text, _ in recipe.worked_example(rng)) for _ in range(200)]
    assert not any(tokenizer.unk_token_id in tokenizer(text)["input_ids"] for text in written)
    assert any(example.endswith("<eos>") and "<answer>{'error'" in example for example in written)


def test_a_misspelt_option_is_refused_in_one_sentence(recipe):
    with pytest.raises(ConfigError, match=r"^--max_stepz is not an option; did you mean --max_steps"):
        recipe.main(["--max_stepz", "3"])
    with pytest.raises(ConfigError, match=r"^argument --max_steps\S*: invalid int value: 'x'; `--help` lists"):
        recipe.main(["--max_steps", "x"])


@pytest.mark.full
def test_it_trains_and_reports_calls(recipe, tmp_path):
    script = tmp_path / "tools.py"  # with a warm start of a few steps
    script.write_text(RECIPE.read_text().replace(f"STEPS, EXAMPLES = {recipe.STEPS}", "STEPS, EXAMPLES = 40"))
    assert script.read_text() != RECIPE.read_text()
    options = ["--max_steps", "2", "--logging_steps", "1", "--output_dir", str(tmp_path / "run")]
    done = forks.python(script, *options, cwd=tmp_path, timeout_s=300, GRPO_EXT_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "tool calls" in done.stdout
    assert "Report: " in done.stdout
    page = (tmp_path / "run" / "report" / "index.html").read_text()
    assert "tools/failure_frequency" in page
