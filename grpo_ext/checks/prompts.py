"""Checks of the prompts and of the tokens in them, before training: what a first rollout would fail on.

Every kind of prompt that the data hold is tokenised once, as a rollout does it. What cannot be read before training
(streams) is checked by the same code in the first rollout (rollouts.chat).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..errors import ConfigError, DataError
from ..rollouts.build import SCORE, overridden
from ..rollouts.chat import Chat, check_prompt
from .data import has_readable_prompts, iterate_prompts, named_sets, sample_rows


def check_tokens(trainer: Any) -> None:
    """Refuse end tokens that the embedding has no row for, and prompts that cannot be tokenised.

    A vocabulary that is larger than the embedding is legal as long as the data do not use what is beyond.

    Raises:
        ConfigError: names the token; DataError: names the row.
    """
    chat: Chat = trainer._rollouts.worker.chat
    special = {"end": trainer.eos_token_ids, "padding": [trainer._rollouts.worker.settings.pad]}
    for kind, token in ((kind, token) for kind, tokens in special.items() for token in tokens):
        if chat.embedded is not None and token is not None and token >= chat.embedded:
            raise ConfigError(
                f"the {kind} token {chat.tokenizer.convert_ids_to_tokens(token)!r} has the id {token}, and the model's "
                f"embedding has {chat.embedded} rows; use the model's own tokenizer, or "
                "model.resize_token_embeddings(len(tokenizer))."
            )
    own = overridden(trainer, SCORE, "_generate", "_tokenize_prompts") or trainer.rollout_func
    if own or trainer.environment_factories is not None:  # which may take, or make, other prompts
        return
    for split, data in named_sets(trainer.train_dataset, trainer.eval_dataset).items():
        _check_kinds(data, split, chat)


def _check_kinds(data: Any, split: str, chat: Chat) -> None:
    outside = () if chat.embedded is None else range(chat.embedded, len(chat.tokenizer))
    unembedded = chat.tokenizer.convert_ids_to_tokens(list(outside))
    kinds: set[Any] = set()
    for row, prompt in _prompts(data):
        try:
            check_prompt(prompt)
            known = (kind := _kind(prompt)) in kinds and not any(token in str(prompt) for token in unembedded)
            kinds.add(kind)
            if not known and not chat.takes_images:  # `check_images` prepares those of some rows
                (ids,) = chat.tokenize([prompt], [None])
                chat.check_ids(ids, prompt)
        except DataError as error:
            raise DataError(f"row {row} of the {split} data set: {error}") from error


def _prompts(data: Any) -> Iterator[tuple[int, Any]]:
    """Rows and their prompts: all that can be read at once, some that are made row by row, none of a stream."""
    if has_readable_prompts(data):
        yield from enumerate(iterate_prompts(data))
    elif hasattr(data, "__len__"):
        yield from ((number, data[number]["prompt"]) for number in sample_rows(data))


def _kind(prompt: Any) -> Any:
    """What a chat template may treat in another way: the roles in their order, and what a message has."""
    if isinstance(prompt, str):
        return str
    return tuple((m["role"], *((name, type(m[name])) for name in sorted(m) if m[name] is not None)) for m in prompt)
