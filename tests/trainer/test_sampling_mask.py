"""`sampling_mask="replay"`: what is trained is the distribution that was sampled."""

from typing import Any

import pytest
import torch

from grpo_ext import GRPOTrainer
from grpo_ext.errors import ConfigError
from tests.support.tiny import tiny_model
from tests.support.tool_runs import always_calling
from tests.support.trainers import OtherMask, change, error, first_line, make, passing_on
from tests.tolerances import DIFFERENT, METRIC, UPDATE

REPLAY = {"sampling_mask": "replay"}


FILTERS = [
    {"top_p": 0.6, "pad_to_multiple_of": 8},
    {"top_k": 5},
    {"min_p": 0.3},
    pytest.param({"generation_kwargs": {"typical_p": 0.5}}, marks=pytest.mark.full),
    {"generation_kwargs": {"epsilon_cutoff": 0.02}},
    pytest.param({"generation_kwargs": {"eta_cutoff": 0.05}}, marks=pytest.mark.full),
    {"generation_kwargs": {"top_h": 0.5}},
    {"generation_kwargs": {"suppress_tokens": [5, 9], "min_new_tokens": 4}},
    {"generation_kwargs": {"suppress_tokens": [5, 9], "min_new_tokens": 4}, "top_p": 0.9, "temperature": 0.7},
]


@pytest.mark.parametrize("settings", FILTERS, ids=str)
def test_the_ratio_of_training_to_sampling_is_one_for_every_filter(tmp_path, settings):
    replayed, plain = (first_line(tmp_path / name, **settings, **extra) for name, extra in (("r", REPLAY), ("p", {})))
    assert replayed["sampling/logp_difference"] < METRIC
    assert plain["sampling/logp_difference"] > 100 * METRIC  # the control
    if settings != FILTERS[7]:  # suppression alone truncates nothing
        assert 0.05 < plain["sampling/kept_mass"] < 0.99


def test_the_difference_is_logged_by_depth(tmp_path):
    short, long = (first_line(tmp_path / str(n), max_completion_length=n) for n in (12, 70))
    name = "sampling/logp_difference"
    assert short[f"{name}/below_64"] == short[name]
    assert f"{name}/below_512" not in short
    parts = sorted((long[f"{name}/below_64"], long[name], long[f"{name}/below_512"]))
    assert 0 < parts[0] < parts[1] == long[name] < parts[2]


def test_without_a_filter_nothing_is_recorded_and_nothing_changes(tmp_path):
    log = first_line(tmp_path / "log")
    assert log["sampling/logp_difference"] < METRIC
    assert "sampling/kept_mass" not in log
    assert torch.equal(change(make(tmp_path / "plain")), change(make(tmp_path / "replay", **REPLAY)))


def test_a_run_without_replay_says_once_what_its_filters_leave_out(tmp_path, caplog):
    for name, settings in (("plain", {"top_p": 0.6}), ("replay", {"top_p": 0.6, **REPLAY}), ("all", {})):
        caplog.clear()
        make(tmp_path / name, max_steps=2, **settings).train()
        assert caplog.text.count("top_p=0.6: sampling kept 0.6") == (name == "plain")


def test_masks_go_through_every_form(tmp_path):
    settings = {"top_p": 0.6, "beta": 0.1, "num_iterations": 2}
    packed = change(make(tmp_path / "packed", **settings, forward="packed", **REPLAY))
    for form in ("padded", "prefix"):
        split = change(make(tmp_path / form, **settings, forward=form, per_device_train_batch_size=3, **REPLAY))
        assert error(packed, split) < UPDATE
    assert error(packed, change(make(tmp_path / "plain", **settings))) > DIFFERENT


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"cls": passing_on("_generate_single_turn")}, "_generate_single_turn"),
        ({"cls": passing_on("_get_per_token_logps_and_entropies")}, "_get_per_token_logps_and_entropies"),
        ({"repetition_penalty": 1.1}, "repetition_penalty=1.1"),
        ({"generation_kwargs": {"no_repeat_ngram_size": 1}}, "no_repeat_ngram_size=1"),
        ({"generation_kwargs": {"forced_eos_token_id": 1}}, "forced_eos_token_id=1"),
        ({"generation_kwargs": {"temperature": 0.5}}, "temperature=0.5 in generation_kwargs .training divides by"),
        ({"generation_kwargs": {"num_beams": 2}}, "num_beams=2"),
    ],
)
def test_what_cannot_be_replayed_is_refused_before_training(tmp_path, changes, names):
    with pytest.raises(ConfigError, match=f"sampling_mask='replay'.*{names}"):
        make(tmp_path, top_p=0.9, **changes, **REPLAY)


