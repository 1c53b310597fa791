"""Tiny models with adapters, and what of them is sent to vLLM; without an engine."""

import copy
from types import SimpleNamespace
from typing import Any

import torch
from peft import LoHaConfig, LoraConfig, get_peft_model
from trl.distributed import DistributedBackend

from grpo_ext.sampling.vllm_weights import Generation
from tests.support.tiny import tiny_model
from tests.support.trainers import LORA

KINDS: dict[str, Any] = {
    "lora": LoraConfig(**LORA, init_lora_weights=False),
    "dora": LoraConfig(**LORA, use_dora=True, init_lora_weights=False),
    "embedding": LoraConfig(r=4, target_modules=["embed_tokens", "up_proj"], init_lora_weights=False),
    "saved": LoraConfig(r=4, target_modules=["o_proj"], modules_to_save=["norm"], init_lora_weights=False),
    "bias": LoraConfig(r=4, target_modules=["q_proj"], lora_bias=True, init_lora_weights=False),
    "none": None,
    "loha": LoHaConfig(r=4, target_modules=["q_proj", "v_proj"], init_weights=False),
}


def adapted(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    model, adapter = tiny_model("qwen2").to(dtype), copy.deepcopy(KINDS[kind])
    return model if adapter is None else get_peft_model(model, adapter)


def generation(model: Any, cls: Any = Generation) -> Any:
    new = cls.__new__(cls)
    accelerator = SimpleNamespace(device=torch.device("cpu"), is_main_process=True)
    state = SimpleNamespace(deepspeed_plugin=None, fsdp_plugin=None)
    backend = DistributedBackend(SimpleNamespace(state=state))
    vars(new).update(model=model, accelerator=accelerator, _dist=backend, versions=None)
    return new


def sent(model: Any, cls: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in generation(model, cls)._iter_named_params()}
