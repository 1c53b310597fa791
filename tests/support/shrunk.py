"""A tiny random model of every causal architecture of the installed transformers, by one set of small sizes.

A setting gets a small value by its name, in every part of a configuration; architectures whose sizes depend on each
other have more in `_FURTHER` (tests/support/architectures.py has those that other tests use).
"""

import inspect
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.support.architectures import MODELS, random_model

CAUSAL = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
_MOST_WEIGHTS = 20_000_000

# by the value all settings that get it
_VALUES: list[tuple[Any, str]] = [
    (60, "vocab_size vocab_size_per_layer_input"),
    (32, "input_embedding_size output_embedding_size"),
    (32, "hidden_size d_model n_embd dim embedding_size decoder_hidden_size attention_hidden_size lru_width block_dim"),
    (48, "intermediate_size ffn_hidden_size n_inner decoder_ffn_dim ffn_dim block_ff_dim intermediate_size_mlp dff"),
    (4, "num_hidden_layers n_layer n_layers num_layers decoder_layers"),
    (4, "num_attention_heads n_head n_heads decoder_attention_heads num_heads"),
    (2, "num_key_value_heads num_kv_heads"),
    (8, "head_dim kv_channels dim_head qk_nope_head_dim qk_rope_head_dim v_head_dim"),
    (256, "max_position_embeddings n_positions max_seq_len n_ctx max_target_positions"),
    (0, "pad_token_id"),
    (1, "eos_token_id bos_token_id decoder_start_token_id"),
    (0.0, "dropout attention_dropout activation_dropout hidden_dropout resid_pdrop embd_pdrop attn_pdrop layerdrop"),
    (0.0, "hidden_dropout_prob attention_probs_dropout_prob residual_dropout embedding_dropout decoder_layerdrop"),
    (4, "num_experts num_local_experts n_routed_experts moe_num_experts"),
    (2, "num_experts_per_tok num_experts_per_token moe_topk moe_k top_k_experts"),
    (16, "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size kv_lora_rank q_lora_rank"),
    (1, "n_group topk_group n_shared_experts num_shared_experts first_k_dense_replace num_dense_layers encoder_layers"),
    (6, "sliding_window attention_window_size window_size attention_chunk_size"),
    (True, "is_decoder"),
    (0.2, "initializer_range init_std"),
    (8, "hidden_size_per_layer_input"),
    (0, "num_kv_shared_layers"),
    (4, "rotary_dim"),
    (4, "linear_num_value_heads"),
    (2, "linear_num_key_heads"),
    (8, "linear_key_head_dim linear_value_head_dim"),
]
_SMALL = {name: value for value, names in _VALUES for name in names.split()}
_FURTHER: dict[str, dict[str, Any]] = {
    **MODELS,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"head_dim": 8},
    "mpt": {"attn_config": None},
    "dots3_note_text": {"num_key_value_heads": 4},
    "kimi_linear": {
        **{"linear_head_dim": 8, "linear_num_heads": 4},
        **{"layer_types": ["linear_attention", "full_attention"] * 2},
    },
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}


def shrunk(kind: str, seed: int = 0) -> Any:
    """A random causal language model of a kind; fails where its configuration takes other sizes."""
    settings = _settings(CONFIG_MAPPING[kind]) | _FURTHER.get(kind, {})
    config = CONFIG_MAPPING[kind](**{name: value for name, value in settings.items() if value is not None})
    with torch.device("meta"):
        weights = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if weights > _MOST_WEIGHTS:
        raise ValueError(f"it has {weights / 1e6:,.0f} million weights")
    return random_model(config, seed)


def _settings(cls: Any) -> dict[str, Any]:
    names = {name for base in cls.__mro__ for name in getattr(base, "__annotations__", {})}
    names |= set(inspect.signature(cls).parameters)
    settings = {name: value for name, value in _SMALL.items() if name in names}
    if "qk_rope_head_dim" in names:  # latent attention: every head has keys of its own, of two widths
        settings |= {"head_dim": None, "num_key_value_heads": None}
    for name, part in getattr(cls, "sub_configs", {}).items():
        if hasattr(part, "model_type"):
            settings[name] = _settings(part)
    return settings
