"""Prompts from a data set of the Hub, a JSONL, JSON, Parquet or CSV file, or a folder of `save_to_disk`.

Gives what TRL's trainer takes: `prompt` (text or messages), `answer` for the rewards, every other column unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, load_dataset, load_from_disk

from ..config import setting
from ..errors import DataError, shortened

_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


@dataclass
class DataArguments:
    """The data of a run, and how a row becomes a prompt."""

    dataset_name: str | None = setting("Hub data set, or a .jsonl/.json/.parquet/.csv file, or a save_to_disk folder.")
    dataset_config: str | None = setting("Configuration of a Hub set, such as main.")
    dataset_split: str = setting("Split to train on.", default="train")
    prompt_column: str = setting("Column that holds the prompt.", default="prompt")
    answer_column: str | None = setting("Column of the gold answers; becomes `answer`.")
    answer_after: str | None = setting("Keep of the gold what follows this marker; '####' for GSM8K.")
    prompt_template: str | None = setting("Prompt text with {column} placeholders, in place of prompt_column.")
    system_prompt: str | None = setting("Put before every prompt.")
    conversational: bool = setting("Make messages, so that the chat template applies.", default=False)
    max_samples: int | None = setting("Rows to use, the first ones.")
    eval_fraction: float = setting("Part of the rows to hold out for evaluation.", default=0.0)


def load_prompts(data: DataArguments, seed: int = 0) -> tuple[Dataset, Dataset | None]:
    """(train, held-out or None) prompts for `GRPOTrainer`; held-out rows are drawn by `seed`.

    A DataError names the options and what is wrong: source, split, column, an empty row, no rows on one side.
    """
    try:
        dataset = _read(str(data.dataset_name), data)
        if data.max_samples is not None:
            dataset = dataset.select(range(min(data.max_samples, len(dataset))))
        # the prompt first: a template may name the answer's column, under the name it has in the source
        dataset = _with_answer(_with_prompt(dataset, data), data)
        if data.eval_fraction == 0.0:
            return dataset, None
        parts = dataset.train_test_split(test_size=round(len(dataset) * data.eval_fraction), seed=seed)
    except Exception as error:  # the readers raise many kinds
        values = {spec.name: getattr(data, spec.name) for spec in fields(DataArguments)}
        options = ", ".join(f"{name}={value!r}" for name, value in values.items() if value)
        raise DataError(f"The data cannot be used as {options}: {error.__cause__ or error}") from error
    return parts["train"], parts["test"]


def _read(source: str, data: DataArguments) -> Dataset:
    path, split = Path(source).expanduser(), data.dataset_split
    builder = _BUILDERS.get(path.suffix.lower())
    if path.is_dir():
        dataset = load_from_disk(str(path))
        if not isinstance(dataset, DatasetDict):
            return dataset
        if split not in dataset:
            raise ValueError(f"there is no split '{split}', only {', '.join(dataset)}.")
        return dataset[split]
    if path.is_file() and (builder is None or path.stat().st_size == 0):
        raise ValueError(
            f"the file is empty, or '{path.suffix}' names no known kind of data; use one of {', '.join(_BUILDERS)}, or "
            "a folder made by save_to_disk."
        )
    if builder is not None:
        return load_dataset(builder, data_files=str(path), split="train")
    return load_dataset(source, data.dataset_config, split=split)


def _values(dataset: Dataset, column: str) -> list[Any]:
    return list(dataset.select_columns(column)[column])  # selected: the error of a missing column names those there are


def _replaced(dataset: Dataset, column: str, name: str, values: list[Any]) -> Dataset:
    """The data set with these values in a column `name`, in place of `column`."""
    # added before the old column goes: a data set without columns forgets how many rows it has
    dataset = dataset.add_column("_values", values)
    if column in dataset.column_names:
        dataset = dataset.remove_columns(column)
    return dataset.rename_column("_values", name)


def _with_answer(dataset: Dataset, data: DataArguments) -> Dataset:
    marker, column = data.answer_after, data.answer_column or "answer"
    if data.answer_column is None and marker is None:
        return dataset
    answers = _values(dataset, column)
    if marker is not None:
        for row, text in enumerate(map(str, answers)):
            answers[row] = text.rpartition(marker)[2].strip()
            if marker not in text or not answers[row]:
                raise ValueError(
                    f"nothing follows '{marker}' in row {row}, {shortened(repr(text), 60)}; every answer needs the "
                    "marker, or leave answer_after out."
                )
    return _replaced(dataset, column, "answer", answers)


def _with_prompt(dataset: Dataset, data: DataArguments) -> Dataset:
    template, column = data.prompt_template, data.prompt_column
    if template is None:
        prompts = _values(dataset, column)
    else:
        column = "prompt"
        try:
            prompts = [template.format(**row) for row in dataset]
        except LookupError as error:
            columns = ", ".join(dataset.column_names)
            raise ValueError(f"the template asks for {error}, and the columns are {columns}.") from None
    for row, prompt in enumerate(prompts):
        if prompt in (None, []) or not str(prompt).strip():
            raise ValueError(f"the prompt in row {row} is empty ({prompt!r}); remove the row or fill it.")
    return _replaced(dataset, column, "prompt", [_prompt(prompt, data) for prompt in prompts])


def _prompt(prompt: Any, data: DataArguments) -> Any:
    """A prompt as the trainer takes it: text, or messages where the column has them or `conversational` is set."""
    if data.conversational and not isinstance(prompt, list):
        prompt = [{"role": "user", "content": str(prompt)}]
    if isinstance(prompt, list):
        return [{"role": "system", "content": data.system_prompt}, *prompt] if data.system_prompt else prompt
    return f"{data.system_prompt}\n\n{prompt}" if data.system_prompt else str(prompt)
