"""Data, an environment and a tokenizer as users of TRL have them."""

from pathlib import Path

import trl
from datasets import Dataset

from tests.support.tiny import prompts, tiny_tokenizer


def conversations(count=8, **columns):
    """Rows with a message each, and further columns."""
    messages = [[{"role": "user", "content": text}] for text in prompts(count)["prompt"]]
    return Dataset.from_dict({"prompt": messages, **columns})


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
