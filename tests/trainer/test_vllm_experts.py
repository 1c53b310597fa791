"""`routing_replay` with vLLM: a stand-in for a colocated engine returns the experts of each token."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from grpo_ext.errors import ConfigError, RolloutError
from grpo_ext.forward.routing import LIVE, Routing, install_routers, routed
from grpo_ext.rollouts.batch import EXPERTS
from tests.support.colocated import Engine, stand_in
from tests.support.tiny import tiny_model
from tests.support.tool_runs import always_calling
from tests.support.trainers import make, train_and_keep_first
from tests.tolerances import METRIC

COLOCATE = {"use_vllm": True, "vllm_mode": "colocate", "routing_replay": True, "max_steps": 1, "top_k": 0}
LAYERS, EXPERTS_OF_A_LAYER, CHOSEN = 3, 4, 2
DENSE = {"num_hidden_layers": LAYERS, "mlp_only_layers": [1]}


def moe(**settings: Any) -> Any:
    return tiny_model("moe", **DENSE, **settings)


class Routed(Engine):
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
        with torch.no_grad(), routed(self.policy, recording):
            self.policy(torch.tensor([ids[:-1]]))
        experts_NLK = np.zeros((len(ids) - 1, LAYERS, CHOSEN), np.uint8)
        experts_NLK[:, [0, 2]] = recording.take().view(-1, 2, CHOSEN).numpy()
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
def engines(monkeypatch) -> list[Any]:
    vllm(monkeypatch.setitem)
    return stand_in(monkeypatch.setattr, Routed)


def trained(folder: Any, **settings: Any) -> Any:
    """A trainer that has trained, with the completions of its first step as `first`."""
    trainer = make(folder, **{**COLOCATE, "model": moe(), **settings})
    trainer.first = train_and_keep_first(trainer)
    return trainer


def rows_of(trainer: Any) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """The tokens of each prompt and completion of the first step, with their experts."""
    columns = [trainer.first[name] for name in ("prompt_ids", "completion_ids", EXPERTS)]
    return [((*prompt.tolist(), *ids.tolist()), experts) for prompt, ids, experts in zip(*columns)]


@pytest.mark.parametrize("chosen", ["by its routers", "others"])
def test_the_experts_of_the_engine_are_replayed(tmp_path, engines, monkeypatch, chosen):
    if chosen == "others":
        monkeypatch.setattr(Routed, "routed_of", other_experts)
    trainer = trained(tmp_path, vllm_check=False)
    for ids, experts_NC in rows_of(trainer):
        returned = torch.from_numpy(engines[0].returned[ids][:, [0, 2]].astype(np.int8))
        assert experts_NC.dtype == torch.int8
        assert torch.equal(experts_NC[:-1], returned.flatten(1))
        assert bool((experts_NC[-1] == LIVE).all())
    log = trainer.state.log_history[0]
    assert (log["routing/changed_share"] > 0) == (chosen == "others")
    assert (log["sampling/sampling_logp_difference/mean"] > METRIC) == (chosen == "others")


def test_tokens_of_tools_have_the_experts_of_the_next_turn(tmp_path, engines):
    few = {"global_batch_size": 4, "max_completion_length": 48, "vllm_importance_sampling_correction": False}
    trainer = trained(tmp_path, **{**always_calling(), **few})
    assert trainer.state.log_history[0]["tools/call_frequency"] > 0
    assert trainer.state.log_history[0]["routing/changed_share"] == 0.0
    for (ids, experts_NC), mask in zip(rows_of(trainer), trainer.first["tool_mask"], strict=True):
        assert len(experts_NC) == len(ids)
        ended = len(ids) - len(mask) + (int(mask.nonzero().max()) if mask.any() else 0)
        assert bool((experts_NC[:ended] != LIVE).all())


@pytest.mark.parametrize(
    ("routed_of", "problem"),
    [
        (lambda e: e[1:], r"an array \(\d+, 3, 2\)"),
        (lambda e: e * 0, r"\[0, 0\] as a choice"),
        (lambda e: None, "none"),
    ],
)
def test_an_engine_that_returns_other_than_it_was_told_to_ends_the_run(
    tmp_path, engines, monkeypatch, routed_of, problem
):
    monkeypatch.setattr(Routed, "routed_of", lambda self, experts_NLK: routed_of(experts_NLK))
    trainer = make(tmp_path, **COLOCATE, model=moe())
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
    tmp_path, engines, monkeypatch, caplog, installed, reason
):
    vllm(monkeypatch.setitem, **installed)
    recorded = rows_of(trained(tmp_path / "recorded"))
    assert caplog.text.count(f"routing_replay=True: {reason}, so they are recorded with the log-prob") == 1
    vllm(monkeypatch.setitem)
    returned = rows_of(trained(tmp_path / "returned"))
    assert [engine.returns_experts for engine in engines] == [False, True]
    assert caplog.text.count("recorded with the log-prob") == 1
    for (ids, experts_NC), (other_ids, other_NC) in zip(recorded, returned, strict=True):
        assert ids == other_ids
        assert torch.equal(experts_NC, other_NC)


def test_a_vllm_that_cannot_return_experts_of_this_model_is_refused_by_name(tmp_path, engines, monkeypatch):
    def start(**options: Any) -> Any:
        raise ValueError("AuxOutput Connector requires Model Runner V2; set VLLM_USE_V2_MODEL_RUNNER=1.")

    stand_in(monkeypatch.setattr, start)
    with pytest.raises(ConfigError, match=r"enable_return_routed_experts.*V2_MODEL_RUNNER=1.*routing_replay"):
        make(tmp_path, **COLOCATE, model=moe())
