"""Checks of the data once a trainer is built: prompts in its template, unknown tokens, lengths, images that change."""

import itertools
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..errors import DataError, refuse_split_dependence
from ..forward.architecture import base_model_of
from ..forward.images import images_of
from ..forward.rope import fix_rope_frequencies
from ..rollouts.chat import Chat
from ..rollouts.settings import SCORE, chat_of
from ..sampling.keyed import NEW_TOKENS
from ..sampling.sampler import Sampler
from ..settings import refuse_excluded
from ..upstream.data_checks import (
    ROW_KWARGS,
    Survey,
    check_prompt_lengths,
    has_readable_prompts,
    has_settings,
    kind_of,
    named_sets,
    prompts_of,
    sample_rows,
    with_length,
)
from ..view import TrainerView


def check_kinds(dataset: Any, split: str, chat: Chat, survey: Survey | None) -> None:
    """Check a prompt of every kind, and prompts with unknown tokens; a few of the rows that a transform makes."""
    beyond = [] if chat.embedded is None else list(range(chat.embedded, len(chat.tokenizer)))
    unknown = [token for token in chat.tokenizer.convert_ids_to_tokens(beyond) if token]  # ids may have gaps
    if survey is None:
        numbers = sample_rows(dataset) if hasattr(dataset, "__len__") else []
        rows: Any = ((number, dataset[number]["prompt"], dataset[number].get(ROW_KWARGS)) for number in numbers)
    elif unknown or chat.placeholders:  # a text may be in any row
        rows = ((number, *pair) for number, pair in enumerate(prompts_of(dataset)))
    else:
        rows = survey.kinds.values()
    kinds: set[Any] = set()
    for number, prompt, kwargs in rows:
        try:
            chat.check(prompt)
            if (kind := kind_of(prompt, kwargs)) not in kinds or any(token in str(prompt) for token in unknown):
                kinds.add(kind)
                if not chat.takes_images:  # `check_images` prepares some
                    ids = chat.of_row({"prompt": prompt, ROW_KWARGS: kwargs}).tokenize(prompt)
                    chat.check_ids(ids, f"the prompt {reprlib.repr(prompt)}")
        except DataError as error:
            raise DataError(f"row {number} of the {split} data set: {error}") from error


def check_images(dataset: Any, prepare: Any) -> None:
    """Check a few rows for images that nothing reads, beside a text, or that change; `prepare`: None for text."""
    for number in sample_rows(dataset):
        row = dataset[number]
        if prepare is None:
            if images_of(row):
                raise DataError(
                    "the data has images, and the processing class is a tokenizer, which ignores them: pass the "
                    "processor of a model that takes images as processing_class (default: the model's), or remove the "
                    "columns image and images."
                )
            continue
        if isinstance(row["prompt"], str) and images_of(row):
            raise DataError(
                f"row {number} of the data set has images and a prompt that is text; make it messages, for example "
                "[{'role': 'user', 'content': prompt}], which the chat template gives places for the images."
            )
        first, second = prepare(row), prepare(dataset[number])
        if any(not torch.equal(first[name], second[name]) for name in first):
            raise DataError(
                f"row {number} of the data set gives other images when it is read again (a transform that draws random "
                "numbers?), so a run would depend on the split and on where it was resumed; change images beforehand, "
                "with dataset.map."
            )


def check_tokens(view: TrainerView, sampler: Sampler, surveys: Mapping[str, Survey]) -> None:
    chat, pad = chat_of(view), view.tokenizer.pad_token_id
    ends = sampler.ends - {pad} | {*view.eos_token_ids}
    sets = named_sets(view.train_dataset, view.eval_dataset)
    for token in {*ends, *((pad,) if sampler.pads else ())}:
        shown = repr(chat.tokenizer.convert_ids_to_tokens(token))
        chat.check_ids([token], f"the {'end' if token in ends else 'padding'} token {shown}")
    if any(map(has_settings, sets.values())):
        facts = {"rollout_func": view.rollout_func, "remove_unused_columns": view.args.remove_unused_columns}
        remedy = "It would be ignored; leave one of the two out."
        refuse_excluded(f"data.by_column.{ROW_KWARGS}", f"a column {ROW_KWARGS!r}", facts, remedy)
    replaced = view.overridden(SCORE) or view.rollout_func is not None
    if not (replaced or view.environment_factories):  # which may take, or make, other prompts
        for split, dataset in sets.items():
            check_kinds(dataset, split, chat, surveys.get(split))


def check_lengths(view: TrainerView, survey: Survey | None, allow_split_dependent: bool) -> list[str]:
    """Refuse prompts that do not fit; returns allowed dependences on the length of a forward, as sentences."""
    dataset = view.train_dataset
    # tokens of a prompt with images are known once the images are prepared, and a row's settings may add some
    readable = view.environment_factories is None and not view.takes_images and not has_settings(dataset)

    def lengths(prompts: list[Any]) -> list[int]:
        return [len(ids) for ids in view.tokenize_prompts(prompts)[0]]

    if readable and survey is not None:
        longest = view.max_completion_length or NEW_TOKENS
        for model in view.models:
            check_prompt_lengths(survey, lengths, base_model_of(model).config, longest)
    dependent = fix_rope_frequencies(
        [base_model_of(model) for model in view.models], lambda: _longest_sequence(view, lengths) if readable else None
    )
    return refuse_split_dependence([] if dependent is None else [dependent], allow_split_dependent)


def _longest_sequence(view: TrainerView, lengths: Callable[[list[Any]], list[int]]) -> int | None:
    """Tokens of the longest prompt of all data sets and max_completion_length; None where it is not known."""
    train = view.train_dataset
    data_sets = [data for data in with_length(train, view.eval_dataset) if has_readable_prompts(data)]
    if all(data is not train for data in data_sets) or not view.max_completion_length:
        return None
    prompts = (prompt for data in data_sets for prompt, _ in prompts_of(data))
    longest = 0
    while block := list(itertools.islice(prompts, 256)):
        longest = max(longest, *lengths(block))
    return longest + view.max_completion_length
