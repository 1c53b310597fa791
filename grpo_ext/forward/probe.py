"""Rows on which a form of the forward is compared with padding before training begins (forward.choice).

A generator of their own draws their tokens: no random state of the run moves, and every process has the same rows.
Where a layer attends to a window of at most `_LONGEST_WINDOW` tokens, a further batch is longer than that; a model that
makes the mask of a longer window itself is refused by `forward.attention`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from .images import PromptProcessor, RowImages, images_in, messages_of
from .rope import covered_length
from .rows import TokenRows

_LONGEST_WINDOW = 1024
_WINDOW_NAMES = re.compile("(window|attention_chunk|local)(?!.*layers)")  # settings that hold a width of attention
_PROMPTS, _COMPLETIONS = (9, 7), ((18, 2, 12), (9, 14))  # tokens
_AFTER_LONG = (24, 9)  # tokens of the completions of a long prompt
_TEXT = "how many birds sit on the wall and which of them can be seen from here "
_Prompt = tuple[torch.Tensor, list[Any]]  # token ids, and the images


def probe_rows(policy: Any, tokenizer: Any, processor: PromptProcessor | None = None) -> list[TokenRows]:
    """Batches of rows for a model without wrappers; `processor`: of a model that takes images."""
    generator, limit = torch.Generator().manual_seed(0), _longest_row(policy.config)
    ids, window = torch.tensor(_text_ids(policy.config, tokenizer)), _longest_window(policy.config)
    long = min(window + max(window // 8, 8), limit - max(_AFTER_LONG)) if window > min(_PROMPTS) else 0

    def drawn(length: int) -> torch.Tensor:
        return ids[torch.randint(len(ids), (min(length, limit // 2),), generator=generator)]

    def rows(prompts: list[_Prompt], lengths: Sequence[Sequence[int]]) -> TokenRows:
        groups = [number for number, group in enumerate(lengths) for _ in group]
        completions = [drawn(length) for group in lengths for length in group]
        parts = [part for n, ids in zip(groups, completions, strict=True) for part in (prompts[n][0], ids)]
        same = [before == after for before, after in pairwise(groups)]
        images = None if processor is None else RowImages(groups, lambda number: prompts[number][1], processor)
        return TokenRows(
            torch.cat(parts), [len(prompts[n][0]) for n in groups], list(map(len, completions)), same, images
        )

    if processor is None:
        prompts: list[_Prompt] = [(drawn(length), []) for length in _PROMPTS]
        long_prompt: _Prompt = ids[torch.randint(len(ids), (max(long, 0),), generator=generator)], []
    else:
        image = torch.randint(256, (32, 64, 3), generator=generator, dtype=torch.uint8)
        prompts = [_prepared(processor, _TEXT, image), _prepared(processor, _TEXT)]
        long_prompt = _prepared(processor, _TEXT * (1 + long // 15))
    batches = [rows(prompts, _COMPLETIONS)]
    return [*batches, rows([long_prompt], [_AFTER_LONG])] if long > max(_PROMPTS) else batches


def _text_ids(config: Any, tokenizer: Any) -> list[int]:
    """Ids of text: no special tokens, added tokens or images."""
    text = config.get_text_config()
    settings = (vars(config) | vars(text)).items()
    special = {value for name, value in settings if re.search("_token_(id|index)$", name) and isinstance(value, int)}
    special |= {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    vocabulary = range(min(text.vocab_size, len(tokenizer)))
    return [token for token in vocabulary if token not in special] or list(vocabulary)


def _longest_row(config: Any) -> int:
    """The longest row whose rotary frequencies are those of shorter ones, in tokens."""
    original = getattr(config.get_text_config(), "original_max_position_embeddings", None)
    return min(limit for limit in (covered_length(config), original, 2 * _LONGEST_WINDOW) if isinstance(limit, int))


def _longest_window(config: Any) -> int:
    """The longest window of attention up to `_LONGEST_WINDOW` tokens; 0 without one."""
    settings = vars(config.get_text_config()).items()
    widths = [value for name, value in settings if _WINDOW_NAMES.search(name) and type(value) is int]
    return max((width for width in widths if width <= _LONGEST_WINDOW), default=0)


def _prepared(processor: PromptProcessor, text: str, image: torch.Tensor | None = None) -> _Prompt:
    row: dict[str, Any] = {"prompt": [{"role": "user", "content": text}]}
    if image is not None:
        from PIL import Image  # not installed where only text is trained on

        row["image"] = Image.fromarray(image.numpy())
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
    conversation = [messages_of(row)]
    encoded = processor.processor.apply_chat_template(conversation=conversation, **options, **processor.template)
    return encoded["input_ids"][0], images_in(conversation[0])
