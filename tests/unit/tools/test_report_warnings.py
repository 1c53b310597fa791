"""What warns: each rule says what is wrong and where, and a run a little better than that is left alone."""

import pytest

from grpo_ext.tools.report import report
from grpo_ext.tools.warning_signs import warnings_of
from tests.support.pages import Page, line, make_run

DRIFT = "sampling/logp_difference"
# what warns, and what does not quite: values of a run's log lines, by name
CASES = {
    "All rewards are alike in every group, the last 5 times": (
        {"frac_reward_zero_std": [0.5, 1, 1, 1, 1, 1]},
        {"frac_reward_zero_std": [1, 1, 1, 1, 1, 1, 0.99]},
    ),
    "All rewards are alike in every group, the last 3 times": (
        {"frac_reward_zero_std": [1, 1, 1]},
        {"frac_reward_zero_std": [1, 1], "grad_norm": [0, 0, 0]},
    ),
    "70% of the completions are cut at the length limit": (
        {"completions/clipped_ratio": [0, 0, 0, 0.2, 0.7, 0.7, 0.8, 0.4]},
        {"completions/clipped_ratio": [0.9, 0.9, 0.9, 0.5, 0.4, 0.5, 0.4, 0.9]},
    ),
    "The entropy fell from 0.5 to 0.04 nats": (
        {"entropy": [0.5, 0.5, 0.5, 0.4, 0.6, 0.05, 0.04, 0.03, 0.05, 0.03]},
        {"entropy": [0.5, 0.5, 0.5, 0.4, 0.6, 0.05, 0.06, 0.06, 0.05, 0.06]},
    ),
    "Sampler and trainer differ by 0.2 nats a token, at first by 0.2": (
        {DRIFT: [0.2, 0.2, 0.2]},
        {DRIFT: [0.02, 0.02, 0.05]},
    ),
    "Sampler and trainer differ by 0.04 nats a token, at first by 0.01": (
        {DRIFT: [0.01] * 5 + [0.04] * 5},
        {DRIFT: [1e-7] * 5 + [0.009] * 5},
    ),
    "by 0.01 nats a token in its first 64 tokens, by 0.04 in the deepest": (
        {f"{DRIFT}/below_64": [0.01] * 3, f"{DRIFT}/below_512": [0.01] * 3, f"{DRIFT}/beyond": [0.04] * 3},
        {f"{DRIFT}/below_64": [1e-7] * 3, f"{DRIFT}/below_512": [0.009] * 3},
    ),
    "The gradient norm was 30 at step 4; its median is 2. `grpo-ext rerun runs/a --step 4` shows": (
        {"grad_norm": [2, 0, 2, 30, 0, 2, 0, 0, 0]},
        {"grad_norm": [2, 0, 2, 20, 0, 2, 0, 0, 0]},
    ),
}


def series_of(values):
    return {name: ([*range(1, len(each) + 1)], each) for name, each in values.items()}


@pytest.mark.parametrize("sentence", CASES)
def test_a_rule_warns_of_what_it_is_about_alone(sentence):
    bad, good = CASES[sentence]
    (warning,) = warnings_of(series_of(bad), "runs/a")
    assert sentence in warning
    assert warnings_of(series_of(good), "runs/a") == []


def test_beside_a_teacher_equal_rewards_teach():
    alike = {"frac_reward_zero_std": [1, 1, 1]}
    assert warnings_of(series_of(alike | {"teacher_kl": [0.2, 0.1, 0.1]}), "runs/a") == []


def test_a_run_that_learns_is_left_alone():
    demo = {
        "frac_reward_zero_std": [0.41, 0.26, 0.2, 0.31, 0.35, 0.58, 0.66, 0.73, 0.8, 0.82, 0.84, 0.79, 0.88, 0.84],
        "completions/clipped_ratio": [0.0] * 14,
        "entropy": [0.26, 0.25, 0.26, 0.24, 0.17, 0.13, 0.1, 0.08, 0.06, 0.05, 0.07, 0.04, 0.05, 0.05],
        "grad_norm": [0.76, 0.93, 1.26, 1.1, 1.14, 0.52, 0.86, 0.33, 0.18, 0.95, 0.37, 0.15, 0.4, 0.31],
        DRIFT: [1.5e-7, 1.3e-7] * 7,
        f"{DRIFT}/below_64": [1.5e-7, 1.3e-7] * 7,
    }
    assert warnings_of(series_of(demo), "runs/demo") == []


def test_the_page_shows_what_warns(tmp_path):
    values = CASES["70% of the completions are cut at the length limit"][0]["completions/clipped_ratio"]
    lines = [line(step, **{"completions/clipped_ratio": value}) for step, value in enumerate(values, start=1)]
    assert "What warns 70% of the completions are cut" in Page(report(make_run(tmp_path / "bad", lines))).text
    assert "What warns Nothing." in Page(report(make_run(tmp_path / "good", lines[:4]))).text
