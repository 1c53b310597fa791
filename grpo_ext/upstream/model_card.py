"""What a model card says beside TRL's text: the base model's name, and code (usage.md) that samples.

Repairs `trl.trainer.base_trainer._BaseTrainer.create_model_card`, whose card says "None" for a base model that is an
object or a folder, and for the place that its code loads from. Until TRL fixes it; last seen in 1.16.
"""

import re
from pathlib import Path

import jinja2
from huggingface_hub import ModelCard
from transformers import ProcessorMixin

from ..runtime.messages import logger
from ..view import TrainerView


def base_name(name: str | None) -> str:
    """The id of a base model, or the name of its folder; "" where it was never saved."""
    return Path(name).resolve().name if name and (Path(name).is_dir() or Path(name).is_absolute()) else name or ""


def usage(place: str, base: str, adapter: bool, chat: bool, images: bool) -> str:
    """Markdown with code that loads a model from its id or folder, and samples from one without images."""
    template = jinja2.Template(Path(__file__).with_name("usage.md").read_text(encoding="utf-8"), trim_blocks=True)
    return template.render(place=place, base=base, adapter=adapter, chat=chat, images=images).strip()


def complete_card(view: TrainerView, checkpoint: str | None) -> None:
    """Put the base model and the code of `usage` into TRL's card, a checkpoint's or the run's; a fault is a warning."""
    model, processing_class, folder = view.model, view.processing_class, view.output_dir.resolve()
    place = str(view.hub_model_id or "/".join(filter(None, (folder.name, checkpoint))))
    base = base_name(getattr(getattr(model, "config", None), "_name_or_path", None))
    chat, adapter = getattr(processing_class, "chat_template", None) is not None, hasattr(model, "peft_config")
    try:
        card = ModelCard.load(folder / "README.md")
        if base != card.data.base_model:  # a folder, or an object in memory
            card.data.base_model, what = None, f"`{base}`" if base else "a model that was an object in memory"
            card.text = re.sub(r"(?<=version of )\[.*?\]\(.*?\)", lambda _: what, card.text, count=1)
        code = f"\n{usage(place, base, adapter, chat, isinstance(processing_class, ProcessorMixin))}\n"
        card.text = re.sub(r"(?s)(?<=## Quick start\n).*?(?=\n## )", lambda _: code, card.text, count=1)
        card.save(folder / "README.md")
    except Exception as error:  # whatever a template of the user's raises: a card never ends training
        logger.warning(f"The model card in {folder} is TRL's, without code that runs: {type(error).__name__}: {error}")
