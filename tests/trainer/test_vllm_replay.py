"""`sampling_mask="replay"` and `routing_replay` with vLLM.

A stand-in for a colocated engine returns which tokens it sampled from, and the experts of each token.
"""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from grpo_ext.errors import ConfigError, RolloutError
from grpo_ext.forward.carried import Carried, carrying
from grpo_ext.forward.routing import BY_ROUTER, Routing, install_routers
from grpo_ext.rollouts.batch import EXPERTS
from grpo_ext.settings import MOST_KEPT
from tests.support.colocated import Engine, stand_in
from tests.support.selection import few_of
from tests.support.tiny import tiny_model
from tests.support.tool_runs import always_calling
from tests.support.trainers import change, error, first_line, make, train_and_keep_first
from tests.tolerances import DIFFERENT, METRIC, UPDATE

REPLAY = {"sampling_mask": "replay"}
COLOCATE = {"use_vllm": True, "vllm_mode": "colocate", "learning_rate": 1e-2, "top_k": 0, "global_batch_size": 8}


@pytest.fixture
def engines(monkeypatch) -> list[Engine]:
    return stand_in(monkeypatch.setattr)


def furthest_ratio(log: dict[str, Any]) -> float:
    return max(abs(log[f"sampling/importance_sampling_ratio/{end}"] - 1) for end in ("min", "max"))


