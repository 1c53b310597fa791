"""What a plan knows of a run's prompts: how many, and how long. Read where data and tokenizer are on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..data import is_local, load_prompts, prompt_lengths
from ..options import ScriptArguments, fields_of

ASSUMED_LENGTH = 512  # tokens


@dataclass(frozen=True)
class Prompts:
    """The prompts of a run.

    Attributes:
        longest: tokens.
        basis: what that length rests on, in words.
        rows: of the training set; None where it was not read.
    """

    longest: int = ASSUMED_LENGTH
    basis: str = "assumed"
    rows: int | None = None


def known_prompts(settings: Mapping[str, Any], length: int | None = None) -> Prompts:
    """The prompts of these settings: measured, of the given length in tokens, or of an assumed one.

    Raises:
        DataError: the data are on this machine, and cannot be trained on.
    """
    source, model = settings.get("dataset_name"), settings.get("model_name_or_path")
    rows, basis = None, "assumed"
    if source is not None and not is_local(source):
        basis = f"assumed: {source} is on the Hub and is not read"
    elif source is not None:
        script = ScriptArguments(**fields_of(settings, ScriptArguments))
        dataset, _ = load_prompts(script, settings.get("seed", 42))
        rows = len(dataset)
        if length is None and model is not None:
            return _measured(dataset, str(model))
    return Prompts(basis=basis, rows=rows) if length is None else Prompts(length, "as given", rows)


def _measured(dataset: Any, model: str) -> Prompts:
    """The longest of a sample, by the model's tokenizer where that is on this machine."""
    from transformers import AutoTokenizer

    folder = str(Path(model).parent) if model.endswith(".json") else model
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError):
        return Prompts(basis=f"assumed: there is no tokenizer of {model} on this machine", rows=len(dataset))
    if not isinstance(dataset[0]["prompt"], str) and tokenizer.chat_template is None:
        return Prompts(basis=f"assumed: {model} has no chat template, which messages need", rows=len(dataset))
    lengths = prompt_lengths(dataset, tokenizer)
    rows = "all rows" if len(lengths) == len(dataset) else f"{len(lengths)} of {len(dataset):,} rows"
    return Prompts(max(lengths), f"measured on {rows}", len(dataset))
