"""Weights for vLLM: merged into copies, as TRL names and merges them; which adapters vLLM can serve by themselves."""

import copy
from pathlib import Path

import pytest
import torch
from peft import LoHaConfig, LoraConfig, PeftModel, get_peft_model
from trl.generation.vllm_generation import VLLMGeneration

from grpo_ext.sampling.vllm_weights import Generation, why_not_alone
from tests.support.launch import two_processes
from tests.support.tiny import tiny_model
from tests.support.trainers import LORA
from tests.support.vllm_weights import KINDS, adapted, generation, sent


@pytest.mark.parametrize("kind", KINDS)
def test_names_and_weights_are_those_that_trl_sends(kind):
    model = adapted(kind)
    before = copy.deepcopy(model.state_dict())
    ours = sent(model, Generation)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(getattr(module, "merged_adapters", None) for module in model.modules())
    theirs = sent(model, VLLMGeneration)
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name
    moved = [name for name, value in tiny_model("qwen2").named_parameters() if not torch.equal(ours[name], value)]
    assert bool(moved) == (kind != "none")  # an adapter that does something


def test_fifty_syncs_leave_a_bfloat16_base_as_it_was():
    """The control: TRL's way moves it."""
    moved = {}
    for cls in (Generation, VLLMGeneration):
        model = adapted("lora", torch.bfloat16)
        before = {name: value.clone() for name, value in model.named_parameters()}
        for _ in range(50):
            for _ in generation(model, cls)._iter_named_params():
                pass
        moved[cls] = sum(int((value != before[name]).sum()) for name, value in model.named_parameters())
    assert moved[Generation] == 0
    assert moved[VLLMGeneration] > 100


def test_shards_of_fsdp2_are_merged_and_saved_whole(tmp_path):
    status, output = two_processes(Path(__file__).with_name("fsdp2_weights.py"), str(tmp_path / "adapter"))
    assert status == 0, output[-3000:]
    loaded, ids = PeftModel.from_pretrained(tiny_model("qwen2"), tmp_path / "adapter"), torch.tensor([[3, 4, 5]])
    assert torch.equal(loaded(input_ids=ids).logits, adapted("lora")(input_ids=ids).logits)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (None, "the model has no adapter"),
        (LoraConfig(**LORA), None),
        (LoraConfig(r=16, target_modules=["q_proj"]), "rank is 16"),
        (LoraConfig(**LORA, use_dora=True), "use_dora=True"),
        (LoraConfig(**LORA, modules_to_save=["norm"]), "modules_to_save"),
        (LoraConfig(**LORA, bias="lora_only"), "bias='lora_only'"),
        (LoraConfig(**LORA, alora_invocation_tokens=[3]), "alora_invocation_tokens"),
        (LoraConfig(**LORA, init_lora_weights="pissa"), "init_lora_weights='pissa'"),
        (LoraConfig(r=4, target_modules=["embed_tokens"]), "Embedding"),
        (LoHaConfig(r=4, target_modules=["q_proj"]), "not one LoRA"),
    ],
)
def test_adapters_that_vllm_cannot_serve_are_merged(config, reason):
    why = why_not_alone(tiny_model() if config is None else get_peft_model(tiny_model(), config), max_rank=8)
    assert why is None if reason is None else reason in why
