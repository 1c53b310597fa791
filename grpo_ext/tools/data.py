"""Prompts from a data set of the Hub, a JSONL, JSON, Parquet or CSV file, or a folder of `save_to_disk`.

Gives what TRL's trainer takes: `prompt` (text or messages), `answer` for the rewards, every other column unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, load_dataset, load_from_disk

from ..errors import ConfigError, DataError, shortened

_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


@dataclass
class DataArguments:
    """The data of a run, and how a row becomes a prompt."""

    dataset_name: str | None = field(
        default=None, metadata={"help": "Hub data set, or a .jsonl/.json/.parquet/.csv file, or a save_to_disk folder."}
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a Hub set, such as main."})
    dataset_split: str = field(default="train", metadata={"help": "Split to train on."})
    prompt_column: str = field(default="prompt", metadata={"help": "Column that holds the prompt."})
    answer_column: str | None = field(default=None, metadata={"help": "Column of the gold answers; becomes `answer`."})
    answer_after: str | None = field(
        default=None, metadata={"help": "Keep of the gold what follows this marker; '####' for GSM8K."}
    )
    prompt_template: str | None = field(
        default=None, metadata={"help": "Prompt text with {column} placeholders, in place of prompt_column."}
    )
    system_prompt: str | None = field(default=None, metadata={"help": "Put before every prompt."})
    conversational: bool = field(default=False, metadata={"help": "Make messages, so that the chat template applies."})
    max_samples: int | None = field(default=None, metadata={"help": "Rows to use, the first ones."})
    eval_fraction: float = field(default=0.0, metadata={"help": "Part of the rows to hold out for evaluation."})


def load_prompts(data: DataArguments, seed: int = 0) -> tuple[Dataset, Dataset | None]:
    """(train, held-out or None) prompts for `GRPOTrainer`; held-out rows are drawn by `seed`.

    Raises:
        DataError: no such file, folder, set, split or column; unknown kind; no rows; an empty prompt or answer.
        ConfigError: `eval_fraction` leaves no rows to train or to evaluate on.
    """
    dataset = _read(data)
    if data.max_samples is not None:
        dataset = dataset.select(range(min(data.max_samples, len(dataset))))
    if len(dataset) == 0:
        raise DataError(f"{data.dataset_name} has no rows (max_samples={data.max_samples}); at least one is needed.")
    # the prompt first: a template may name the answer's column, under the name it has in the source
    dataset = _with_answer(_with_prompt(dataset, data), data)
    if data.eval_fraction == 0.0:
        return dataset, None
    try:
        parts = dataset.train_test_split(test_size=round(len(dataset) * data.eval_fraction), seed=seed)
    except ValueError as error:
        raise ConfigError(f"eval_fraction={data.eval_fraction} of {len(dataset)} rows: {error}") from error
    return parts["train"], parts["test"]


def _read(data: DataArguments) -> Dataset:
    source, split = str(data.dataset_name), data.dataset_split
    path = Path(source).expanduser()
    builder = _BUILDERS.get(path.suffix.lower())
    if path.is_file() and (builder is None or path.stat().st_size == 0):
        raise DataError(
            f"{path} has no rows, or its extension '{path.suffix}' names no known kind of data; use one of "
            f"{', '.join(_BUILDERS)}, or a folder made by save_to_disk."
        )
    try:
        if path.is_dir():
            dataset = load_from_disk(str(path))
        elif builder is not None:
            dataset = load_dataset(builder, data_files=str(path), split="train")
        else:
            dataset = load_dataset(source, data.dataset_config, split=split)
    except Exception as error:  # the readers raise many kinds
        raise DataError(
            f"The data {source} could not be read (configuration {data.dataset_config!r}, split {split!r}): "
            f"{error.__cause__ or error}"
        ) from error
    if isinstance(dataset, DatasetDict):
        if split not in dataset:
            raise DataError(f"{path} has no split '{split}'; it has {', '.join(dataset)}.")
        return dataset[split]
    return dataset


def _values(dataset: Dataset, column: str, data: DataArguments, option: str) -> list[Any]:
    if column not in dataset.column_names:
        raise DataError(
            f"{data.dataset_name} has no column '{column}' ({option}); its columns are "
            f"{', '.join(dataset.column_names)}."
        )
    return list(dataset[column])


def _replaced(dataset: Dataset, column: str, name: str, values: list[Any]) -> Dataset:
    """The data set with these values in a column `name`, in place of `column`."""
    if column != name and name in dataset.column_names:
        raise DataError(
            f"the data has a column '{name}' beside '{column}', which is to take that name; rename or remove one."
        )
    # added before the old column goes: a data set without columns forgets how many rows it has
    dataset = dataset.add_column("_values", values)
    if column in dataset.column_names:
        dataset = dataset.remove_columns(column)
    return dataset.rename_column("_values", name)


def _with_answer(dataset: Dataset, data: DataArguments) -> Dataset:
    marker, column = data.answer_after, data.answer_column or "answer"
    if data.answer_column is None and marker is None:
        return dataset
    answers = _values(dataset, column, data, "answer_column")
    if marker is not None:
        for row, text in enumerate(map(str, answers)):
            answers[row] = text.rpartition(marker)[2].strip()
            if marker not in text or not answers[row]:
                raise DataError(
                    f"{data.dataset_name}, row {row}: nothing follows '{marker}' in the answer "
                    f"{shortened(repr(text), 60)}; every answer needs the marker, or leave answer_after out."
                )
    return _replaced(dataset, column, "answer", answers)


def _with_prompt(dataset: Dataset, data: DataArguments) -> Dataset:
    template, column = data.prompt_template, data.prompt_column
    if template is None:
        prompts = _values(dataset, column, data, "prompt_column")
    else:
        column = "prompt"
        try:
            prompts = [template.format(**row) for row in dataset]
        except (LookupError, ValueError) as error:
            raise DataError(
                f"prompt_template={template!r} cannot be filled ({error!r}); write a column ("
                f"{', '.join(dataset.column_names)}) as {{column}}, and other braces twice."
            ) from error
    for row, prompt in enumerate(prompts):
        if prompt in (None, []) or not str(prompt).strip():
            raise DataError(
                f"{data.dataset_name}, row {row}: the prompt is empty ({prompt!r}); remove the row or fill it."
            )
    return _replaced(dataset, column, "prompt", [_prompt(prompt, data) for prompt in prompts])


def _prompt(prompt: Any, data: DataArguments) -> Any:
    """A prompt as the trainer wants it: text, or messages where it came as messages or `conversational` is set."""
    if data.conversational and not isinstance(prompt, list):
        prompt = [{"role": "user", "content": str(prompt)}]
    if isinstance(prompt, list):
        return [{"role": "system", "content": data.system_prompt}, *prompt] if data.system_prompt else prompt
    return f"{data.system_prompt}\n\n{prompt}" if data.system_prompt else str(prompt)
