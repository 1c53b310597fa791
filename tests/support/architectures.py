"""Tiny random models of many architectures, for forms of the forward that should run on all of them."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.tiny import tiny_tokenizer

_SIZES: dict[str, Any] = {
    "vocab_size": len(tiny_tokenizer()),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 1,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_GROUPED_EXPERTS = {
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    **{"moe_intermediate_size": 16, "first_k_dense_replace": 1},
}
_DELTA = {
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_chunk_size": 8}
_LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "llama": {},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "mistral": {"sliding_window": 6},
    "gemma2": {"sliding_window": 6},
    "gpt_oss": {**_LOCAL_EXPERTS, "sliding_window": 6},
    "deepseek_v3": {**_LATENT, **_GROUPED_EXPERTS, "num_key_value_heads": 4, "q_lora_rank": 16, "head_dim": None},
    "llama4_text": {"intermediate_size_mlp": 48, "num_local_experts": 2, "attention_chunk_size": 8},
    "qwen3_next": {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_5_text": _DELTA,
    "olmo_hybrid": {},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64},
    "lfm2": {**{"layer_types": ["conv", "full_attention"] * 2, "block_dim": 32, "block_ff_dim": 48}},
    "granitemoehybrid": {
        **{**_MAMBA, **_LOCAL_EXPERTS, "mamba_expand": 2, "shared_intermediate_size": 16},
        **{"layer_types": ["mamba", "attention"] * 2, "layers_block_type": ["mamba", "attention"] * 2},
    },
    "nemotron_h": {
        **{"hybrid_override_pattern": "M*M-", "mamba_num_heads": 8, "mamba_head_dim": 8},
        **{"n_groups": 1, "ssm_state_size": 16, "chunk_size": 8},
    },
    "bamba": {**_MAMBA, "attn_layer_indices": [1, 3]},
    "zamba2": {
        **{"layers_block_type": ["mamba", "hybrid", "mamba", "mamba"], "mamba_ngroups": 1, "n_mamba_heads": 8},
        **{"mamba_headdim": 8, "mamba_d_state": 16, "mamba_expand": 2, "chunk_size": 8, "num_mem_blocks": 1},
        **{"use_mem_rope": False, "head_dim": None},
    },
    # experts alone
    "mixtral": _LOCAL_EXPERTS,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": _EXPERTS,
    "glm4_moe": _GROUPED_EXPERTS,
    "phimoe": _LOCAL_EXPERTS,
    # these reshape the output of attention by `view`
    "afmoe": {**_EXPERTS, "sliding_window": 6},
    "jetmoe": {**_LOCAL_EXPERTS, "kv_channels": 8},
    # these run no completions behind a cached prompt
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "use_mamba_kernels": False},
    "minimax": {**_LOCAL_EXPERTS, "block_size": 8},
    "mamba2": {
        **{"num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 16, "chunk_size": 8, "num_hidden_layers": 2}
    },
}
REFUSING = ("jamba", "minimax", "mamba2")
VIEWING = ("afmoe", "jetmoe")
ROUTED = ("mixtral", "olmoe", "qwen3_moe", "glm4_moe", "phimoe", *VIEWING)  # other forms may choose another expert
PREFIXED = tuple(name for name in MODELS if name not in (*REFUSING, *ROUTED))
HYBRID = PREFIXED[PREFIXED.index("qwen3_next") :]


def architecture(kind: str, seed: int = 0, **overrides: Any) -> Any:
    """A random causal language model of small sizes."""
    sizes = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256} if kind == "gpt2" else _SIZES
    wanted = {**sizes, "vocab_size": _SIZES["vocab_size"], **MODELS.get(kind, {}), **overrides}
    config = AutoConfig.for_model(kind, **{name: value for name, value in wanted.items() if value is not None})
    return random_model(config, seed)


def random_model(config: Any, seed: int) -> Any:
    """A random causal language model; what training would have moved away from its start (norms, decays) is moved."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data += 0.1 * torch.randn_like(parameter)
    return model
