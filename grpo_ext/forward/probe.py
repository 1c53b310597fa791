"""Rows on which a form of the forward is compared with padding before training begins (forward.choice).

Their tokens are drawn from the text of the vocabulary, by a generator of their own: no random state of the run moves,
and every process has the same rows. There are several groups of several completions, of unequal lengths. Where a layer
attends to a window of at most `_LONGEST_WINDOW` tokens, a further batch is longer than that; a model that makes the
mask of a longer window itself is refused by `forward.attention`. Prompts of a model that takes images go through its
processor, one of them with an image.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from .images import PromptProcessor, RowImages, images_in, messages_of
from .rope import covered_length
from .rows import TokenRows

_LONGEST_WINDOW = 1024
_WINDOW_NAMES = re.compile("(window|attention_chunk|local)(?!.*layers)")  # settings that hold a width of attention
_PROMPTS, _COMPLETIONS = (11, 7), ((24, 2, 9), (16, 20))  # tokens
_AFTER_LONG = (24, 9)  # tokens of the completions of a long prompt
_TEXT = "how many birds sit on the wall and which of them can be seen from here "
_Prompt = tuple[torch.Tensor, list[Any]]  # token ids, and the images


def probe_rows(policy: Any, tokenizer: Any, processor: PromptProcessor | None = None) -> list[TokenRows]:
    """Batches of rows for a causal language model, without wrappers.

    Args:
        processor: prepares the prompts of a model that takes images.
    """
    generator = torch.Generator().manual_seed(0)
    ids, limit = torch.tensor(_text_ids(policy.config, tokenizer)), _longest_row(policy.config)
    window = _longest_window(policy.config)
    long = window + max(window // 8, 8) if window > min(_PROMPTS) else 0

    def drawn(length: int) -> torch.Tensor:
        return ids[torch.randint(len(ids), (length,), generator=generator)]

    if processor is not None:
        image = torch.randint(256, (32, 64, 3), generator=generator, dtype=torch.uint8)
        prompts = [_prepared(processor, _TEXT, image), _prepared(processor, _TEXT)]
        long_prompts = [_prepared(processor, _TEXT * (1 + long // 15))] if long else []
        return [_rows(part, drawn, processor=processor) for part in (prompts, long_prompts) if part]
    shorter = 1.0 if limit is None else min(1.0, limit / (max(_PROMPTS) + max(map(max, _COMPLETIONS))))
    batches = [_rows([(drawn(max(1, int(n * shorter))), []) for n in _PROMPTS], drawn, shorter)]
    if limit is not None:
        long = min(long, limit - max(_AFTER_LONG))
    return [*batches, _rows([(drawn(long), [])], drawn)] if long > max(_PROMPTS) else batches


def _rows(
    prompts: Sequence[_Prompt],
    drawn: Callable[[int], torch.Tensor],
    shorter: float = 1.0,
    processor: PromptProcessor | None = None,
) -> TokenRows:
    """Rows of several prompts, or of a long one; completions are `shorter` by a factor, but two tokens at least."""
    lengths = [
        (n, length) for n, group in enumerate(_COMPLETIONS if len(prompts) > 1 else [_AFTER_LONG]) for length in group
    ]
    groups, completions = [n for n, _ in lengths], [max(2, int(length * shorter)) for _, length in lengths]
    parts = [part for n, length in zip(groups, completions, strict=True) for part in (prompts[n][0], drawn(length))]
    same = [before == after for before, after in pairwise(groups)]
    images = None if processor is None else RowImages(groups, lambda number: prompts[number][1], processor)
    return TokenRows(torch.cat(parts), [len(prompts[n][0]) for n in groups], completions, same, images)


def _text_ids(config: Any, tokenizer: Any) -> list[int]:
    """The ids of a vocabulary that stand for text, not for special tokens, added tokens or images."""
    text = config.get_text_config()
    settings = (vars(config) | vars(text)).items()
    special = {value for name, value in settings if re.search("_token_(id|index)$", name) and isinstance(value, int)}
    special |= {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    vocabulary = range(min(text.vocab_size, len(tokenizer)))
    return [token for token in vocabulary if token not in special] or list(vocabulary)


def _longest_row(config: Any) -> int | None:
    """The longest row that a model takes before its rotary frequencies change, in tokens; None without a limit."""
    original = getattr(config.get_text_config(), "original_max_position_embeddings", None)
    return min((limit for limit in (covered_length(config), original) if isinstance(limit, int)), default=None)


def _longest_window(config: Any) -> int:
    """The longest window of attention that a model's settings name, up to `_LONGEST_WINDOW` tokens; 0 without one."""
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
