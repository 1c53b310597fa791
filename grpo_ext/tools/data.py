"""Prompts from anywhere: a data set of the Hub, a JSONL, JSON, Parquet or CSV file, or a folder made by `save_to_disk`.
Gives what TRL's trainer takes: `prompt` (text or messages), `answer` for the rewards, every other column as it was.
The first step of the flow; recipes/grpo.py calls `load_prompts`."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, Value, load_dataset, load_from_disk
from datasets.exceptions import DatasetNotFoundError

from ..errors import ConfigError, DataError, shortened

_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


def load_prompts(
    source: str | Path,
    *,
    name: str | None = None,
    split: str = "train",
    prompt_column: str = "prompt",
    answer_column: str | None = None,
    answer_after: str | None = None,
    prompt_template: str | None = None,
    system_prompt: str | None = None,
    conversational: bool = False,
    max_samples: int | None = None,
    eval_fraction: float = 0.0,
    seed: int = 0,
) -> tuple[Dataset, Dataset | None]:
    """(train, held-out or None) prompts for `GRPOTrainer`.

    Args:
        source: id of a data set on the Hub, a file, or a folder made by `save_to_disk`.
        name: configuration of a Hub set, such as "main".
        split: split of a Hub set or of a saved `DatasetDict`.
        prompt_column: becomes `prompt`; ignored where `prompt_template` is given.
        answer_column: becomes `answer`; None leaves the columns alone.
        answer_after: keep of the answer what follows this marker, such as "####" for GSM8K.
        prompt_template: text with `{column}` placeholders; `{{` and `}}` stand for braces.
        system_prompt: put before every prompt: as a message where the prompts are messages, else as a paragraph.
        conversational: turn text prompts into a list of messages, so that the chat template is applied.
        max_samples: rows to keep, the first ones, before the split.
        eval_fraction: part of the rows to hold out, drawn by `seed`.

    Raises:
        DataError: no such file, folder, set, split or column; unknown kind; no rows; an empty prompt or answer.
        ConfigError: `max_samples` or `eval_fraction` out of range.
    """
    if max_samples is not None and max_samples < 1:
        raise ConfigError(f"max_samples={max_samples} keeps no row; use 1 or more, or leave it out.")
    if not 0.0 <= eval_fraction < 1.0:
        raise ConfigError(f"eval_fraction={eval_fraction} is no share of the rows; use 0 or more and less than 1.")
    dataset = _read(source, name, split)
    if len(dataset) == 0:
        raise DataError(f"{source} has no rows; training needs at least one prompt.")
    if max_samples is not None:
        dataset = dataset.select(range(min(max_samples, len(dataset))))
    # the prompt first: a template may name the answer's column, under the name it has in the source
    dataset = _with_prompt(dataset, source, prompt_column, prompt_template, system_prompt, conversational)
    dataset = _with_answer(dataset, source, answer_column, answer_after)
    return _hold_out(dataset, source, eval_fraction, seed)


def final_answer(text: str, marker: str = "####") -> str | None:
    """What follows the last marker, stripped: "... #### 42" gives "42"; None where nothing does."""
    _, found, after = text.rpartition(marker)
    return after.strip() or None if found else None


def is_local(source: str | Path) -> bool:
    """Whether data lie on this machine, or would, by their name; else they are of the Hub."""
    path, text = Path(source).expanduser(), str(source)
    looks_local = path.suffix.lower() in _BUILDERS or path.is_absolute() or text.startswith((".", "~"))
    return looks_local or text.count("/") > 1 or path.exists()


def prompt_lengths(dataset: Dataset, tokenizer: Any, rows: int = 256) -> list[int]:
    """Tokens of the prompts, with the chat template where they are messages, of all rows or of `rows` evenly spread."""
    count = min(rows, len(dataset))
    lengths = []
    for prompt in dataset.select([place * len(dataset) // count for place in range(count)])["prompt"]:
        if not isinstance(prompt, str):
            prompt = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        lengths.append(len(tokenizer(prompt, add_special_tokens=False)["input_ids"]))
    return lengths


def _read(source: str | Path, name: str | None, split: str) -> Dataset:
    path = Path(source).expanduser()
    if path.is_dir():
        return _read_folder(path, split)
    if path.is_file():
        return _read_file(path)
    if is_local(source):
        raise DataError(f"The data {source} does not exist (looked in {Path.cwd()}); check the path.")
    try:
        return load_dataset(str(source), name, split=split)
    except (DatasetNotFoundError, ConnectionError, ValueError, OSError) as error:
        raise DataError(
            f"The data '{source}' is no local file or folder and could not be loaded from the Hub (configuration "
            f"{name!r}, split {split!r}): {error}"
        ) from error


def _read_file(path: Path) -> Dataset:
    builder = _BUILDERS.get(path.suffix.lower())
    if builder is None:
        raise DataError(
            f"{path} has the extension '{path.suffix}', which says no known kind of data; use one of "
            f"{', '.join(_BUILDERS)}, or a folder made by save_to_disk."
        )
    if path.stat().st_size == 0:
        raise DataError(f"{path} has no rows; training needs at least one prompt.")
    try:
        return load_dataset(builder, data_files=str(path), split="train")
    except Exception as error:  # the readers raise many kinds; all mean that the file is not what its name says
        raise DataError(f"{path} could not be read as {builder}: {error.__cause__ or error}") from error


def _read_folder(path: Path, split: str) -> Dataset:
    if not any((path / marker).is_file() for marker in ("state.json", "dataset_dict.json")):
        raise DataError(
            f"The folder {path} was not made by save_to_disk (it has neither state.json nor dataset_dict.json); name a "
            f"file in it instead, one of {', '.join(_BUILDERS)}."
        )
    dataset = load_from_disk(str(path))
    if not isinstance(dataset, DatasetDict):
        return dataset
    if split not in dataset:
        raise DataError(f"{path} has no split '{split}'; it has {', '.join(dataset)}.")
    return dataset[split]


def _require(dataset: Dataset, column: str, source: Any, option: str) -> None:
    if column not in dataset.column_names:
        raise DataError(
            f"{source} has no column '{column}' ({option}); its columns are {', '.join(dataset.column_names)}."
        )


def _rename(dataset: Dataset, column: str, wanted: str, source: Any) -> Dataset:
    if column == wanted:
        return dataset
    if wanted in dataset.column_names:
        raise DataError(
            f"{source} has a column '{wanted}' beside '{column}', which is to take that name; rename or remove one."
        )
    return dataset.rename_column(column, wanted)


def _with_answer(dataset: Dataset, source: Any, column: str | None, marker: str | None) -> Dataset:
    if column is None and marker is None:
        return dataset
    column = column or "answer"
    _require(dataset, column, source, "answer_column")
    if marker is not None:
        golds = [_marked(str(text), marker, f"{source}, row {row}") for row, text in enumerate(dataset[column])]
        features = dataset.features.copy()
        features[column] = Value("string")
        dataset = dataset.map(
            lambda _, row: {column: golds[row]}, with_indices=True, features=features, load_from_cache_file=False
        )
    return _rename(dataset, column, "answer", source)


def _marked(text: str, marker: str, where: str) -> str:
    gold = final_answer(text, marker)
    if gold is None:
        raise DataError(
            f"{where}: nothing follows '{marker}' in the answer {shortened(repr(text), 60)}; every answer needs the "
            "marker, or leave answer_after out."
        )
    return gold


def _with_prompt(
    dataset: Dataset, source: Any, column: str, template: str | None, system: str | None, conversational: bool
) -> Dataset:
    if template is None:
        _require(dataset, column, source, "prompt_column")
        prompts = list(dataset[column])
    else:
        for placeholder in _placeholders(template):
            _require(dataset, placeholder, source, f"prompt_template {template!r}")
        prompts = [template.format(**row) for row in dataset]
    made_from = f"column '{column}'" if template is None else "prompt_template"
    prompts = [
        _prompt(prompt, system, conversational, f"{source}, row {row}, {made_from}")
        for row, prompt in enumerate(prompts)
    ]
    if template is None:
        dataset = _rename(dataset, column, "prompt", source)
    # added before the old column goes: a data set without columns forgets how many rows it has
    dataset = dataset.add_column("_new_prompt", prompts)
    if "prompt" in dataset.column_names:
        dataset = dataset.remove_columns("prompt")
    return dataset.rename_column("_new_prompt", "prompt")


def _placeholders(template: str) -> list[str]:
    try:
        return [field for _, field, _, _ in string.Formatter().parse(template) if field is not None]
    except ValueError as error:
        raise DataError(
            f"prompt_template={template!r} cannot be read ({error}); write columns as {{column}} and braces twice."
        ) from error


def _prompt(prompt: Any, system: str | None, conversational: bool, where: str) -> Any:
    """A prompt as the trainer wants it: text, or messages where it came as messages or `conversational` is set."""
    if isinstance(prompt, list):
        if not prompt:
            raise DataError(f"{where}: the prompt is empty; every prompt needs at least one message.")
        return [{"role": "system", "content": system}, *prompt] if system else prompt
    if prompt is None or not str(prompt).strip():
        raise DataError(f"{where}: the prompt is empty ({prompt!r}); remove the row or fill it.")
    if conversational:
        start = [{"role": "system", "content": system}] if system else []
        return [*start, {"role": "user", "content": str(prompt)}]
    return f"{system}\n\n{prompt}" if system else str(prompt)


def _hold_out(dataset: Dataset, source: Any, fraction: float, seed: int) -> tuple[Dataset, Dataset | None]:
    if fraction == 0.0:
        return dataset, None
    held_out = round(len(dataset) * fraction)
    if not 0 < held_out < len(dataset):
        raise DataError(
            f"eval_fraction={fraction} of the {len(dataset)} rows of {source} leaves {held_out} to evaluate on and "
            f"{len(dataset) - held_out} to train on; both need at least one."
        )
    parts = dataset.train_test_split(test_size=held_out, seed=seed)
    return parts["train"], parts["test"]
