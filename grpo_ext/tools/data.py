"""Prompts from a data set of the Hub, a JSONL, JSON, Parquet or CSV file, or a folder of `save_to_disk`.

Gives what TRL's trainer takes: `prompt` (text or messages), `answer` for the rewards, every other column unchanged.
"""

from __future__ import annotations

import string
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
        ConfigError: `max_samples` or `eval_fraction` out of range.
    """
    if data.max_samples is not None and data.max_samples < 1:
        raise ConfigError(f"max_samples={data.max_samples} keeps no row; use 1 or more, or leave it out.")
    if not 0.0 <= data.eval_fraction < 1.0:
        raise ConfigError(f"eval_fraction={data.eval_fraction} is no share of the rows; use 0 or more and less than 1.")
    dataset = _read(data)
    if len(dataset) == 0:
        raise DataError(f"{data.dataset_name} has no rows; training needs at least one prompt.")
    if data.max_samples is not None:
        dataset = dataset.select(range(min(data.max_samples, len(dataset))))
    # the prompt first: a template may name the answer's column, under the name it has in the source
    return _hold_out(_with_answer(_with_prompt(dataset, data), data), data, seed)


def _read(data: DataArguments) -> Dataset:
    source, split = str(data.dataset_name), data.dataset_split
    path = Path(source).expanduser()
    builder = _BUILDERS.get(path.suffix.lower())
    no_hub_name = builder is not None or path.is_absolute() or source.startswith((".", "~")) or source.count("/") > 1
    if no_hub_name and not path.exists():
        raise DataError(f"The data {source} does not exist (looked in {Path.cwd()}); check the path.")
    if path.is_file() and builder is None:
        raise DataError(
            f"{path} has the extension '{path.suffix}', which names no known kind of data; use one of "
            f"{', '.join(_BUILDERS)}, or a folder made by save_to_disk."
        )
    if path.is_file() and path.stat().st_size == 0:
        raise DataError(f"{path} has no rows; training needs at least one prompt.")
    try:
        if path.is_file():
            return load_dataset(builder, data_files=str(path), split="train")
        if not path.is_dir():
            return load_dataset(source, data.dataset_config, split=split)
        dataset = load_from_disk(str(path))
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


def _require(dataset: Dataset, column: str, source: Any, option: str) -> None:
    if column not in dataset.column_names:
        raise DataError(
            f"{source} has no column '{column}' ({option}); its columns are {', '.join(dataset.column_names)}."
        )


def _renamed(dataset: Dataset, column: str, wanted: str, source: Any) -> Dataset:
    if column == wanted:
        return dataset
    if wanted in dataset.column_names:
        raise DataError(
            f"{source} has a column '{wanted}' beside '{column}', which is to take that name; rename or remove one."
        )
    return dataset.rename_column(column, wanted)


def _with_answer(dataset: Dataset, data: DataArguments) -> Dataset:
    marker, source = data.answer_after, data.dataset_name
    if data.answer_column is None and marker is None:
        return dataset
    column = data.answer_column or "answer"
    _require(dataset, column, source, "answer_column")
    if marker is not None:
        answers = []
        for row, text in enumerate(dataset[column]):
            _, _, answer = str(text).rpartition(marker)
            if marker not in str(text) or not answer.strip():
                raise DataError(
                    f"{source}, row {row}: nothing follows '{marker}' in the answer {shortened(repr(text), 60)}; every "
                    "answer needs the marker, or leave answer_after out."
                )
            answers.append(answer.strip())
        dataset = _replaced(dataset, column, answers)
    return _renamed(dataset, column, "answer", source)


def _with_prompt(dataset: Dataset, data: DataArguments) -> Dataset:
    column, template, source = data.prompt_column, data.prompt_template, data.dataset_name
    if template is None:
        _require(dataset, column, source, "prompt_column")
        prompts, origin = list(dataset[column]), f"column '{column}'"
    else:
        try:
            columns = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
        except ValueError as error:
            raise DataError(
                f"prompt_template={template!r} cannot be read ({error}); write columns as {{column}} and braces twice."
            ) from error
        for name in columns:
            _require(dataset, name, source, f"prompt_template {template!r}")
        prompts, origin = [template.format(**row) for row in dataset], "prompt_template"
    prompts = [_prompt(prompt, data, f"{source}, row {row}, {origin}") for row, prompt in enumerate(prompts)]
    if template is None:
        dataset = _renamed(dataset, column, "prompt", source)
    return _replaced(dataset, "prompt", prompts)


def _replaced(dataset: Dataset, column: str, values: list[Any]) -> Dataset:
    """The data set with these values in a column, in place of its own if it has one."""
    # added before the old column goes: a data set without columns forgets how many rows it has
    dataset = dataset.add_column("_values", values)
    if column in dataset.column_names:
        dataset = dataset.remove_columns(column)
    return dataset.rename_column("_values", column)


def _prompt(prompt: Any, data: DataArguments, where: str) -> Any:
    """A prompt as the trainer wants it: text, or messages where it came as messages or `conversational` is set."""
    system = data.system_prompt
    if isinstance(prompt, list):
        if not prompt:
            raise DataError(f"{where}: the prompt is empty; every prompt needs at least one message.")
        return [{"role": "system", "content": system}, *prompt] if system else prompt
    if prompt is None or not str(prompt).strip():
        raise DataError(f"{where}: the prompt is empty ({prompt!r}); remove the row or fill it.")
    if data.conversational:
        start = [{"role": "system", "content": system}] if system else []
        return [*start, {"role": "user", "content": str(prompt)}]
    return f"{system}\n\n{prompt}" if system else str(prompt)


def _hold_out(dataset: Dataset, data: DataArguments, seed: int) -> tuple[Dataset, Dataset | None]:
    fraction = data.eval_fraction
    if fraction == 0.0:
        return dataset, None
    held_out = round(len(dataset) * fraction)
    if not 0 < held_out < len(dataset):
        raise DataError(
            f"eval_fraction={fraction} of the {len(dataset)} rows of {data.dataset_name} leaves {held_out} to evaluate "
            f"on and {len(dataset) - held_out} to train on; both need at least one."
        )
    parts = dataset.train_test_split(test_size=held_out, seed=seed)
    return parts["train"], parts["test"]
