"""Checks of the data before training: prompts that are missing, empty, too long or unknown, and images that change."""

import itertools
import reprlib
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import DataError, refuse_split_dependence
from ..forward.architecture import base_model_of
from ..forward.images import images_of
from ..forward.rope import covered_length, fix_rope_frequencies
from ..rollouts.chat import ROW_KWARGS, Chat
from ..rollouts.settings import SCORE, chat_of
from ..sampling.keyed import NEW_TOKENS
from ..sampling.sampler import Sampler
from ..settings import refuse_excluded
from ..view import TrainerView


def named_sets(train: Any, evaluation: Any) -> dict[str, Any]:
    """The training set and every evaluation set, by what messages call them."""
    if isinstance(train, dict) and all(hasattr(part, "column_names") for part in train.values()):
        names = ", ".join(map(repr, train))
        raise DataError(
            f"train_dataset has the splits {names}; pass one of them, as dataset[{next(iter(train), '')!r}]."
        )
    named = {"training": train}
    if isinstance(evaluation, dict):
        named |= {f"evaluation '{name}'": dataset for name, dataset in evaluation.items()}
    else:
        named["evaluation"] = evaluation
    return {split: dataset for split, dataset in named.items() if dataset is not None}


def with_length(train: Any, evaluation: Any) -> list[Any]:
    """The data sets that can be read before training: not empty, and not streams."""
    return [data for data in named_sets(train, evaluation).values() if hasattr(data, "__len__") and len(data)]


@dataclass
class Survey:
    """What one pass over the prompts of a data set has found, for all checks of them."""

    dataset: Any
    kinds: dict[Any, tuple[int, Any, Any]]  # the first row of each kind: its number, prompt, settings of the template
    sizes: "array[int]"  # bytes of each prompt

    def larger_than(self, size: int) -> list[tuple[int, Any]]:
        """Number and prompt of the rows whose prompts have more bytes."""
        rows = [row for row, known in enumerate(self.sizes) if known > size]
        return [(row, prompt) for row, (prompt, _) in zip(rows, _prompts(self.dataset.select(rows)), strict=True)]


def check_prompts(dataset: Any, split: str) -> Survey | None:
    """Refuse a data set without prompts, or with an empty one; None where they cannot be read before training."""
    if hasattr(dataset, "__len__") and len(dataset) == 0:
        raise DataError(f"the {split} data set is empty; it needs at least one row with a 'prompt' column.")
    if not has_readable_prompts(dataset):
        return None
    columns = dataset.column_names
    if "prompt" not in columns:
        raise DataError(
            f"the {split} data set has no 'prompt' column; it has {', '.join(columns)}; rename the column that holds"
            " the prompt, for example dataset.rename_column('question', 'prompt')."
        )
    if taken := {"prompts", "completions"} & set(columns):
        raise DataError(
            f"the {split} data set has a column {min(taken)!r}, a name under which reward functions get what was "
            "sampled; rename or remove the column."
        )
    survey = Survey(dataset, {}, array("q"))
    for row, (prompt, kwargs) in enumerate(_prompts(dataset)):
        if not prompt:
            raise DataError(
                f"row {row} of the {split} data set has an empty prompt ({prompt!r}); filter such rows out."
            )
        survey.kinds.setdefault(_kind(prompt, kwargs), (row, prompt, kwargs))
        survey.sizes.append(len(str(prompt).encode()))
    return survey


def _kind(prompt: Any, kwargs: Any) -> Any:
    """Roles in their order, what messages have, and settings: all that a template can treat differently."""
    if isinstance(prompt, str):
        return str(kwargs), str
    try:
        return str(kwargs), *((m["role"], *((name, type(m[name])) for name in m)) for m in prompt)
    except (TypeError, KeyError, AttributeError):  # no messages, which `Chat.check` refuses
        return type(prompt)


