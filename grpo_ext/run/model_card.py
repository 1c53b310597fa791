"""What a model card says beside TRL's text: the base model by name, and code (usage.md) that loads the model and runs.

TRL's card says "None" for a base model that is an object or a folder, and for the place that its code loads from.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub import ModelCard

from .checkpoint import read_listing


def base_name(name: str | None) -> str:
    """The id of a base model or the name of its folder, without paths of this machine; "" where it was never saved."""
    path = Path(name or "").resolve()
    if not name or not (path.is_dir() or Path(name).is_absolute()):
        return name or ""
    if path.parent.name == "snapshots":  # in the Hub's cache
        return path.parents[1].name.removeprefix("models--").replace("--", "/")
    return (read_listing(path) or {}).get("base") or path.name  # a checkpoint has the base of its run


def usage(place: str, **about: Any) -> str:
    """Code that loads a model from its id or folder and samples, as Markdown.

    Args:
        about: base; and whether it is an adapter, takes images, and has prompts that are messages (chat).
    """
    text = Path(__file__).with_name("usage.md").read_text(encoding="utf-8")
    return jinja2.Template(text, trim_blocks=True).render(place=place, **about).strip()


def mend(path: Path, place: str, about: dict[str, Any]) -> None:
    """Put the base model and the code of `usage` into the card that TRL has written."""
    card, base = ModelCard.load(path), about["base"]
    card.data.base_model = base if "/" in base or base == card.data.base_model else None  # an id, not a folder
    what = f"`{base}`" if base else "a model that was an object in memory"
    text = re.sub(r"(?<=version of )\[.*?\]\(.*?\)", lambda _: what, card.text, count=1)
    code = f"\n{usage(place, **about)}\n"
    card.text = re.sub(r"(?s)(?<=## Quick start\n).*?(?=\n## )", lambda _: code, text, count=1)
    card.save(path)
