"""`sampling_mask="replay"` and `routing_replay`.

What is trained is the distribution that was sampled, and a token goes to the experts that it was sampled with in every
later forward.
"""

from typing import Any

import pytest
import torch

from grpo_ext import GRPOTrainer
from grpo_ext.errors import CheckpointError, ConfigError, ModelError
from grpo_ext.forward.columns import EXPERTS
from grpo_ext.forward.routing import BY_ROUTER
from grpo_ext.rollouts.transcript import Transcript, share_prompt_experts
from tests.support.beside_trl import log_probs_of
from tests.support.decoding import decoding
from tests.support.float64 import float64_throughout
from tests.support.tiny import given_rollout, tiny_model
from tests.support.tool_runs import always_calling
from tests.support.trainers import (
    OtherMask,
    change,
    error,
    first_line,
    make,
    other,
    parameters,
    passing_on,
    ran,
    train_and_keep_first,
)
from tests.tolerances import DIFFERENT, METRIC, UPDATE

REPLAY = {"sampling_mask": "replay"}
CALLING = {**always_calling(), "max_completion_length": 48}
SUPPRESSED = {"generation_kwargs": {"suppress_tokens": [5, 9], "min_new_tokens": 4}}
FILTERS = [
    pytest.param({"top_p": 0.6, "pad_to_multiple_of": 8}, marks=pytest.mark.full),
    pytest.param({"top_k": 5}, marks=pytest.mark.full),  # tokens with equal scores have it below
    pytest.param({"min_p": 0.3}, marks=pytest.mark.full),
    pytest.param({"generation_kwargs": {"typical_p": 0.5}}, marks=pytest.mark.full),
    {"generation_kwargs": {"epsilon_cutoff": 0.02}},
    pytest.param({"generation_kwargs": {"eta_cutoff": 0.05}}, marks=pytest.mark.full),
    pytest.param({"generation_kwargs": {"top_h": 0.5}}, marks=pytest.mark.full),
    pytest.param(SUPPRESSED, marks=pytest.mark.full),
    {**SUPPRESSED, "top_p": 0.9, "temperature": 0.7},
]


@pytest.mark.parametrize("settings", FILTERS, ids=str)
def test_the_ratio_of_training_to_sampling_is_one_for_every_filter(tmp_path, settings):
    replayed, plain = (first_line(tmp_path / name, **settings, **extra) for name, extra in (("r", REPLAY), ("p", {})))
    assert replayed["sampling/logp_difference"] < METRIC
    assert plain["sampling/logp_difference"] > 100 * METRIC  # the control
    if settings != SUPPRESSED:  # suppression alone truncates nothing
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
    assert torch.equal(*(change(make(tmp_path / str(i), max_steps=2, **extra)) for i, extra in enumerate(({}, REPLAY))))


def test_a_run_without_replay_says_once_what_its_filters_leave_out(tmp_path, caplog):
    for name, settings in (("plain", {"top_p": 0.6}), ("replay", {"top_p": 0.6, **REPLAY}), ("all", {})):
        caplog.clear()
        make(tmp_path / name, max_steps=1 + (name == "plain"), **settings).train()
        assert caplog.text.count("top_p=0.6: sampling kept 0.6") == (name == "plain")


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
    pairs = {"rollout_func": pairs_rollout, "max_steps": 1}
    reference = change(make(tmp_path / "one", **pairs, **REPLAY))
    other = change(make(tmp_path / "other", per_device_train_batch_size=3, **pairs, **REPLAY))
    assert error(reference, other) < UPDATE
    assert error(reference, change(make(tmp_path / "plain", **pairs))) > DIFFERENT


