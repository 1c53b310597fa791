"""Weights in 4 and 8 bits under an adapter: the update, checkpoints and export, and what is refused of them."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from grpo_ext import GRPOTrainer
from grpo_ext import trainer as trainer_module
from grpo_ext.errors import ConfigError, ModelError, SplitDependentError
from grpo_ext.tools.export import export
from tests.support.tiny import tiny_model, tiny_tokenizer
from tests.support.trainers import LORA, SAVE, change, error, far, log_of, ran, trained
from tests.tolerances import DIFFERENT, UPDATE, UPDATE_BFLOAT16

pytestmark = pytest.mark.skipif(
    find_spec("bitsandbytes") is None, reason="needs bitsandbytes: pip install '.[quantized]'"
)
BITS: dict[int, dict[str, Any]] = {
    4: {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    8: {"load_in_8bit": True, "llm_int8_threshold": 0.0},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> str:
    """A model whose rows bitsandbytes can cut into blocks."""
    return saved(tmp_path_factory.mktemp("base"), norm=1.0)


def saved(folder: Path, norm: float) -> str:
    model = tiny_model("llama", hidden_size=64, intermediate_size=128)
    for layer in model.model.layers:
        layer.input_layernorm.weight.data.mul_(norm)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def loaded(base: str, bits: int, **changes: Any) -> Any:
    config = BitsAndBytesConfig(**{**BITS[bits], **changes})
    return AutoModelForCausalLM.from_pretrained(base, quantization_config=config, dtype=torch.float32)


def lora(**options: Any) -> peft.LoraConfig:
    return peft.LoraConfig(**LORA, **options)


def make(folder: Path, model: Any, adapter: Any = None, quantise: Any = None, **settings: Any) -> GRPOTrainer:
    if not isinstance(model, peft.PeftModel):
        settings["peft_config"] = lora() if adapter is None else adapter
    if quantise is not None:
        settings["quantization_config"] = BitsAndBytesConfig(**quantise)
    return far(folder, model, **{"learning_rate": 5.0, "global_batch_size": 8, "max_completion_length": 6, **settings})


def update(*args: Any, **settings: Any) -> torch.Tensor:
    return change(make(*args, **settings))


full = pytest.mark.full
EITHER = pytest.mark.parametrize("bits", [4, pytest.param(8, marks=full)])


BFLOAT16 = (trainer_module, "repair_set_up", lambda trainer, before: None)  # adapters stay as TRL casts them


def test_the_update_does_not_depend_on_the_split(tmp_path, base, monkeypatch):
    """DoRA over 4 bits and a plain adapter over 8; with --full a plain one over 4 bits has dropout."""

    def of(size: int, **changes: Any) -> torch.Tensor:
        kl = {"beta": 0.1, "rollout_batch_size": 16, "max_steps": 2}
        settings = {"quantise": BITS[4], "adapter": lora(use_dora=True), "per_device_train_batch_size": size}
        return update(tmp_path, base, **{**settings, **kl, **changes})

    whole = of(8)
    assert error(whole, of(3)) <= UPDATE
    eight = {"quantise": BITS[8], "adapter": lora(), "max_steps": 1}
    assert error(of(8, **eight), of(3, **eight)) <= UPDATE
    assert error(whole, of(8, seed=4)) > UPDATE_BFLOAT16
    assert error(whole, of(8, quantise=None)) > DIFFERENT  # the weights are quantised
    monkeypatch.setattr(*BFLOAT16)
    assert UPDATE < error(of(8), of(3)) <= UPDATE_BFLOAT16 / 2


@full
def test_dropout_over_weights_in_4_bits_does_not_depend_on_the_split(tmp_path, base):
    def of(size: int, rate: float = 0.1) -> torch.Tensor:
        adapter = lora(lora_dropout=rate)
        return update(tmp_path, base, quantise=BITS[4], adapter=adapter, per_device_train_batch_size=size)

    whole = of(8)
    assert error(whole, of(3)) <= UPDATE
    assert error(whole, of(8, rate=0.0)) > DIFFERENT


@full
def test_the_reference_is_the_policy_at_its_start(tmp_path, base):
    """An adapter that does not start at zero is copied, in 4 bits alone; sampled ahead too."""
    start: dict[str, Any] = {"beta": 0.1, "max_steps": 2, "adapter": lora(init_lora_weights=False)}
    for more in ({}, {"rollout_lag": 1}):
        run = ran(make(tmp_path, base, quantise=BITS[4], **start, **more))
        first, *later = log_of(run, "kl")
        assert first == pytest.approx(0.0, abs=1e-9)
        assert later[-1] > 1e-4
    with pytest.raises(ModelError, match=r"not copied .* beside weights in 8 bits"):
        make(tmp_path, base, quantise=BITS[8], **start)


def test_small_steps_are_not_rounded_away(tmp_path, base, monkeypatch):
    def moved() -> float:
        """The part of the adapter's first factors that three steps of 1e-5 have changed."""
        small = {"optim": "adamw_torch", "learning_rate": 1e-5, "max_steps": 3}
        trainer = make(tmp_path, base, quantise=BITS[4], **small)
        factors = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if "lora_A" in name}
        trainer.train()
        after = dict(trainer.model.named_parameters())
        return float(torch.cat([(after[name] != value).flatten() for name, value in factors.items()]).double().mean())

    assert moved() > 0.99
    monkeypatch.setattr(*BFLOAT16)
    assert moved() < 0.1


@EITHER
@full
def test_a_resumed_run_is_the_same_run_and_its_adapter_is_exported(tmp_path, base, bits):
    settings = {"quantise": BITS[bits], **SAVE, "max_steps": 2, "optim": "adamw_torch"}
    trainer = ran(make(tmp_path, base, learning_rate=0.05, **settings))
    resumed = ran(make(tmp_path, base, learning_rate=0.05, **settings), tmp_path / "out" / "checkpoint-1")
    assert torch.equal(trained(resumed.model), trained(trainer.model))
    checkpoint = tmp_path / "out" / "checkpoint-2"
    export(checkpoint, tmp_path / "adapter")
    expected = peft.get_peft_model_state_dict(trainer.model)
    exported = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert all(torch.equal(exported[name], value) for name, value in expected.items())
    export(checkpoint, tmp_path / "merged", merge_adapter=True)  # into the weights before they were rounded
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    plain = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(tmp_path / "adapter"))
    ids = torch.tensor([[3, 4, 5]])
    assert torch.allclose(merged(input_ids=ids).logits, plain(input_ids=ids).logits, atol=1e-5)
    assert not getattr(merged, "is_quantized", False)


def test_weights_that_sample_ahead(tmp_path, base):
    """Of 4 bits they are shared; the scales of 8 bits cannot be."""
    ahead = {"rollout_lag": 1, "max_steps": 3}
    with pytest.raises(ConfigError, match="rollout_lag=1 cannot be combined with weights in 8 bits"):
        make(tmp_path / "eight", loaded(base, 8), lora(), **ahead)
    trainer = ran(make(tmp_path / "four", loaded(base, 4), lora(), **ahead))
    ratios = log_of(trainer, "sampling/ratio_max")
    assert ratios[0] == pytest.approx(1.0, abs=2e-2)  # the weights that sampled are those that are trained
    assert max(ratios) > 1.02


def test_outlier_columns_are_refused_because_they_depend_on_the_rows(tmp_path, base):
    with pytest.raises(SplitDependentError, match=r"14 in all; llm_int8_threshold=6\) pick outlier columns.*in 4 bits"):
        make(tmp_path, base, quantise={"load_in_8bit": True})
