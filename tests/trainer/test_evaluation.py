"""pass@k of an evaluation: of the whole set, under the set's name, whatever the split and whatever training does."""

import functools
import logging
from typing import Any

import pytest

from grpo_ext.errors import ConfigError
from tests.support.tiny import prompts
from tests.support.trainers import make, ran

FOUR = {"num_generations_eval": 4}


def solved(prompts, completions, **kwargs):
    """1 where a letter of the prompt comes back, else 0."""
    return [float(any(letter in prompt for letter in text[:3])) for prompt, text in zip(prompts, completions)]


def graded(prompts, completions, **kwargs):
    return [0.1 * len(text) for text in completions]


def passes(metrics):
    return {name: value for name, value in metrics.items() if "@" in name}


def test_pass_at_k_is_that_of_the_rewards_of_the_whole_set(tmp_path):
    seen = []

    def recorded(prompts, completions, **kwargs):
        rewards = solved(prompts, completions)
        seen.extend(rewards)
        return rewards

    trainer = make(tmp_path, reward=recorded, rollout_chunk_size=4, **FOUR)
    found = passes(trainer.evaluate(prompts(9, seed=1)))
    groups = [seen[i : i + 4] for i in range(0, 36, 4)]
    assert len(seen) == 36
    assert list(found) == ["eval_mean@4", "eval_pass@1", "eval_pass@2", "eval_pass@3", "eval_pass@4"]
    assert found["eval_pass@4"] == pytest.approx(sum(map(any, groups)) / 9)
    assert found["eval_pass@1"] == found["eval_mean@4"] == pytest.approx(sum(seen) / 36)
    assert 0 < found["eval_pass@1"] < found["eval_pass@2"] < found["eval_pass@4"] < 1
    assert passes(trainer.state.log_history[-1]) == found


@pytest.mark.full
def test_every_set_has_its_name_and_a_prediction_its_prefix(tmp_path):
    trainer = make(tmp_path, reward=solved, **FOUR)
    one, two = prompts(9, seed=1), prompts(6, seed=2)
    alone = passes(trainer.evaluate(one))
    predicted = trainer.predict(two).metrics
    again = trainer.evaluate(one)
    both = passes(trainer.evaluate({"one": one, "two": two}))
    assert passes(again) == alone  # and no mean with the prediction, which logs nothing
    assert again["eval_reward"] == pytest.approx(alone["eval_mean@4"])
    assert passes(predicted) == {name.replace("eval_two", "test"): v for name, v in both.items() if "two" in name}
    assert {name.replace("eval_one", "eval"): v for name, v in both.items() if "one" in name} == alone
    assert len(both) == 10
    assert both["eval_one_pass@1"] != both["eval_two_pass@1"]


def test_rewards_that_are_not_0_or_1_have_a_mean_alone_and_that_is_said_once(tmp_path, caplog):
    trainer = make(tmp_path, reward=graded, **FOUR)
    with caplog.at_level(logging.WARNING, logger="grpo_ext"):
        for _ in range(2):
            assert list(passes(trainer.evaluate(prompts(4)))) == ["eval_mean@4"]
    assert sum("no pass@k" in record.getMessage() for record in caplog.records) == 1
    caplog.clear()
    with_threshold = make(tmp_path, reward=graded, eval_pass_threshold=1.0, **FOUR).evaluate(prompts(4))
    assert "eval_pass@4" in with_threshold
    make(tmp_path, reward=graded).evaluate(prompts(4))  # nobody asked for samples of an evaluation
    assert "no pass@k" not in caplog.text


@pytest.mark.full
def test_of_several_rewards_the_weighted_sum_counts_or_the_one_that_is_named(tmp_path):
    data = prompts(9, seed=1)
    alone = passes(make(tmp_path, reward=solved, **FOUR).evaluate(data))
    both = {"reward": [graded, solved], "reward_weights": [0.0, 1.0], **FOUR}
    assert passes(make(tmp_path, **both).evaluate(data)) == alone
    both["reward_weights"] = [1.0, 0.5]
    summed = passes(make(tmp_path, **both).evaluate(data))
    assert list(summed) == ["eval_mean@4"]
    assert passes(make(tmp_path, eval_pass_reward="solved", **both).evaluate(data)) == alone


