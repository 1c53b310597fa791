"""`routing_replay`: a token goes to the experts that it was sampled with, in every later forward."""

from typing import Any

import pytest
import torch

from grpo_ext.errors import CheckpointError, ConfigError, ModelError
from grpo_ext.forward.routing import LIVE
from grpo_ext.rollouts.batch import EXPERTS
from grpo_ext.rollouts.transcript import Transcript, share_prompt_experts
from tests.support.float64 import float64_throughout
from tests.support.tiny import given_rollout, tiny_model
from tests.support.tool_runs import always_calling
from tests.support.trainers import (
    OtherMask,
    change,
    error,
    make,
    other,
    parameters,
    passing_on,
    ran,
    train_and_keep_first,
)
from tests.tolerances import DIFFERENT, METRIC, UPDATE

REPLAY = {"routing_replay": True}
LOGPS, SCORE = "_get_per_token_logps_and_entropies", "_generate_and_score_completions"
# the weights have moved a lot when a rollout batch is trained on for the second time
REUSED = {"num_iterations": 2, "learning_rate": 1e-2, "max_steps": 4}


def moe(**settings: Any) -> Any:
    return tiny_model("moe", **settings)


def logs(folder: Any, **settings: Any) -> list[dict[str, Any]]:
    trainer = ran(make(folder, moe(), **settings))
    return trainer.state.log_history[:-1]


def experts_of(folder: Any, **settings: Any) -> list[torch.Tensor]:
    """The recorded experts of each completion of the first step, (prompt + completion, C)."""
    trainer = make(folder, moe(), max_steps=1, **REPLAY, **settings)
    return list(train_and_keep_first(trainer)[EXPERTS])


def test_where_no_choice_changes_the_update_is_the_same(tmp_path):
    with float64_throughout(moe().double()) as model:
        states = {name: value.clone() for name, value in model.state_dict().items()}
        changes = []
        for replay in (True, False):
            model.load_state_dict(states)
            trainer = make(tmp_path / str(replay), model, routing_replay=replay, max_steps=1)
            changes.append(change(trainer))
            assert trainer.state.log_history[0].get("routing/changed_share", 0.0) == 0.0
    assert torch.equal(*changes)


def test_choices_that_training_changes_are_replayed(tmp_path):
    replayed, live = (logs(tmp_path / str(replay), routing_replay=replay, **REUSED) for replay in (True, False))
    shares = [entry["routing/changed_share"] for entry in replayed]
    assert shares[0] == shares[2] == 0.0  # sampled with these weights
    assert replayed[0]["sampling/logp_difference"] < METRIC
    assert min(shares[1], shares[3]) > 0.01
    assert replayed[0]["loss"] == live[0]["loss"]
    assert abs(replayed[1]["loss"] - live[1]["loss"]) > DIFFERENT


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> list[torch.Tensor]:
    """The experts of a run that scores what it has sampled."""
    return experts_of(tmp_path_factory.mktemp("recorded"), forward="prefix", beta=0.1)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"compact_rollouts": False},
        {"generation_kwargs": {"use_cache": False}},
        {"pad_to_multiple_of": 8},
        {"rollout_chunk_size": 4},
        {"forward": "padded"},
        {"mask_truncated_completions": True},
        {"rollout_lag": 1},
    ],
    ids=str,
)
def test_experts_are_recorded_however_completions_are_sampled(tmp_path, recorded, settings):
    rows = experts_of(tmp_path, **settings)
    for row_NC, expected_NC in zip(rows, recorded, strict=True):
        if settings != {"mask_truncated_completions": True}:  # of which one token is kept
            assert torch.equal(row_NC, expected_NC)
            assert bool((row_NC[-1] == LIVE).all())
        assert bool((row_NC[:-1] != LIVE).all())


def test_a_group_shares_the_experts_of_its_prompt_and_no_other_group_has_them():
    transcripts = [Transcript({}, key=0, place=n, prompt_ids=[5, 6]) for n in range(4)]
    for number, transcript in enumerate(transcripts):
        transcript.experts_NC = torch.full((3, 2), number)
    share_prompt_experts(transcripts, num_generations=2)
    assert [t.experts_NC[:, 0].tolist() for t in transcripts] == [[0, 0, 0], [0, 0, 1], [2, 2, 2], [2, 2, 3]]


