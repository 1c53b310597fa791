"""The cards of a run and of an export: the right base model, and code that runs as it is shown."""

import re
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from peft import LoraConfig

from grpo_ext.tools.export import export
from tests.support.drop_in import conversations
from tests.support.selection import few_of
from tests.support.tiny import tiny_model, tiny_tokenizer
from tests.support.trainers import LORA, other


def run_shown(card: Path, capsys: Any) -> None:
    """Run what a card shows; it prints a completion."""
    (code,) = re.findall(r"```python\n(.*?)```", card.read_text(), re.S)
    capsys.readouterr()
    exec(code, {})
    assert capsys.readouterr().out.strip(), "nothing was sampled"


@pytest.mark.parametrize("peft", [False, True])
@pytest.mark.parametrize("chat", few_of([False, True], [True]))
def test_the_cards_of_a_run_and_of_its_export_name_the_base_and_show_code_that_runs(
    tmp_path, monkeypatch, capsys, chat, peft
):
    here = tmp_path
    monkeypatch.chdir(here)
    tiny_model().save_pretrained("models/tiny")
    tiny_tokenizer().save_pretrained("models/tiny")
    parts: dict[str, Any] = {"model": "models/tiny", "processing_class": tiny_tokenizer(chat=chat), "max_steps": 1}
    parts |= {"peft_config": LoraConfig(**LORA)} if peft else {}
    parts |= {"train_dataset": conversations()} if chat else {}
    other(here / "runs" / "first", **parts).train()
    card = here / "runs" / "first" / "README.md"
    assert "fine-tuned version of `tiny`.\n" in card.read_text()
    assert '"first/checkpoint-1"' in card.read_text()
    assert ModelCard.load(card).data.base_model is None  # "tiny" is not an id of the Hub
    export(here / "runs" / "first" / "checkpoint-1", here / "my-model")
    exported = here / "my-model" / "README.md"
    assert ("`tiny`, trained with GRPO" in exported.read_text()) == peft
    for written in (card, exported):
        text = written.read_text()
        assert str(here) not in text
        assert not re.search(r"\bNone\b", text)
        assert ("apply_chat_template" in text) == chat
        assert ("AutoPeftModelForCausalLM" in text) == peft
    run_shown(exported, capsys)
    if peft:  # the adapter's base is a folder that is named from here
        (here / "first").symlink_to(here / "runs" / "first")
    else:
        monkeypatch.chdir(here / "runs")
    run_shown(card, capsys)