@pytest.mark.full
def test_tools_answer_between_replayed_tokens(tmp_path):
    replayed, plain = (
        first_line(tmp_path / name, tiny_model(max_position_embeddings=4096), **CALLING, top_p=0.8, **extra)
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


class SameTokens(GRPOTrainer):
    """Copies of what a loss is given."""

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        log_probs_of(self, model, inputs)
        return super()._compute_loss(model, {**inputs, "completion_mask": inputs["completion_mask"].clone()})


class OwnTokens(GRPOTrainer):
    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        return -log_probs_of(self, model, {**inputs, "completion_ids": inputs["completion_ids"].roll(1, 0)}).mean()


def test_one_token_that_is_kept_is_a_filter_too(tmp_path):
    log = first_line(tmp_path, top_k=1, skip_zero_contribution=False, **REPLAY)
    assert log["sampling/logp_difference"] < METRIC
    assert log["entropy"] == 0.0
    assert log["frac_reward_zero_std"] == 1.0  # the completions of a prompt are alike


def test_an_end_token_that_generate_knows_alone_ends_the_record(tmp_path):
    log = first_line(tmp_path, generation_kwargs={"eos_token_id": [1, 20]})
    assert log["completions/mean_length"] > 1


ROUTING = {"routing_replay": True}
LOGPS, SCORE = "_get_per_token_logps_and_entropies", "_generate_and_score_completions"
# the weights have moved a lot when a rollout batch is trained on for the second time
REUSED = {"num_iterations": 2, "learning_rate": 1e-2, "max_steps": 3}


def logs(folder: Any, **settings: Any) -> list[dict[str, Any]]:
    trainer = ran(make(folder, "moe", **settings))
    return trainer.state.log_history[:-1]


def experts_of(folder: Any, **settings: Any) -> list[torch.Tensor]:
    """The recorded experts of each completion of the first step, (prompt + completion, C)."""
    trainer = make(folder, "moe", max_steps=1, **ROUTING, **settings)
    return list(train_and_keep_first(trainer)[EXPERTS])


@pytest.mark.full
def test_where_no_choice_changes_the_update_is_the_same(tmp_path):
    with float64_throughout(tiny_model("moe").double()) as model:
        states = {name: value.clone() for name, value in model.state_dict().items()}
        changes = []
        for replay in (True, False):
            model.load_state_dict(states)
            trainer = make(tmp_path / str(replay), model, routing_replay=replay, max_steps=1)
            changes.append(change(trainer))
            assert trainer.state.log_history[0].get("routing/changed_share", 0.0) == 0.0
    assert torch.equal(*changes)


@pytest.mark.full
def test_choices_that_training_changes_are_replayed(tmp_path):
    replayed, live = (logs(tmp_path / str(replay), routing_replay=replay, **REUSED) for replay in (True, False))
    shares = [entry["routing/changed_share"] for entry in replayed]
    assert shares[0] == shares[2] == 0.0  # sampled with these weights
    assert replayed[0]["sampling/logp_difference"] < METRIC
    assert shares[1] > 0.01
    assert replayed[0]["loss"] == live[0]["loss"]
    assert abs(replayed[1]["loss"] - live[1]["loss"]) > DIFFERENT


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> list[torch.Tensor]:
    """The experts of a run that scores what it has sampled."""
    return experts_of(tmp_path_factory.mktemp("recorded"), forward="prefix", beta=0.1)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=pytest.mark.full),
        pytest.param({"compact": False}, marks=pytest.mark.full),
        pytest.param({"generation_kwargs": {"use_cache": False}}, marks=pytest.mark.full),
        pytest.param({"pad_to_multiple_of": 8}, marks=pytest.mark.full),
        pytest.param({"rollout_chunk_size": 4}, marks=pytest.mark.full),
        pytest.param({"forward": "padded"}, marks=pytest.mark.full),
        {"mask_truncated_completions": True},
        {"rollout_lag": 1},
    ],
    ids=str,
)
def test_experts_are_recorded_however_completions_are_sampled(tmp_path, recorded, settings):
    with decoding(settings.get("compact", True)):
        rows = experts_of(tmp_path, **{name: value for name, value in settings.items() if name != "compact"})
    for row_NC, expected_NC in zip(rows, recorded, strict=True):
        if settings != {"mask_truncated_completions": True}:  # of which one token is kept
            assert torch.equal(row_NC, expected_NC)
            assert bool((row_NC[-1] == BY_ROUTER).all())
        assert bool((row_NC[:-1] != BY_ROUTER).all())


def test_a_group_shares_the_experts_of_its_prompt_and_no_other_group_has_them():
    transcripts = [Transcript(key=0, place=n, prompt_ids=[5, 6]) for n in range(4)]
    for number, transcript in enumerate(transcripts):
        transcript.columns[EXPERTS] = torch.full((3, 2), number)
    share_prompt_experts(transcripts, num_generations=2)
    assert [t.columns[EXPERTS][:, 0].tolist() for t in transcripts] == [[0, 0, 0], [0, 0, 1], [2, 2, 2], [2, 2, 3]]


def test_experts_are_recorded_with_the_log_probabilities_where_another_one_samples(tmp_path, recorded):
    rows = experts_of(tmp_path / "override", cls=passing_on("_generate_single_turn"))
    for row_NC, expected_NC in zip(rows, recorded, strict=True):
        assert torch.equal(row_NC[:-1], expected_NC[:-1])
    shares = [
        e["routing/changed_share"] for e in logs(tmp_path / "func", rollout_func=given_rollout, **ROUTING, **REUSED)
    ]
    assert shares[0] == 0.0 < shares[1]


@pytest.mark.full
def test_tokens_of_tools_have_the_experts_of_the_next_turn(tmp_path):
    settings = CALLING
    trainer = make(tmp_path, tiny_model("moe", max_position_embeddings=4096), **settings, **ROUTING)
    batch = train_and_keep_first(trainer)
    assert trainer.state.log_history[0]["tools/call_frequency"] > 0
    assert trainer.state.log_history[0]["routing/changed_share"] == 0.0
    for row_NC, prompt, mask in zip(batch[EXPERTS], batch["prompt_ids"], batch["tool_mask"]):
        assert len(row_NC) == len(prompt) + len(mask)
        ended = int(mask.nonzero().max()) if mask.any() else 0  # the last token that the model wrote
        assert bool((row_NC[: len(prompt) + ended] != BY_ROUTER).all())
        if len(mask) < settings["max_completion_length"]:  # else a turn was cut, and its last token had run
            assert bool((row_NC[len(prompt) + ended :] == BY_ROUTER).all())