def test_experts_are_recorded_with_the_log_probabilities_where_another_one_samples(tmp_path, recorded):
    rows = experts_of(tmp_path / "override", cls=passing_on("_generate_single_turn"))
    for row_NC, expected_NC in zip(rows, recorded, strict=True):
        assert torch.equal(row_NC[:-1], expected_NC[:-1])
    shares = [
        e["routing/changed_share"] for e in logs(tmp_path / "func", rollout_func=given_rollout, **REPLAY, **REUSED)
    ]
    assert shares[0] == 0.0 < shares[1]


def test_tokens_of_tools_have_the_experts_of_the_next_turn(tmp_path):
    settings = always_calling()
    trainer = make(tmp_path, moe(max_position_embeddings=4096), **settings, **REPLAY)
    batch = train_and_keep_first(trainer)
    assert trainer.state.log_history[0]["tools/call_frequency"] > 0
    assert trainer.state.log_history[0]["routing/changed_share"] == 0.0
    for row_NC, prompt, mask in zip(batch[EXPERTS], batch["prompt_ids"], batch["tool_mask"]):
        assert len(row_NC) == len(prompt) + len(mask)
        ended = int(mask.nonzero().max()) if mask.any() else 0  # the last token that the model wrote
        assert bool((row_NC[: len(prompt) + ended] != LIVE).all())
        if len(mask) < settings["max_completion_length"]:  # else a turn was cut, and its last token had run
            assert bool((row_NC[len(prompt) + ended :] == LIVE).all())


def test_the_split_and_the_form_change_nothing(tmp_path):
    settings = {**REUSED, **REPLAY, "beta": 0.1}
    one = change(make(tmp_path / "packed", moe(), forward="packed", **settings))
    for form in ("padded", "prefix"):  # of packs the matrix shows it
        split = change(make(tmp_path / form, moe(), forward=form, per_device_train_batch_size=3, **settings))
        assert error(one, split) < UPDATE
    live = change(make(tmp_path / "live", moe(), **{**settings, "routing_replay": False}))
    assert error(one, live) > DIFFERENT


def test_a_run_that_resumes_inside_a_rollout_batch_replays_its_experts(tmp_path):
    whole = ran(other(tmp_path / "whole", model=moe(), **REUSED, **REPLAY))
    resumed = ran(other(tmp_path / "resumed", model=moe(), **REUSED, **REPLAY), tmp_path / "whole" / "checkpoint-1")
    assert torch.equal(parameters(whole), parameters(resumed))
    shares = [log["routing/changed_share"] for log in resumed.state.log_history[:-1]]
    assert shares == [log["routing/changed_share"] for log in whole.state.log_history[:-1]]
    assert shares[1] > 0
    with pytest.raises(CheckpointError, match="routing_replay"):
        other(tmp_path / "live", model=moe(), **REUSED).train(str(tmp_path / "whole" / "checkpoint-1"))


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"cls": passing_on(LOGPS)}, LOGPS),
        ({"cls": passing_on(SCORE)}, SCORE),
        ({"torch_compile": True}, "torch_compile"),
        ({"generation_kwargs": {"prefill_chunk_size": 4}}, "prefill_chunk_size"),
        ({"model": "qwen2"}, "Qwen2ForCausalLM has no routed experts"),
    ],
)
def test_what_cannot_be_replayed_is_refused_before_training(tmp_path, changes, names):
    with pytest.raises((ConfigError, ModelError), match=f"routing_replay=True.*{names}"):
        make(tmp_path, **{"model": moe(), **changes}, **REPLAY)


def test_tokens_whose_experts_are_not_known_end_the_run(tmp_path):
    with pytest.raises(ConfigError, match=r"routing_replay=True: .* no record of these"):
        make(tmp_path, moe(), cls=OtherMask, **REPLAY).train()


def test_an_auxiliary_loss_without_a_gradient_is_refused(tmp_path):
    settings = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    with pytest.raises(ConfigError, match=r"router_aux_loss_coef.*use_reentrant"):
        make(tmp_path / "aux", moe(), **settings)
    make(tmp_path / "none", moe(router_aux_loss_coef=0.0), router_aux_loss_coef=0.0, **settings)