def has_readable_prompts(dataset: Any) -> bool:
    """Whether all prompts of a data set can be read before training: not those of a stream or of a transform."""
    transformed = getattr(dataset, "format", {}).get("type") == "custom"  # columns come into being row by row
    return hasattr(dataset, "select_columns") and hasattr(dataset, "__len__") and not transformed


def sample_rows(dataset: Any) -> list[int]:
    """A few rows of a data set whose rows are made when they are read."""
    return sorted({n * (len(dataset) - 1) // 3 for n in range(4)})


def has_settings(dataset: Any) -> bool:
    """Whether rows have settings of the chat template."""
    return ROW_KWARGS in (getattr(dataset, "column_names", None) or ())


def _prompts(dataset: Any) -> Iterator[tuple[Any, Any]]:
    """The prompt of each row, and its settings of the template; one pass."""
    names = ["prompt", ROW_KWARGS] if has_settings(dataset) else ["prompt"]
    for block in dataset.select_columns(names).iter(batch_size=1000):
        yield from itertools.zip_longest(block["prompt"], block.get(ROW_KWARGS, ()))


def check_kinds(dataset: Any, split: str, chat: Chat, survey: Survey | None) -> None:
    """Check a prompt of every kind, and prompts with unknown tokens; a few of the rows that a transform makes."""
    beyond = [] if chat.embedded is None else list(range(chat.embedded, len(chat.tokenizer)))
    unknown = [token for token in chat.tokenizer.convert_ids_to_tokens(beyond) if token]  # ids may have gaps
    if survey is None:
        numbers = sample_rows(dataset) if hasattr(dataset, "__len__") else []
        rows: Any = ((number, dataset[number]["prompt"], dataset[number].get(ROW_KWARGS)) for number in numbers)
    elif unknown or chat.placeholders:  # a text may be in any row
        rows = ((number, *pair) for number, pair in enumerate(_prompts(dataset)))
    else:
        rows = survey.kinds.values()
    kinds: set[Any] = set()
    for number, prompt, kwargs in rows:
        try:
            chat.check(prompt)
            if (kind := _kind(prompt, kwargs)) not in kinds or any(token in str(prompt) for token in unknown):
                kinds.add(kind)
                if not chat.takes_images:  # `check_images` prepares some
                    ids = chat.of_row({"prompt": prompt, ROW_KWARGS: kwargs}).tokenize(prompt)
                    chat.check_ids(ids, f"the prompt {reprlib.repr(prompt)}")
        except DataError as error:
            raise DataError(f"row {number} of the {split} data set: {error}") from error


def check_prompt_lengths(
    survey: Survey, lengths_of: Callable[[list[Any]], list[int]], config: Any, max_completion_length: int
) -> None:
    """Refuse prompts that the model has no positions for; rotary ones reach as far as their scaling."""
    limit, text = covered_length(config), config.get_text_config()
    if limit is None:
        return
    # a learned table of positions has none for the completion either
    absolute = getattr(text, "rope_parameters", None) is None and getattr(text, "rope_theta", None) is None
    room = limit - (max_completion_length if absolute else 0)
    # a token is at least one byte; the margin stands for what a chat template adds
    suspects = survey.larger_than(room - 512)
    lengths = lengths_of([prompt for _, prompt in suspects]) if suspects else []
    for (row, _), length in zip(suspects, lengths, strict=True):
        if length > room:
            less = f" - max_completion_length={max_completion_length}" if absolute else ", scaling included"
            raise DataError(
                f"the prompt in row {row} has {length} tokens, but the model has room for {room} "
                f"(max_position_embeddings={limit}{less}); shorten or filter long prompts"
                + (", or lower max_completion_length." if absolute else ".")
            )


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
    prompts = (prompt for data in data_sets for prompt, _ in _prompts(data))
    longest = 0
    while block := list(itertools.islice(prompts, 256)):
        longest = max(longest, *lengths(block))
    return longest + view.max_completion_length
