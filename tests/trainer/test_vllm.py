"""Completions from a stand-in for a vLLM server: adapters by themselves, the check, seeds, bitwise mode."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel

from grpo_ext.errors import ConfigError, RolloutError
from tests.support.selection import few_of
from tests.support.server import StandIn, stand_in
from tests.support.tiny import tiny_model
from tests.support.trainers import LORA, SAVE, change, error, log_of, make, ran
from tests.tolerances import DIFFERENT, UPDATE

SERVER = {"use_vllm": True, "vllm_mode": "server", "learning_rate": 1e-2, "top_k": 0}
SERVER |= {"global_batch_size": 8, "max_completion_length": 6}


class Serving(StandIn):
    """A server that was started with --enable-lora, with one adapter at a time; it outlives a run."""

    status = 200

    def __init__(self, folder: Path, policy: Any) -> None:
        super().__init__(folder, policy)
        self.adapters, self.env, self.base, self.names, self.model = {}, {}, policy, [], "base"
        lora = {"lora_config": {"max_lora_rank": 8}, "parallel_config": {"data_parallel_size": 1}}
        self.config = self.config | lora

    def post(self, url: str, json: dict[str, Any]) -> Any:
        kind, name = url.rsplit("/", 1)[1], json["lora_name"]
        if kind == "unload_lora_adapter":
            del self.adapters[name]
        elif name in self.adapters or self.status != 200:
            return SimpleNamespace(status_code=self.status if self.status != 200 else 400, text="already loaded")
        else:
            self.names.append(name)
            self.adapters[name] = PeftModel.from_pretrained(tiny_model(), json["lora_path"])
        return SimpleNamespace(status_code=200)

    def sample(self, *args: Any) -> Any:
        self.policy = self.adapters.get(self.model, self.base)
        return super().sample(*args)


@pytest.fixture
def serving(tmp_path, monkeypatch) -> Any:
    return stand_in(tmp_path / "server", monkeypatch.setattr, Serving)


@pytest.fixture
def server(tmp_path, monkeypatch) -> StandIn:
    return stand_in(tmp_path / "server", monkeypatch.setattr)


def adapted(folder: Path, rank: int = 4, **settings: Any) -> Any:
    torch.manual_seed(0)  # of the adapter's start
    return make(folder, peft_config=LoraConfig(**{**LORA, "r": rank}), **{**SERVER, "learning_rate": 0.1, **settings})


def ratios(trainer: Any) -> list[float]:
    return [one for end in ("min", "max") for one in log_of(trainer, f"sampling/importance_sampling_ratio/{end}")]


@pytest.mark.parametrize("lag", few_of([0, 1], [0]))
def test_a_server_samples_with_the_adapter_of_the_step(tmp_path, serving, lag):
    trainer = ran(adapted(tmp_path, rollout_lag=lag))
    assert serving.sent == 0  # no weights
    assert len(serving.names) >= 2
    assert list(serving.adapters) == serving.names[-1:]
    assert ratios(trainer) == pytest.approx([1.0] * len(ratios(trainer)), abs=1e-4)


@pytest.mark.parametrize("settings", [{"vllm_lora": False}, pytest.param({"rank": 16}, marks=pytest.mark.full)])
def test_weights_are_sent_where_the_adapter_is_not_and_teach_the_same(tmp_path, serving, settings):
    trainer = adapted(tmp_path / "merged", **settings)
    merged = change(trainer)
    assert serving.sent == 3
    assert not serving.names
    assert ratios(trainer) == pytest.approx([1.0] * len(ratios(trainer)), abs=1e-4)
    if "rank" not in settings:
        assert error(change(adapted(tmp_path / "alone")), merged) < 1e-4


@pytest.mark.full
def test_a_resumed_run_samples_with_its_own_adapter_on_a_server_that_has_an_older_one(tmp_path, serving):
    adapted(tmp_path / "straight", **SAVE).train()
    left = list(serving.adapters)  # what the server still has when the run resumes
    resumed = ran(adapted(tmp_path / "straight", **SAVE), tmp_path / "straight" / "checkpoint-1")
    assert not set(left) & set(serving.names[3:])
    assert len(ratios(resumed)) >= 4
    assert ratios(resumed) == pytest.approx([1.0] * len(ratios(resumed)), abs=1e-4)


def test_what_cannot_be_sent_alone_is_an_error_where_it_is_asked_for(tmp_path, serving):
    serving.config["lora_config"] = None
    with pytest.raises(ConfigError, match="started without --enable-lora"):
        adapted(tmp_path, vllm_lora=True)


def test_an_adapter_that_a_server_does_not_load_ends_the_run(tmp_path, serving):
    serving.status = 404
    with pytest.raises(RolloutError, match=r"VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, .* or set vllm_lora=False"):
        adapted(tmp_path).train()


@pytest.mark.parametrize("corrects", [True, False])
def test_a_server_with_other_weights_ends_the_run_in_its_first_rollout_batch(tmp_path, server, corrects):
    with torch.no_grad():
        for parameter in server.policy.parameters():
            parameter.mul_(3.0)
    server.update_named_params = lambda described, parameters: list(parameters)  # weights never arrive
    settings = {**SERVER, "vllm_importance_sampling_correction": corrects}
    trainer = make(tmp_path, **settings)
    with pytest.raises(RolloutError, match="vLLM's log-probabilities"):
        trainer.train()
    assert trainer.state.global_step == 0
    make(tmp_path / "off", **settings, vllm_check=False, max_steps=1).train()


@pytest.mark.full
def test_dropout_does_not_depend_on_the_split_where_ratios_are_corrected(tmp_path, serving):
    """The sampler, and the log-probabilities that it is compared with, have no masks."""

    def of(size: int, rate: float = 0.1) -> torch.Tensor:
        torch.manual_seed(0)  # of the adapter's start
        adapter = LoraConfig(**LORA, lora_dropout=rate, init_lora_weights=False)
        sizes = {"global_batch_size": 16, "max_completion_length": 12, "per_device_train_batch_size": size}
        return change(make(tmp_path, peft_config=adapter, max_steps=2, **{**SERVER, **sizes}))

    whole = of(16)
    assert error(whole, of(3)) <= UPDATE
    assert error(whole, of(16, rate=0.0)) > DIFFERENT


def test_weights_that_stop_arriving_end_the_run(tmp_path, server):
    arrives, calls = server.update_named_params, []

    def update(described: Any, parameters: Any) -> None:
        calls.append(0)
        arrives(described, parameters) if len(calls) == 1 else list(parameters)

    server.update_named_params = update
    trainer = make(tmp_path, **{**SERVER, "learning_rate": 1e-1, "max_steps": 5})
    with pytest.raises(RolloutError, match="vLLM's log-probabilities"):
        trainer.train()
    assert trainer.state.global_step > 0


@pytest.mark.full
def test_without_seeds_a_run_samples_other_completions_every_time(tmp_path, server):
    settings = {**SERVER, "max_steps": 1}
    assert torch.equal(change(make(tmp_path / "a", **settings)), change(make(tmp_path / "b", **settings)))
    settings["vllm_seeds"] = False
    assert not torch.equal(change(make(tmp_path / "c", **settings)), change(make(tmp_path / "d", **settings)))


def test_bitwise_mode_takes_a_server_that_says_its_bits_do_not_depend_on_the_batch(tmp_path, serving):
    settings = {**SERVER, "bitwise_invariant": True, "max_steps": 1}
    with pytest.raises(ConfigError, match="set VLLM_BATCH_INVARIANT=1"):
        make(tmp_path, **settings)
    serving.env["VLLM_BATCH_INVARIANT"] = True
    whole = change(make(tmp_path / "a", **settings))
    assert torch.equal(whole, change(make(tmp_path / "b", **settings, per_device_train_batch_size=3)))
    assert not torch.equal(whole, change(make(tmp_path / "c", **settings, seed=4)))