@pytest.mark.parametrize(
    "twin",
    [graded, pytest.param(functools.partial(graded), marks=pytest.mark.full)],
    ids=["function", "partial"],
)
def test_one_of_two_rewards_with_one_name_is_chosen_once_it_is_renamed(tmp_path, twin, monkeypatch):
    monkeypatch.setattr(graded, "__name__", "solved")
    with pytest.raises(ConfigError, match=r"eval_pass_reward='solved' is the name of 2 .* a name of its own") as raised:
        make(tmp_path, reward=[twin, solved], eval_pass_reward="solved", **FOUR)
    assert "did you mean" not in str(raised.value)

    def really_solved(*args, **kwargs):  # the remedy
        return solved(*args, **kwargs)

    data = prompts(9, seed=1)
    alone = passes(make(tmp_path, reward=solved, **FOUR).evaluate(data))
    both = make(tmp_path, reward=[twin, really_solved], eval_pass_reward="really_solved", **FOUR)
    assert passes(both.evaluate(data)) == alone


def test_an_evaluation_in_between_changes_no_completion_of_training(tmp_path):
    def trained(**settings):
        seen = []

        def recorded(prompts, completions, trainer_state, **kwargs):
            seen.append((trainer_state.global_step, tuple(prompts), tuple(completions)))
            return solved(prompts, completions)

        make(tmp_path, reward=recorded, eval_dataset=data, max_steps=2, **settings).train()
        return [(step, asked, said) for step, asked, said in seen if not set(asked) <= set(data["prompt"])]

    data = prompts(5, seed=1)
    left_alone = trained()
    assert len(left_alone) >= 3
    assert trained(eval_strategy="steps", eval_steps=1, eval_on_start=True, **FOUR) == left_alone
    assert trained(seed=4) != left_alone


@pytest.mark.parametrize("settings", [{"rollout_lag": 1}, {"dynamic_sampling": True}], ids=str)
@pytest.mark.full
def test_evaluation_is_of_the_model_as_it_is(tmp_path, settings):
    """Also where training samples with older weights, or replaces groups."""
    settings |= {"eval_strategy": "steps", "eval_steps": 1, "learning_rate": 1e-2, **FOUR}
    trainer = ran(make(tmp_path, reward=solved, eval_dataset=prompts(9, seed=1), **settings))
    logged = [passes(line) for line in trainer.state.log_history if "eval_pass@1" in line]
    assert logged[-1] == passes(trainer.evaluate())
    assert len(logged) == 3
    assert logged[0] != logged[1] != logged[2]  # of other weights


EACH_STEP: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, **FOUR}


def test_rewards_of_training_do_not_take_pass_at_k_from_an_evaluation(tmp_path):
    data = prompts(4, seed=1)

    def partly(prompts, completions, **kwargs):
        held_out = set(prompts) <= set(data["prompt"])
        return [reward * (1.0 if held_out else 0.5) for reward in solved(prompts, completions)]

    trainer = ran(make(tmp_path, reward=partly, eval_dataset=data, max_steps=2, **EACH_STEP))
    assert sum("eval_pass@4" in line for line in trainer.state.log_history) == 2
    assert list(passes(trainer.evaluate(prompts(5, seed=2)))) == ["eval_mean@4"]  # the control


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"metric_for_best_model": "eval_pass@1"}, "only with eval_pass_threshold"),
        ({"metric_for_best_model": "one_pass@2"}, "only with eval_pass_threshold"),
        ({"metric_for_best_model": "eval_pass@8", "eval_pass_threshold": 1.0}, r"is logged for k in \[1, 2, 3, 4\] "),
        ({"metric_for_best_model": "mean@8"}, r"mean@k is logged for k in \[4\] "),
    ],
    ids=str,
)
def test_a_best_metric_that_may_not_be_logged_is_refused_before_training(tmp_path, settings, why):
    with pytest.raises(ConfigError, match=f"metric_for_best_model='.*' may be missing .*{why}"):
        make(tmp_path, **settings, **FOUR)
