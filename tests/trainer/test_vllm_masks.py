"""`sampling_mask="replay"` with vLLM: a stand-in for a colocated engine returns which tokens it sampled from."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_ext.errors import ConfigError, RolloutError
from grpo_ext.rollouts.keyed import MOST_KEPT
from tests.support.colocated import Engine, stand_in
from tests.support.trainers import change, error, first_line, make
from tests.tolerances import DIFFERENT, METRIC, UPDATE

REPLAY = {"sampling_mask": "replay"}
COLOCATE = {"use_vllm": True, "vllm_mode": "colocate", "learning_rate": 1e-2, "top_k": 0}


@pytest.fixture
def engines(monkeypatch) -> list[Engine]:
    return stand_in(monkeypatch.setattr)


def furthest_ratio(log: dict[str, Any]) -> float:
    return max(abs(log[f"sampling/importance_sampling_ratio/{end}"] - 1) for end in ("min", "max"))


@pytest.mark.parametrize(
    "settings",
    [
        {"top_p": 0.6},
        {"top_k": 5},
        pytest.param({"min_p": 0.3}, marks=pytest.mark.full),
        {"top_p": 0.9, "temperature": 0.7, "vllm_importance_sampling_mode": "token_truncate"},
        {"top_p": 0.9, "generation_kwargs": {"top_k": -1, "min_tokens": 4, "min_p": 0.1}},
    ],
    ids=str,
)
def test_ratios_to_vllm_are_one_where_its_masks_are_replayed(tmp_path, engines, settings):
    unbounded = {**COLOCATE, "vllm_importance_sampling_clip_max": 1e9, **settings}
    replayed = first_line(tmp_path / "replayed", **unbounded, **REPLAY)  # with the check, whatever is left
    plain = first_line(tmp_path / "plain", **unbounded, vllm_check=False)
    assert furthest_ratio(replayed) < 20 * METRIC  # of completions of 12 tokens
    assert replayed["sampling/logp_difference"] < METRIC
    assert furthest_ratio(plain) > 0.05  # the control
    assert [engine.returns_masks for engine in engines] == [True, False]
    asked = {params.top_k for params in engines[0].asked}
    assert asked == {settings.get("top_k", MOST_KEPT)}


def test_masks_of_vllm_go_through_every_split(tmp_path, engines):
    settings = {**COLOCATE, "top_p": 0.6, "vllm_importance_sampling_correction": False, "max_steps": 2}
    reference = change(make(tmp_path / "one", **settings, **REPLAY))
    other = change(make(tmp_path / "other", **settings, **REPLAY, per_device_train_batch_size=3, forward="padded"))
    plain = change(make(tmp_path / "plain", **settings))
    assert error(reference, other) < UPDATE
    assert error(reference, plain) > DIFFERENT
    assert [engine.options["max_num_seqs"] for engine in engines] == [16, 18, 16]  # a rollout batch fits in the queue


def test_without_a_filter_vllm_is_asked_for_nothing(tmp_path, engines):
    runs = (make(tmp_path / name, **COLOCATE, **extra, max_steps=2) for name, extra in (("a", {}), ("b", REPLAY)))
    changes = [change(run) for run in runs]
    assert torch.equal(*changes)
    assert not any(engine.returns_masks for engine in engines)
    assert {params.top_k for engine in engines for params in engine.asked} == {0}


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"vllm_mode": "server", "top_p": 0.9}, "top_p=0.9 on a vLLM server"),
        ({"top_p": 0.9, "repetition_penalty": 1.1}, "repetition_penalty=1.1"),
        ({"repetition_penalty": 1.1}, "repetition_penalty=1.1"),
        ({"top_p": 0.9, "generation_kwargs": {"presence_penalty": 0.5}}, "presence_penalty=0.5"),
        ({"top_p": 0.9, "generation_kwargs": {"temperature": 0.0}}, "temperature=0.0"),
        ({"generation_kwargs": {"min_tokens": 4}}, "min_tokens=4 .* with top_k"),
        ({"vllm_structured_outputs_regex": "a+"}, "vllm_structured_outputs_regex="),
    ],
)
def test_sampling_without_masks_is_refused_before_the_engine_starts(tmp_path, engines, settings, names):
    with pytest.raises(ConfigError, match=f"sampling_mask='replay' cannot be combined with {names}"):
        make(tmp_path, **{**COLOCATE, **settings}, **REPLAY)
    assert not engines


@pytest.mark.parametrize(
    "error", [TypeError("unexpected keyword 'return_sampling_mask'"), ValueError("requires\n Model Runner V2")]
)
def test_a_vllm_that_does_not_take_the_option_is_refused_by_name(tmp_path, monkeypatch, error):
    def start(**options: Any) -> Any:
        raise error

    stand_in(monkeypatch.setattr, start)
    said = " ".join(str(error).split())
    with pytest.raises(ConfigError, match=f"return_sampling_mask': True}}: {said}.*sampling_mask='replay'.*0.28"):
        make(tmp_path, **COLOCATE, top_p=0.9, **REPLAY)
    with pytest.raises(type(error), match=r"^(?!vLLM)"):  # of vLLM itself, where nothing is asked for
        make(tmp_path, **COLOCATE, top_p=0.9)


@pytest.mark.parametrize(
    ("masks_of", "problem"),
    [
        (lambda kept: None, "none"),
        (lambda kept: SimpleNamespace(token_ids=kept[1:]), "11, or"),
        (lambda kept: SimpleNamespace(token_ids=[[0, 0], *kept[1:]]), "12, or some without the token"),
    ],
)
def test_an_engine_that_does_not_return_what_it_was_told_to_ends_the_run(
    tmp_path, engines, monkeypatch, masks_of, problem
):
    monkeypatch.setattr(Engine, "masks_of", lambda self, kept: masks_of(kept))
    trainer = make(tmp_path, **COLOCATE, top_p=0.6, generation_kwargs={"min_tokens": 12}, **REPLAY)
    with pytest.raises(RolloutError, match=f"return_sampling_mask=True.* returned {problem}.* completion of 12 tokens"):
        trainer.train()
    assert trainer.state.global_step == 0
