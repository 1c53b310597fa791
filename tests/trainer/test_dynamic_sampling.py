"""Dynamic sampling in the trainer: the batch stays full, every sampled completion is counted, the order is a function
of (seed, epoch, rollout)."""

import collections
from typing import Any

import pytest
import torch

from grpo_ext.errors import ConfigError
from tests.support import trainers
from tests.support.tiny import prompts

GROUP, PROMPTS_PER_STEP = 4, 4


class Recorder:
    """A reward that only some prompts can earn, and a record of what it was asked for."""

    __name__ = "recorder"

    def __init__(self, share: int = 3) -> None:
        self.share, self.calls = share, []

    def __call__(self, prompts: list[str], completions: list[str], number: list[int], **kwargs: Any) -> list[float]:
        self.calls.append(list(number))
        # groups of the other prompts have no variance
        return [float(i % GROUP) if n % self.share == 0 else 0.5 for i, n in enumerate(number)]


def trained(folder, reward: Any, count: int = 24, **changes: Any) -> tuple[Any, list[Any]]:
    # a chunk holds a whole round, so that a round is one call of the reward
    settings = {"dynamic_sampling": True, "rollout_chunk_size": 32, "max_steps": 3, "logging_steps": 1, **changes}
    rows = prompts(count).add_column("number", list(range(count)))
    trainer = trainers.make(folder, reward=reward, train_dataset=rows, **settings)
    rollouts = trainers.batches_of(trainer)
    trainer.train()
    return trainer, rollouts


def lines_of(trainer: Any) -> list[dict[str, float]]:
    return [line for line in trainer.state.log_history if "reward" in line]


def test_the_batch_is_filled_with_groups_that_teach_and_everything_that_is_sampled_is_counted(tmp_path):
    reward = Recorder()
    trainer, rollouts = trained(tmp_path, reward)
    for rollout in rollouts:
        assert len(rollout) == GROUP * PROMPTS_PER_STEP
        advantages = rollout["advantages"].view(-1, GROUP)
        assert (advantages.abs().amax(1) > 0.1).all()
    _, without = trained(tmp_path, Recorder(), dynamic_sampling=False)
    groups = torch.cat([rollout["advantages"] for rollout in without]).view(-1, GROUP)
    assert (groups == 0).all(1).any()
    lines = lines_of(trainer)
    assert sum(len(call) for call in reward.calls) == GROUP * sum(x["dynamic_sampling/sampled_groups"] for x in lines)
    assert len(reward.calls) == sum(1 + x["dynamic_sampling/rounds"] for x in lines)
    calls = iter(reward.calls)
    for line in lines:
        assert line["dynamic_sampling/groups_without_variance"] == 0
        assert line["dynamic_sampling/replaced_groups"] > 0
        numbers = [n for _ in range(1 + int(line["dynamic_sampling/rounds"])) for n in next(calls)]
        good = [number for number in numbers if number % 3 == 0]
        mean = (len(good) * (GROUP - 1) / 2 + (len(numbers) - len(good)) * 0.5) / len(numbers)
        assert line["reward"] == pytest.approx(mean)
        assert line["frac_reward_zero_std"] == pytest.approx(1 - len(good) / len(numbers))
        # a round samples what is missing: no group that teaches is thrown away
        assert len(good) // GROUP == PROMPTS_PER_STEP
        assert max(collections.Counter(numbers).values()) == GROUP  # each prompt once in a rollout batch


def test_rounds_are_limited_and_free_places_keep_their_group(tmp_path):
    trainer, rollouts = trained(tmp_path, Recorder(share=24), dynamic_sampling_max_rounds=2, max_steps=1)
    line = lines_of(trainer)[0]
    assert line["dynamic_sampling/rounds"] == 2
    assert line["dynamic_sampling/groups_without_variance"] >= PROMPTS_PER_STEP - 1
    assert len(rollouts[0]) == GROUP * PROMPTS_PER_STEP


def test_with_groups_that_all_teach_nothing_changes(tmp_path):
    plain, _ = trained(tmp_path / "plain", Recorder(share=1), dynamic_sampling=False, max_steps=2)
    dynamic, _ = trained(tmp_path / "dynamic", Recorder(share=1), max_steps=2)
    assert torch.equal(trainers.parameters(plain), trainers.parameters(dynamic))
    names = [name for name in lines_of(plain)[0] if not name.startswith(("time/", "step_time", "layout/"))]
    for one, two in zip(lines_of(plain), lines_of(dynamic)):
        assert {n: one[n] for n in names} == pytest.approx({n: two[n] for n in names}, nan_ok=True)


def test_a_subclass_whose_advantages_would_be_lost_is_refused(tmp_path):
    subclass = trainers.passing_on("_generate_and_score_completions")
    trainers.make(tmp_path, cls=subclass, dynamic_sampling=True)
    with pytest.raises(ConfigError, match="would be lost; use an estimator"):
        trainers.make(tmp_path, cls=subclass, dynamic_sampling=True, scale_rewards="batch")


def test_a_data_set_without_further_prompts_ends_the_rounds(tmp_path):
    trainer, _ = trained(tmp_path, Recorder(share=100), count=6, max_steps=1)
    line = lines_of(trainer)[0]
    assert line["dynamic_sampling/sampled_groups"] == 6
    assert line["dynamic_sampling/rounds"] == 1
