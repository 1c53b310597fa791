"""Prompts from a data set on the Hub, a JSONL, JSON, Parquet or CSV file, or a folder made by `save_to_disk`.

Returns what TRL's trainer takes: `prompt` (text or messages), `answer` for the rewards, every other column unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from glob import has_magic
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import DataError, shortened
from ..settings import setting

if TYPE_CHECKING:
    from datasets import Dataset

_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


@dataclass
class DataArguments:
    """The data of a run, and how a row becomes a prompt."""

    dataset_name: str | None = setting("Hub data set, or a .jsonl/.json/.parquet/.csv file, or a save_to_disk folder.")
    dataset_config: str | None = setting("Configuration of a Hub data set, such as main.")
    dataset_split: str = setting("Split to train on.", default="train")
    prompt_column: str = setting("Column that holds the prompt.", default="prompt")
    answer_column: str | None = setting("Column of the gold answers; becomes `answer`.")
    answer_after: str | None = setting("Keep only the part of the gold answer after this marker; '####' for GSM8K.")
    prompt_template: str | None = setting("Prompt text with {column} placeholders, in place of prompt_column.")
    system_prompt: str | None = setting("Text put before every prompt.")
    conversational: bool = setting("Turn prompts into messages, so that the chat template applies.", default=False)
    max_samples: int | None = setting("Use only this many rows, the first ones.")
    eval_fraction: float = setting("Share of the rows held out for evaluation.", default=0.0)


def load_prompts(data: DataArguments, seed: int) -> tuple[Dataset, Dataset | None]:
    """Load (train, held-out or None) prompts for `GRPOTrainer`; `seed` draws the held-out rows."""
    try:
        dataset = _read(str(data.dataset_name), data)
        if data.max_samples is not None:
            dataset = dataset.select(range(min(data.max_samples, len(dataset))))
        # the prompt first: a template may name the answer column as the source does
        dataset = _with_answer(_with_prompt(dataset, data), data)
        if data.eval_fraction == 0.0:
            return dataset, None
        parts = dataset.train_test_split(test_size=round(len(dataset) * data.eval_fraction), seed=seed)
    except Exception as error:  # readers raise many kinds of errors
        values = {spec.name: getattr(data, spec.name) for spec in fields(DataArguments)}
        options = ", ".join(f"{name}={value!r}" for name, value in values.items() if value)
        cause = str(error.__cause__ or error).rstrip(".")
        raise DataError(f"{cause} (in the data of {options}).") from error
    return parts["train"], parts["test"]


def _read(source: str, data: DataArguments) -> Dataset:
    from datasets import DatasetDict, load_dataset, load_from_disk  # slow to import, and `--help` reads this file

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
            f"the file is empty, or '{path.suffix}' is not a supported format; use one of {', '.join(_BUILDERS)}, or a "
            "folder made by save_to_disk."
        )
    if builder is not None:
        if not path.is_file() and not has_magic(source):
            raise ValueError(f"there is no file {source}; check the path.")
        return load_dataset(builder, data_files=str(path), split="train")
    return load_dataset(source, data.dataset_config, split=split)


def _replaced(dataset: Dataset, column: str, name: str, values: list[Any]) -> Dataset:
    # add before removing the old column: a data set without columns forgets how many rows it has
    dataset = dataset.add_column("_values", values)
    if column in dataset.column_names:
        dataset = dataset.remove_columns(column)
    return dataset.rename_column("_values", name)


def _with_answer(dataset: Dataset, data: DataArguments) -> Dataset:
    marker, column = data.answer_after, data.answer_column or "answer"
    if data.answer_column is None and marker is None:
        return dataset
    answers = list(dataset.select_columns(column)[column])  # its error for a missing column names the existing ones
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
        prompts = list(dataset.select_columns(column)[column])
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
    if data.conversational and not isinstance(prompt, list):
        prompt = [{"role": "user", "content": str(prompt)}]
    if isinstance(prompt, list):
        return [{"role": "system", "content": data.system_prompt}, *prompt] if data.system_prompt else prompt
    return f"{data.system_prompt}\n\n{prompt}" if data.system_prompt else str(prompt)
