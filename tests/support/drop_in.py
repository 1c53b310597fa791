"""Trainers as a user of TRL makes them: any model, rewards, data, tokenizer, environments and tools."""

from __future__ import annotations

from pathlib import Path

import trl
from datasets import Dataset

from grpo_ext import GRPOConfig, GRPOTrainer
from tests.support.tiny import config_kwargs, letter_reward, prompts, tiny_model, tiny_tokenizer


def make(tmp_path, model=None, rewards=letter_reward, dataset=None, tokenizer=None, extra=None, **settings):
    return GRPOTrainer(
        model=tiny_model() if model is None else model,
        reward_funcs=rewards,
        args=GRPOConfig(**config_kwargs(tmp_path / "out", **settings)),
        train_dataset=prompts() if dataset is None else dataset,
        processing_class=tokenizer or tiny_tokenizer(),
        **(extra or {}),
    )


def conversations(count=8):
    rows = prompts(count)
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": p}] for p in rows["prompt"]]})


class CountingGame:
    """An environment that owns its reward."""

    def reset(self, **kwargs):
        self.guesses = 0
        return "guess"

    def guess(self, number: int) -> str:
        """Guess a number.

        Args:
            number: The guess.
        """
        self.guesses += 1
        return "higher"

    def get_reward(self) -> float:
        return float(self.guesses)


def tool_tokenizer():
    """A tokenizer with TRL's Qwen3 template: letters, and the special tokens of the template."""
    tokenizer = tiny_tokenizer()
    template = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"
    tokenizer.chat_template = template.read_text()
    tokens = ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>"]
    tokens += ["<tool_response>", "</tool_response>", "<tools>", "</tools>"]
    tokenizer.add_special_tokens({"additional_special_tokens": tokens[:2]})
    tokenizer.add_tokens([*tokens[2:], *(chr(c) for c in range(33, 127))])
    tokenizer.eos_token = "<|im_end|>"
    return tokenizer