@pytest.mark.parametrize(
    "settings",
    [
        *(pytest.param(one, marks=pytest.mark.full) for one in ({"top_p": 0.6}, {"min_p": 0.3}, {"top_k": 5})),
        pytest.param(
            {"top_p": 0.9, "temperature": 0.7, "vllm_importance_sampling_mode": "token_truncate"},
            marks=pytest.mark.full,
        ),
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
    assert [engine.options["max_num_seqs"] for engine in engines] == [8, 9, 8]  # a rollout batch fits in the queue


def test_without_a_filter_vllm_is_asked_for_nothing(tmp_path, engines):
    runs = (make(tmp_path / name, **COLOCATE, **extra, max_steps=1) for name, extra in (("a", {}), ("b", REPLAY)))
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


TAKES_NO_MASKS = "return_sampling_mask': True}}: {}.*sampling_mask='replay'.*0.28"
ROUTED = {**COLOCATE, "routing_replay": True, "max_steps": 1, "global_batch_size": 4}
LAYERS, EXPERTS_OF_A_LAYER, CHOSEN = 3, 4, 2
DENSE = {"num_hidden_layers": LAYERS, "mlp_only_layers": [1]}


def moe(**settings: Any) -> Any:
    return tiny_model("moe", **DENSE, **settings)


class RoutedEngine(Engine):
    """Returns the experts that its own routers choose, as vLLM does."""

    def __init__(self, enable_return_routed_experts: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.returns_experts, self.policy, self.returned = enable_return_routed_experts, moe(), {}
        self.llm_engine.model_config.max_model_len = 1000
        install_routers(self.policy)

    def sample(self, prompt: list[int], params: Any) -> Any:
        output = super().sample(prompt, params)
        if not self.returns_experts:
            return output
        ids, recording = [*prompt, *output.outputs[0].token_ids], Routing()
        with torch.no_grad(), carrying(self.policy, Carried(recording)):
            self.policy(torch.tensor([ids[:-1]]))
        experts_NLK = np.zeros((len(ids) - 1, LAYERS, CHOSEN), np.uint8)
        experts_NLK[:, [0, 2]] = recording.pop_experts().view(-1, 2, CHOSEN).numpy()
        output.outputs[0].routed_experts = self.routed_of(experts_NLK)
        self.returned[tuple(ids)] = output.outputs[0].routed_experts
        return output

    def routed_of(self, experts_NLK: Any) -> Any:
        """What it returns of the experts that were chosen."""
        return experts_NLK


def other_experts(self: Any, experts_NLK: Any) -> Any:
    return np.where([[True], [False], [True]], (experts_NLK + 1) % EXPERTS_OF_A_LAYER, 0).astype(np.uint8)


def vllm(put: Any, takes: bool = True, on_cpu: bool = False) -> None:
    """Let a stand-in's process have vLLM's module, of which the version and the arguments of an engine are read."""
    module, platforms = ModuleType("vllm"), ModuleType("vllm.platforms")
    module.__version__ = "0.31.0"
    module.EngineArgs = (lambda enable_return_routed_experts: 0) if takes else (lambda model: 0)
    platforms.current_platform = SimpleNamespace(is_cpu=lambda: on_cpu)
    put(sys.modules, "vllm", module)
    put(sys.modules, "vllm.platforms", platforms)


@pytest.fixture
def routed_engines(monkeypatch) -> list[Any]:
    vllm(monkeypatch.setitem)
    return stand_in(monkeypatch.setattr, RoutedEngine)


def trained(folder: Any, **settings: Any) -> Any:
    """A trainer that has trained, with the completions of its first step as `first`."""
    trainer = make(folder, **{**ROUTED, "model": moe(), **settings})
    trainer.first = train_and_keep_first(trainer)
    return trainer


def rows_of(trainer: Any) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """The tokens of each prompt and completion of the first step, with their experts."""
    columns = [trainer.first[name] for name in ("prompt_ids", "completion_ids", EXPERTS)]
    return [((*prompt.tolist(), *ids.tolist()), experts) for prompt, ids, experts in zip(*columns)]


@pytest.mark.parametrize("chosen", few_of(["by its routers", "others"], ["others"]))
def test_the_experts_of_the_engine_are_replayed(tmp_path, routed_engines, monkeypatch, chosen):
    if chosen == "others":
        monkeypatch.setattr(RoutedEngine, "routed_of", other_experts)
    trainer = trained(tmp_path, vllm_check=False)
    for ids, experts_NC in rows_of(trainer):
        returned = torch.from_numpy(routed_engines[0].returned[ids][:, [0, 2]].astype(np.int8))
        assert experts_NC.dtype == torch.int8
        assert torch.equal(experts_NC[:-1], returned.flatten(1))
        assert bool((experts_NC[-1] == BY_ROUTER).all())
    log = trainer.state.log_history[0]
    assert (log["routing/changed_share"] > 0) == (chosen == "others")
    assert (log["sampling/sampling_logp_difference/mean"] > METRIC) == (chosen == "others")


@pytest.mark.full
def test_tokens_of_tools_have_the_experts_of_the_next_turn(tmp_path, routed_engines):
    few = {"max_completion_length": 48, "max_tool_calling_iterations": 1, "vllm_importance_sampling_correction": False}
    trainer = trained(tmp_path, **{**always_calling(), **few})
    assert trainer.state.log_history[0]["tools/call_frequency"] > 0
    assert trainer.state.log_history[0]["routing/changed_share"] == 0.0
    for (ids, experts_NC), mask in zip(rows_of(trainer), trainer.first["tool_mask"], strict=True):
        assert len(experts_NC) == len(ids)
        ended = len(ids) - len(mask) + (int(mask.nonzero().max()) if mask.any() else 0)
        assert bool((experts_NC[:ended] != BY_ROUTER).all())


@pytest.mark.parametrize(
    ("routed_of", "problem"),
    [
        (lambda e: e[1:], r"an array \(\d+, 3, 2\)"),
        (lambda e: e * 0, r"\[0, 0\] as a choice"),
        (lambda e: None, "none"),
    ],
)
def test_an_engine_that_returns_other_than_it_was_told_to_ends_the_run(
    tmp_path, routed_engines, monkeypatch, routed_of, problem
):
    monkeypatch.setattr(RoutedEngine, "routed_of", lambda self, experts_NLK: routed_of(experts_NLK))
    trainer = make(tmp_path, **ROUTED, model=moe())
    with pytest.raises(RolloutError, match=f"enable_return_routed_experts=True.* returned {problem}.* for .* tokens"):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize(
    ("installed", "reason"),
    [
        ({"takes": False}, "vLLM 0.31.0 returns no experts (EngineArgs has no enable_return_routed_experts)"),
        ({"on_cpu": True}, "vLLM 0.31.0 returns no experts on a CPU"),
    ],
)
def test_experts_that_the_engine_does_not_return_are_recorded_and_the_run_says_so(
    tmp_path, routed_engines, monkeypatch, caplog, installed, reason
):
    vllm(monkeypatch.setitem, **installed)
    recorded = rows_of(trained(tmp_path / "recorded"))
    assert caplog.text.count(f"routing_replay=True: {reason}, so they are recorded with the log-prob") == 1
    vllm(monkeypatch.setitem)
    returned = rows_of(trained(tmp_path / "returned"))
    assert [engine.returns_experts for engine in routed_engines] == [False, True]
    assert caplog.text.count("recorded with the log-prob") == 1
    for (ids, experts_NC), (other_ids, other_NC) in zip(recorded, returned, strict=True):
        assert ids == other_ids
        assert torch.equal(experts_NC, other_NC)


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"top_p": 0.9, **REPLAY}, TypeError("unexpected\n 'return_sampling_mask'"), TAKES_NO_MASKS),
        ({"top_p": 0.9, **REPLAY}, ValueError("requires\n Model Runner V2"), TAKES_NO_MASKS),
        ({"routing_replay": True}, ValueError("set V2_RUNNER=1."), "enable_return_routed_experts.*{}.*routing_replay"),
    ],
)
def test_a_vllm_that_does_not_take_an_option_is_refused_by_name(tmp_path, monkeypatch, settings, error, words):
    def start(**options: Any) -> Any:
        raise error

    vllm(monkeypatch.setitem)
    stand_in(monkeypatch.setattr, start)
    with pytest.raises(ConfigError, match=words.format(" ".join(str(error).split()))):
        make(tmp_path, **COLOCATE, **settings, model=moe())
    with pytest.raises(type(error), match=r"^(?!vLLM)"):  # of vLLM itself, where nothing is asked for
        make(tmp_path, **COLOCATE, top_p=0.9)
