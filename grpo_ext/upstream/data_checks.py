"""Checks of the prompts of a data set before training: missing, empty, named like a reward's argument, or too long.

Repairs `trl.GRPOTrainer.__init__`, which takes such data and fails at the row, hours later, or trains beyond the
positions of the model. Until TRL checks it; last seen in 1.16. Used before TRL's constructor, and by `checks.data`.
"""

import sys
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from ..errors import DataError
from ..forward.rope import covered_length

ROW_KWARGS = "chat_template_kwargs"  # a column of the data: TRL's name for a row's settings of the template


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
        return [(row, prompt) for row, (prompt, _) in zip(rows, prompts_of(self.dataset.select(rows)), strict=True)]


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
    for row, (prompt, kwargs) in enumerate(prompts_of(dataset)):
        if not prompt:
            raise DataError(
                f"row {row} of the {split} data set has an empty prompt ({prompt!r}); filter such rows out."
            )
        survey.kinds.setdefault(kind_of(prompt, kwargs), (row, prompt, kwargs))
        survey.sizes.append(len(str(prompt).encode()))
    return survey


def kind_of(prompt: Any, kwargs: Any) -> Any:
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


def prompts_of(dataset: Any) -> Iterator[tuple[Any, Any]]:
    """The prompt of each row, and its settings of the template; one pass."""
    names = ["prompt", ROW_KWARGS] if has_settings(dataset) else ["prompt"]
    for block in dataset.select_columns(names).iter(batch_size=1000):
        yield from zip_longest(block["prompt"], block.get(ROW_KWARGS, ()))


def room_for_prompt(config: Any, max_completion_length: int) -> tuple[int, str]:
    """The most tokens of a prompt, and the end of an error's text; rotary positions reach as far as their scaling."""
    limit, text = covered_length(config), config.get_text_config()
    if limit is None:
        return sys.maxsize, ""
    # a learned table of positions has none for the completion either
    learned = getattr(text, "rope_parameters", None) is None and getattr(text, "rope_theta", None) is None
    less = f" - max_completion_length={max_completion_length}" if learned else ", scaling included"
    lower = ", or lower max_completion_length" if learned else ""
    room = limit - learned * max_completion_length
    why = f"max_position_embeddings={limit}{less}"
    return room, f"but the model has room for {room} ({why}); shorten or filter long prompts{lower}."


def check_prompt_lengths(
    survey: Survey, lengths_of: Callable[[list[Any]], list[int]], config: Any, max_completion_length: int
) -> None:
    """Refuse prompts that the model has no positions for."""
    room, reason = room_for_prompt(config, max_completion_length)
    # a token is at least one byte; the margin stands for what a chat template adds
    suspects = survey.larger_than(room - 512)
    lengths = lengths_of([prompt for _, prompt in suspects]) if suspects else []
    for (row, _), length in zip(suspects, lengths, strict=True):
        if length > room:
            raise DataError(f"the prompt in row {row} has {length} tokens, {reason}")
