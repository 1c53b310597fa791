"""Rewards by name: what counts as the final number, and what is said when a name cannot be resolved."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_ext.errors import ConfigError, DataError
from grpo_ext.rewards.registry import exact_number, final_number, resolve_rewards

GOLD = "She sold 48/2 = <<48/2=24>>24 clips.\n#### 1,234"


@pytest.mark.parametrize(
    "completion",
    [
        "#### 1234",
        "#### $1,234.00\n\nThat took 3 steps.",
        "The answer is 1234.",
        r"so \boxed{1{,}234}, in 2 steps",
        [{"role": "assistant", "content": "it is $1234"}],
        [{"role": "assistant", "content": [{"type": "text", "text": "it is 1234"}]}],
    ],
)
def test_the_right_number_scores_one_in_every_spelling(completion):
    assert exact_number([completion], answer=[GOLD]) == [1.0]


@pytest.mark.parametrize(
    "completion", ["#### 1235", "-1234", "1234 or 5", r"1234, so \boxed{12}", "", "no number", "1,234.5", "12345", []]
)
def test_wrong_number_scores_zero(completion):
    assert exact_number([completion], answer=[GOLD]) == [0.0]


def test_missing_gold_column_is_refused_with_the_remedy():
    with pytest.raises(DataError, match=r"'answer' nor 'solution'.*answer_column"):
        exact_number(["7"], question=["?"])


@given(st.integers(-(10**9), 10**9), st.sampled_from(["{}", "{:,}", "#### {:,}", "\\boxed{{{}}}.", "It is {:,}."]))
def test_every_integer_is_read_back_from_every_format(value, form):
    assert final_number(form.format(value)) == value


def test_rewards_of_length_know_the_budget():
    penalty, overlong = resolve_rewards(["length_penalty", "soft_overlong"], max_completion_length=10)
    assert penalty(completion_ids=[[], [1] * 5, [1] * 10, [1] * 20]) == [0.0, -0.5, -1.0, -1.0]
    assert overlong(completions=[""] * 3, completion_ids=[[1] * 8, [1] * 9, [1] * 10]) == [0.0, -0.5, -1.0]


def test_math_reward_takes_plain_completions_and_the_gold_from_answer():
    pytest.importorskip("math_verify")
    (accuracy,) = resolve_rewards(["accuracy"])
    assert accuracy(completions=[r"so \boxed{42}", r"so \boxed{41}"], answer=["42", 42], prompts=["", ""]) == [1.0, 0.0]


def test_own_rewards_load_from_a_file_and_from_a_module(tmp_path, monkeypatch):
    (tmp_path / "mine_for_test.py").write_text("def half(completions, **_):\n    return [0.5] * len(completions)\n")
    monkeypatch.chdir(tmp_path)
    for name in (f"{tmp_path}/mine_for_test.py:", "mine_for_test."):
        (reward,) = resolve_rewards([f"{name}half"])
        assert reward(completions=["a", "b"]) == [0.5, 0.5]
        with pytest.raises(ConfigError, match=r"third.*it defines half"):
            resolve_rewards([f"{name}third"])


@pytest.mark.parametrize(
    ("names", "budget", "message"),
    [
        ([], None, "needs at least one"),
        (["exactnumber"], None, r"no reward 'exactnumber'; use one of accuracy, .*exact_number"),
        (["no/such/file.py:f"], None, r"cannot be loaded .*No such file .*no/such/file.py"),
        (["no_such_package.f"], None, r"cannot be loaded .*no_such_package"),
        (["length_penalty"], None, r"max_completion_length=None"),
        (["soft_overlong"], 0, r"max_completion_length=0"),
    ],
)
def test_errors_name_the_reward_and_the_known_ones(names, budget, message):
    with pytest.raises(ConfigError, match=message):
        resolve_rewards(names, budget)


def test_a_run_with_a_teacher_may_have_none():
    assert resolve_rewards(["none"]) == []
    with pytest.raises(ConfigError, match="no reward 'none'"):
        resolve_rewards(["none", "exact_number"])


def test_a_plugin_adds_a_short_name(tmp_path, monkeypatch):
    # an installed distribution that offers two reward functions, one by a name that is taken
    info = tmp_path / "plug-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plug\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[grpo_ext.rewards]\nhalf_marks = plug:half\nexact_number = plug:half\n")
    (tmp_path / "plug.py").write_text("def half(completions, **_):\n    return [0.5] * len(completions)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (reward,) = resolve_rewards(["half_marks"])
    assert reward(completions=["a", "b"]) == [0.5, 0.5]
    with pytest.raises(ConfigError, match=r"no reward 'half'; use one of accuracy, .*half_marks"):
        resolve_rewards(["half"])