def pairs_rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Two tokens, drawn from the two or three that are kept; a third token of a tool."""
    rows = range(len(prompts))
    kept = [[[5 + row % 3, 9], [4, 6, 7], []] for row in rows]
    return {
        "prompt_ids": [trainer.processing_class(prompt)["input_ids"] for prompt in prompts],
        "completion_ids": [[9, 6 + row % 2, 20] for row in rows],
        "env_mask": [[1, 1, 0] for _ in rows],
        "logprobs": None,
        "kept_ids": kept,
    }


def test_a_rollout_func_returns_the_ids_that_were_kept(tmp_path):
    shares = {"rollout_func": pairs_rollout, **REPLAY}
    reference = change(make(tmp_path / "one", **shares))
    assert error(reference, change(make(tmp_path / "other", per_device_train_batch_size=3, **shares))) < UPDATE
    assert error(reference, change(make(tmp_path / "plain", rollout_func=pairs_rollout))) > DIFFERENT


def test_tools_answer_between_replayed_tokens(tmp_path):
    replayed, plain = (
        first_line(tmp_path / name, tiny_model(max_position_embeddings=4096), **always_calling(), top_p=0.8, **extra)
        for name, extra in (("replay", REPLAY), ("plain", {}))
    )
    assert replayed["tools/call_frequency"] > 0
    assert replayed["sampling/logp_difference"] < METRIC < plain["sampling/logp_difference"]


def test_of_tokens_with_equal_scores_those_are_sampled_that_are_recorded(tmp_path):
    model = tiny_model(tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight[1::2] = model.lm_head.weight[::2][: len(model.lm_head.weight[1::2])]
    log = first_line(tmp_path, model, top_k=5, **REPLAY)  # of three pairs: transformers keeps six
    assert log["sampling/logp_difference"] < METRIC


class OwnCat(GRPOTrainer):
    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        ids, mask = (torch.cat([inputs[f"{p}_{n}"] for p in ("prompt", "completion")], dim=1) for n in ("ids", "mask"))
        logps, _, _ = self._get_per_token_logps_and_entropies(model, ids, mask, inputs["completion_ids"].size(1))
        return -logps.mean()


@pytest.mark.parametrize("cls", [OtherMask, OwnCat])
def test_tokens_whose_masks_are_not_known_end_the_run(tmp_path, cls):
    trainer = make(tmp_path / "replay", cls=cls, top_p=0.6, **REPLAY)
    with pytest.raises(ConfigError, match=r"sampling_mask='replay': .* no record of these"):
        trainer.train()
    make(tmp_path / "plain", cls=cls, top_p=0.6, max_steps=1).train()


def test_one_token_that_is_kept_is_a_filter_too(tmp_path):
    log = first_line(tmp_path, top_k=1, skip_zero_contribution=False, **REPLAY)
    assert log["sampling/logp_difference"] < METRIC
    assert log["entropy"] == 0.0
    assert log["frac_reward_zero_std"] == 1.0  # the completions of a prompt are alike


def test_an_end_token_that_generate_knows_alone_ends_the_record(tmp_path):
    log = first_line(tmp_path, generation_kwargs={"eos_token_id": [1, 20]})
    assert log["completions/mean_length"] > 1
