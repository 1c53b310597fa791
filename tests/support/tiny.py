"""Tiny models, data and rewards that the tests share; everything is made locally, nothing is downloaded."""

import functools
import random
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import pytest
import torch
from datasets import Dataset
from packaging.version import Version
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast

from grpo_ext.algorithms.policy_losses import register_policy_loss

LETTERS = "abcdefgh"
TINY = ("qwen2", "llama", "gpt2", "moe")
STOCK_SCORES = Version(version("trl")) >= Version("1.16") or torch.cuda.is_available()
stock_scores = pytest.mark.skipif(not STOCK_SCORES, reason="stock TRL before 1.16 cannot score on a CPU")
_VOCABULARY = ["<pad>", "<eos>", "<unk>", *"abcdefghijklmnopqrstuvwxyz0123456789 >:+-=|.,?!\n<>/[]{}\"'_"]
_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
    "initializer_range": 0.2,
}
_OF_KIND: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen2_moe": {
        **{"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 4},
        **{"num_experts_per_tok": 2, "router_aux_loss_coef": 0.1},
    },
    "gpt2": {
        **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "initializer_range": 0.2},
        **{"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
        **{"eos_token_id": 1, "bos_token_id": 1, "pad_token_id": 0},
    },
}


def tiny_tokenizer(chat: bool = False, tokens: Sequence[str] = _VOCABULARY) -> PreTrainedTokenizerFast:
    """One token a character; with a minimal chat template if asked for. Longer tokens are sampled, and never read."""
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )
    if chat:
        fast.chat_template = (
            "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}|{% endfor %}"
            "{% if add_generation_prompt %}a:{% endif %}"
        )
    return fast


def tokenizer_with(chat: bool = False, **changes: Any) -> PreTrainedTokenizerFast:
    """The tokenizer with other attributes, as `pad_token="a"`."""
    tokenizer = tiny_tokenizer(chat)
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    return tokenizer


def tiny_config(kind: str, **overrides: Any) -> Any:
    """The configuration of `tiny_model`."""
    name = "qwen2_moe" if kind == "moe" else kind
    sizes = {**({} if kind == "gpt2" else _SIZES), **_OF_KIND.get(name, {})}
    return AutoConfig.for_model(name, **{"vocab_size": len(tiny_tokenizer()), **sizes, **overrides})


def tiny_model(kind: str = "qwen2", seed: int = 0, **overrides: Any) -> Any:
    """A random causal model of about 20 thousand parameters: a model type of transformers, or moe (Qwen2's)."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(tiny_config(kind, **overrides))


def own_config(**settings: Any) -> Any:
    """A model whose own generation_config has these settings."""
    model = tiny_model()
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    return model


def tiny_scorer() -> Any:
    """A random reward model."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForSequenceClassification.from_config(tiny_config("llama", num_labels=1))


@functools.cache
def prompts(count: int = 22, seed: int = 0) -> Dataset:
    """Prompts of 3 to 10 characters, with a column the rewards may use."""
    source = random.Random(seed)
    rows = ["".join(source.choice(LETTERS) for _ in range(source.randint(2, 9))) + ">" for _ in range(count)]
    return Dataset.from_dict({"prompt": rows, "answer": ["".join(sorted(row[:-1])) for row in rows]})


def letter_reward(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
    """Letters of the prompt that come back, less a little per character: varies within every group."""
    return [float(sum(c in p for c in text)) - 0.1 * len(text) for p, text in zip(prompts, completions)]


def sparse_reward(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float | None]:
    """A second objective that does not apply to every completion."""
    return [None if len(text) % 3 == 0 else float("a" in text) for text in completions]


@register_policy_loss("topr_near")
def topr_near(
    logps_BT: torch.Tensor, old_BT: torch.Tensor, advantages_B1: torch.Tensor, mask_BT: torch.Tensor
) -> torch.Tensor:
    """TOPR (arXiv 2503.14286) with a square that keeps the policy near the old one, at advantage zero too."""
    ratio_BT = (logps_BT - old_BT).detach().exp().clamp(max=1)
    weights_BT = torch.where(advantages_B1 > 0, 1.0, ratio_BT)
    return -weights_BT * advantages_B1 * logps_BT + 0.5 * (logps_BT - old_BT) ** 2


def tool(function: Any) -> Any:
    """A function of one number, with a docstring of which TRL makes its schema."""
    function.__doc__ = f"The tool {function.__name__}.\n\nArgs:\n    number: A number."
    return function


def with_calls(tokenizer: Any, called: Callable[[list[int]], list[tuple[str, int]]]) -> Any:
    """The tokenizer, which finds in the ids of a completion the calls that `called` returns: (tool, number)."""

    def parse_response(ids: list[int], **kwargs: Any) -> dict[str, Any]:
        calls = [
            {"type": "function", "function": {"name": name, "arguments": {"number": number}}}
            for name, number in called(list(ids))
        ]
        message = {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}
        return message | ({"tool_calls": calls} if calls else {})

    tokenizer.response_template, tokenizer.parse_response = {}, parse_response
    return tokenizer


def given_rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """A `rollout_func`: two turns between which an environment writes, whose prompts may differ within a group."""
    tokenizer, group = trainer.processing_class, trainer.num_generations
    found: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "logprobs": [], "env_mask": [], "turns": []}
    for row, prompt in enumerate(prompts):
        source = random.Random(f"{prompt}/{row % group}")
        seen = prompt + ("?" if row % group == 1 and len(prompt) % 2 else "")
        first, told, last = (source.choices(range(10, 40), k=source.randint(1, 5)) for _ in range(3))
        found["prompt_ids"].append(tokenizer(seen)["input_ids"])
        found["completion_ids"].append([*first, *told, *last, tokenizer.eos_token_id])
        found["logprobs"].append([-1.0] * (len(first) + len(told) + len(last) + 1))
        found["env_mask"].append([1] * len(first) + [0] * len(told) + [1] * (len(last) + 1))
        found["turns"].append(2)
    return found


def gathering_rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """A `rollout_func` with a collective of its own, and values of other types."""
    found = given_rollout(prompts, trainer)
    masks = [[bool(value) for value in row] for row in found["env_mask"]]
    trainer.accelerator.gather(torch.ones(1))
    return {**found, "env_mask": masks, "logprobs": [[-1] * len(row) for row in masks]}


def generated_rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """A `rollout_func` that samples twice with the trainer's engine, and keeps the shorter completions."""
    first, second = trainer.generate(prompts), trainer.generate(prompts)
    shorter = [len(a) <= len(b) for a, b in zip(first["completion_ids"], second["completion_ids"])]
    columns = {name for name in first if first[name] is not None}
    return {n: [(a, b)[not s] for a, b, s in zip(first[n], second[n], shorter)] for n in columns} | {"logprobs": None}


def config_kwargs(folder: Any, **overrides: Any) -> dict[str, Any]:
    """Settings of a short, quiet run."""
    return {
        "output_dir": str(folder),
        "global_batch_size": 16,
        "num_generations": 4,
        "per_device_train_batch_size": 5,
        "rollout_chunk_size": 8,
        "max_completion_length": 12,
        "max_steps": 2,
        "learning_rate": 1e-3,
        "gradient_checkpointing": False,
        "bf16": False,
        "report_to": "none",
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 3,
        **overrides,
    }