@pytest.mark.parametrize(
    ("settings", "replay"),
    [
        pytest.param({"model": "moe", **REUSED}, ROUTING, id="experts"),
        pytest.param({"top_p": 0.6, "num_iterations": 2}, REPLAY, id="masks", marks=pytest.mark.full),
    ],
)
def test_the_split_and_the_form_change_nothing(tmp_path, settings, replay):
    def update(name: str, **more: Any) -> torch.Tensor:
        return change(make(tmp_path / name, **{**settings, "max_steps": 2}, beta=0.1, **more))

    packed = update("packed", forward="packed", **replay)
    for form in ("padded", "prefix"):  # of packs the matrix shows it
        assert error(packed, update(form, forward=form, per_device_train_batch_size=3, **replay)) < UPDATE
    assert error(packed, update("live")) > DIFFERENT


def test_a_run_that_resumes_inside_a_rollout_batch_replays_its_experts(tmp_path):
    settings = {"model": "moe", **REUSED}
    whole = ran(other(tmp_path / "whole", **settings, **ROUTING))
    resumed = ran(other(tmp_path / "resumed", **settings, **ROUTING), tmp_path / "whole" / "checkpoint-1")
    assert torch.equal(parameters(whole), parameters(resumed))
    shares = [log["routing/changed_share"] for log in resumed.state.log_history[:-1]]
    assert shares == [log["routing/changed_share"] for log in whole.state.log_history[:-1]]
    assert shares[1] > 0
    with pytest.raises(CheckpointError, match="routing_replay"):
        other(tmp_path / "live", **settings).train(str(tmp_path / "whole" / "checkpoint-1"))


OF_EXPERTS, OF_MASKS = {"model": "moe", **ROUTING}, {"top_p": 0.9, **REPLAY}


@pytest.mark.parametrize(
    ("replay", "changes", "names"),
    [
        (OF_EXPERTS, {"cls": passing_on(LOGPS)}, LOGPS),
        (OF_EXPERTS, {"cls": passing_on(SCORE)}, SCORE),
        (OF_EXPERTS, {"torch_compile": True}, "torch_compile"),
        (OF_EXPERTS, {"generation_kwargs": {"prefill_chunk_size": 4}}, "prefill_chunk_size"),
        (OF_EXPERTS, {"model": "qwen2"}, "Qwen2ForCausalLM has no routed experts"),
        (OF_MASKS, {"cls": passing_on("_generate_single_turn")}, "_generate_single_turn"),
        (OF_MASKS, {"cls": passing_on(LOGPS)}, LOGPS),
        (OF_MASKS, {"repetition_penalty": 1.1}, "repetition_penalty=1.1"),
        (OF_MASKS, {"generation_kwargs": {"no_repeat_ngram_size": 1}}, "no_repeat_ngram_size=1"),
        (OF_MASKS, {"generation_kwargs": {"forced_eos_token_id": 1}}, "forced_eos_token_id=1"),
        (OF_MASKS, {"generation_kwargs": {"temperature": 0.5}}, "temperature=0.5 in generation_kwargs .training divid"),
        (OF_MASKS, {"generation_kwargs": {"num_beams": 2}}, "num_beams=2"),
    ],
)
def test_what_cannot_be_replayed_is_refused_before_training(tmp_path, replay, changes, names):
    setting = "routing_replay=True" if replay is OF_EXPERTS else "sampling_mask='replay'"
    with pytest.raises((ConfigError, ModelError), match=f"{setting}.*{names}"):
        make(tmp_path, **{**replay, **changes})


@pytest.mark.parametrize(("cls", "replay"), [(OtherMask, OF_EXPERTS), (OtherMask, OF_MASKS), (OwnTokens, OF_MASKS)])
def test_tokens_that_have_no_record_end_the_run(tmp_path, cls, replay):
    plain = {name: value for name, value in replay.items() if name not in ROUTING | REPLAY}
    with pytest.raises(ConfigError, match=r"(routing_replay=True|sampling_mask='replay'): .* no record of these"):
        make(tmp_path / "replay", cls=cls, **replay).train()
    make(tmp_path / "plain", cls=cls, **plain, max_steps=1).train()


@pytest.mark.parametrize("replay", [OF_EXPERTS, OF_MASKS])
def test_copies_of_the_tokens_have_their_record(tmp_path, replay):
    assert torch.equal(*(change(make(tmp_path, cls=cls, max_steps=1, **replay)) for cls in (GRPOTrainer, SameTokens)))


def test_an_auxiliary_loss_without_a_gradient_is_refused(tmp_path):
    settings = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    with pytest.raises(ConfigError, match=r"router_aux_loss_coef.*use_reentrant"):
        make(tmp_path / "aux", "moe", **settings)
    make(tmp_path / "none", tiny_model("moe", router_aux_loss_coef=0.0), router_aux_loss_coef=0.0, **settings)
