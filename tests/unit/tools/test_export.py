"""`grpo-ext export`: what is written is the trained model, and what cannot be is refused with nothing left behind."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    LlamaForCausalLM,
)
from typer.testing import CliRunner

from grpo_ext.errors import CheckpointError, ConfigError
from grpo_ext.run.checkpoint import write_listing
from grpo_ext.tools.cli import app
from grpo_ext.tools.export import export
from tests.support.architectures import architecture
from tests.support.images import image, image_model, image_processor, image_rows, picture_reward
from tests.support.selection import few_of
from tests.support.tiny import tiny_model
from tests.support.trainers import LORA, other

PLAIN = {"README.md", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture(scope="module")
def full(tmp_path_factory) -> tuple[Path, Any]:
    trainer = other(folder := tmp_path_factory.mktemp("full"), temperature=0.8)
    trainer.train()
    return folder / "checkpoint-3", trainer.model


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("dtype", few_of([None, "bfloat16"], ["bfloat16"]))
def test_a_full_model_is_the_trained_one_as_stored_or_converted(full, tmp_path, dtype):
    checkpoint, trained = full
    assert export(checkpoint, tmp_path / "out", dtype=dtype) == "full"
    assert names(tmp_path / "out") == PLAIN | {"model.safetensors"}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == (dtype or "float32")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    for (name, value), (_, expected) in zip(model.named_parameters(), trained.named_parameters()):
        assert torch.equal(value, expected.to(getattr(torch, dtype or "float32"))), name
    assert AutoTokenizer.from_pretrained(tmp_path / "out").decode([5, 6]) != ""
    card = (tmp_path / "out" / "README.md").read_text()
    for words in ("checkpoint-3, full", "library_name: transformers", '"learning_rate": 0.001,', "letter_reward"):
        assert words in card


@pytest.mark.full
def test_a_model_with_images_and_a_merged_adapter_is_the_trained_one_and_has_its_processor(tmp_path, monkeypatch):
    image_model("idefics3").save_pretrained(tmp_path / "idefics3")
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "idefics3")
    parts: dict[str, Any] = {"model": model, "reward_funcs": picture_reward, "train_dataset": image_rows(8)}
    parts["processing_class"] = processor = image_processor("idefics3")
    trainer = other(tmp_path / "run", **parts, peft_config=LoraConfig(**LORA), learning_rate=0.05)
    trainer.train()
    assert export(tmp_path / "run" / "checkpoint-3", tmp_path / "out", merge_adapter=True) == "merged adapter"
    expected, start = trainer.model.merge_and_unload().state_dict(), image_model("idefics3").state_dict()
    exported = AutoModelForImageTextToText.from_pretrained(tmp_path / "out").state_dict()
    assert exported.keys() == expected.keys()
    assert all(torch.allclose(value, expected[name], atol=1e-6) for name, value in exported.items())
    moved = [name for name in exported if not torch.allclose(exported[name], start[name], atol=1e-6)]
    assert any("vision_model" in name for name in moved)
    call: dict[str, Any] = {"images": [image(1, 16, 8)], "text": "<image>?", "return_tensors": "pt"}
    written, trained_with = (each(**call) for each in (AutoProcessor.from_pretrained(tmp_path / "out"), processor))
    assert all(torch.equal(written[name], trained_with[name]) for name in trained_with)
    assert AutoProcessor.from_pretrained(tmp_path / "out").chat_template == processor.chat_template
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", Path("out/README.md").read_text(), re.S)
    exec(code, shown := {})
    assert type(shown["model"]) is type(model)
    assert type(shown["processor"]) is type(processor)


@pytest.fixture
def copy(full, tmp_path) -> Path:
    return Path(shutil.copytree(full[0], tmp_path / "checkpoint-3"))


def nothing_left(folder: Path) -> bool:
    return not [path for path in folder.iterdir() if path.name.startswith(("out", "_"))]


def without_a_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.0.self_attn.q_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda folder: (folder / "model.safetensors").write_bytes(b"no tensors"), "SafetensorError"),
        (without_a_weight, "lacks 1 weights of the model, for example model.layers.0.self_attn.q_proj.weight"),
    ],
)
def test_an_incomplete_checkpoint_is_refused_with_or_without_checksums(copy, tmp_path, damage, says):
    damage(copy)
    with pytest.raises(CheckpointError, match="bytes"):
        export(copy, tmp_path / "out")
    (copy / "checkpoint.json").unlink()
    write_listing(copy, {"step": 3})
    with pytest.raises(CheckpointError, match=says):
        export(copy, tmp_path / "out")
    assert nothing_left(tmp_path)


def test_a_run_without_checkpoints_is_refused_with_what_to_do(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "steps.jsonl").touch()
    result = CliRunner().invoke(app, ["export", f"{tmp_path}/run", f"{tmp_path}/out"])
    assert isinstance(result.exception, CheckpointError)
    assert "saved no checkpoint (train with --save_strategy steps --save_steps N)" in str(result.exception)
    assert "checksums" not in result.output


def test_the_command_says_what_it_wrote(copy, tmp_path):
    words = ["export", str(copy), f"{tmp_path}/out"]
    result = CliRunner().invoke(app, words)
    size = (copy / "model.safetensors").stat().st_size / 1e6
    assert f"Wrote the weights (full, {size:.1f} MB) to {tmp_path}/out" in result.output
    assert "checksums" not in result.output
    (copy / "checkpoint.json").unlink()
    for file in copy.glob("grpo_ext_*"):  # now it may be another trainer's
        file.unlink()
    result = CliRunner().invoke(app, [*words[:-1], f"{tmp_path}/plain"])
    assert "has no checksums, so it was read without verification." in result.output


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"out": "checkpoint-3"}, "exists already"),
        ({"dtype": "int8"}, "use one of float32, bfloat16, float16"),
        ({"merge_adapter": True}, "holds a whole model"),
        ({"base": "x"}, "holds a whole model"),
    ],
)
def test_invalid_options_are_refused_and_change_nothing(copy, tmp_path, options, says):
    before = names(copy)
    with pytest.raises(ConfigError, match=says):
        export(copy, tmp_path / options.pop("out", "out"), **options)
    assert nothing_left(tmp_path)
    assert names(copy) == before


def test_a_base_without_a_name_or_quantised_is_refused(tmp_path):
    other(tmp_path / "nameless", peft_config=LoraConfig(**LORA), max_steps=1).train()
    checkpoint, base = tmp_path / "nameless" / "checkpoint-1", tmp_path / "base"
    with pytest.raises(ConfigError, match="name it with --base"):
        export(checkpoint, tmp_path / "out", merge_adapter=True)
    model = tiny_model()
    model.save_pretrained(base)
    model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    model.config.save_pretrained(tmp_path / "quantised")
    with pytest.raises(ConfigError, match="is quantised"):
        export(checkpoint, tmp_path / "out", merge_adapter=True, base=str(tmp_path / "quantised"))
    assert nothing_left(tmp_path)
    assert export(checkpoint, tmp_path / "out", merge_adapter=True, base=str(base)) == "merged adapter"


@pytest.mark.parametrize("dora", [pytest.param(False, marks=pytest.mark.full), True])
def test_an_adapter_alone_and_merged_in_float32_into_a_base_in_half_precision(tmp_path, dora):
    tiny_model().bfloat16().save_pretrained(tmp_path / "half")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="float32")
    start = {name: value.clone() for name, value in model.state_dict().items()}
    adapter = LoraConfig(**LORA, use_dora=dora)
    trainer = other(tmp_path / "on_half", model=model, peft_config=adapter, learning_rate=0.05)
    trainer.train()
    checkpoint = tmp_path / "on_half" / "checkpoint-3"
    assert export(checkpoint, tmp_path / "alone") == "adapter"
    files = {*PLAIN, "adapter_config.json", "adapter_model.safetensors"}
    assert names(tmp_path / "alone") == files - {"config.json", "generation_config.json"}
    out = tmp_path / "adapter"  # as a temporary folder of it might be called
    assert export(checkpoint, out, merge_adapter=True, dtype="float32") == "merged adapter"
    assert names(out) == PLAIN | {"model.safetensors"}
    merged = AutoModelForCausalLM.from_pretrained(out).state_dict()
    expected = trainer.model.merge_and_unload().state_dict()
    assert all(torch.allclose(merged[name], value, atol=1e-6) for name, value in expected.items())
    moved = [name for name, value in start.items() if not torch.allclose(merged[name], value, atol=1e-6)]
    assert len(moved) == 4  # q and v of two layers
    export(checkpoint, tmp_path / "stored", merge_adapter=True)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "stored", dtype="auto").dtype == torch.bfloat16


@pytest.fixture(scope="module")
def tied(tmp_path_factory) -> Path:
    tiny_model("llama").save_pretrained(folder := tmp_path_factory.mktemp("tied") / "base")
    return folder


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 40)[None]).logits


def adapted(base: Path, folder: Path, **adapter: Any) -> torch.Tensor:
    """Save a checkpoint with an adapter whose weights are random; returns the logits with it."""
    torch.manual_seed(0)
    options = {"task_type": "CAUSAL_LM", "init_lora_weights": False, "target_modules": ["q_proj"], **adapter}
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(**options))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    write_listing(folder, {"step": 1})
    return logits(model)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`", "ignore:Input and output embeddings")
@pytest.mark.parametrize(
    ("adapter", "stays_tied"),
    [
        ({}, True),
        pytest.param({"target_modules": ["embed_tokens"]}, False, marks=pytest.mark.full),
        pytest.param({"target_modules": ["lm_head"]}, False, marks=pytest.mark.full),
        ({"target_modules": ["embed_tokens", "lm_head", "q_proj"]}, False),
        pytest.param({"target_modules": ["embed_tokens"], "ensure_weight_tying": True}, False, marks=pytest.mark.full),
        ({"target_modules": [], "target_parameters": ["embed_tokens.weight"]}, False),
        pytest.param({"target_modules": [], "target_parameters": ["lm_head.weight"]}, False, marks=pytest.mark.full),
        pytest.param({"modules_to_save": ["embed_tokens"]}, False, marks=pytest.mark.full),
        ({"modules_to_save": ["lm_head"]}, False),
        ({"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, True),
        ({"trainable_token_indices": [3, 4, 7]}, False),
    ],
    ids=str,
)
def test_an_adapter_of_tied_weights_is_merged_into_a_copy(tied, tmp_path, adapter, stays_tied):
    expected = adapted(tied, tmp_path / "adapter", **adapter)
    export(tmp_path / "adapter", tmp_path / "out", merge_adapter=True, base=str(tied))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.allclose(logits(merged), expected, rtol=1e-4, atol=1e-4)
    assert (
        merged.config.tie_word_embeddings is (merged.lm_head.weight is merged.model.embed_tokens.weight) is stays_tied
    )
    assert not torch.allclose(expected, logits(AutoModelForCausalLM.from_pretrained(tied)), atol=1.0)


@pytest.mark.full
def test_a_trained_adapter_of_a_tied_embedding_is_merged_and_rounded_to_half_precision(tied, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tied)
    adapter = LoraConfig(**{**LORA, "target_modules": ["embed_tokens", "q_proj"]})
    trainer = other(tmp_path / "run", model=model, peft_config=adapter, learning_rate=0.05)
    trainer.train()
    expected = logits(trainer.model)
    export(tmp_path / "run" / "checkpoint-3", tmp_path / "out", merge_adapter=True, dtype="bfloat16")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert {p.dtype for p in merged.parameters()} == {torch.bfloat16}
    assert (logits(merged.float()) - expected).norm() / expected.norm() < 0.01  # bfloat16's unit is 0.004
    assert (logits(AutoModelForCausalLM.from_pretrained(tied)) - expected).norm() / expected.norm() > 0.05


def test_a_merge_that_changes_the_model_is_refused(tmp_path):
    # Jamba's forward takes the bias of this layer away while it calls it, and PEFT's layer does not hand it on
    architecture("jamba").save_pretrained(tmp_path / "base")
    adapted(tmp_path / "base", tmp_path / "adapter", target_modules=["dt_proj"])
    with pytest.raises(CheckpointError, match=r"logits of the merged model differ .* by [0-9.]+e-0[12] of their norm"):
        export(tmp_path / "adapter", tmp_path / "out", merge_adapter=True, base=str(tmp_path / "base"))
    assert nothing_left(tmp_path)
    adapted(tmp_path / "base", tmp_path / "other", target_modules=["in_proj", "out_proj"])
    assert export(tmp_path / "other", tmp_path / "out", merge_adapter=True, base=str(tmp_path / "base"))


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`", "ignore:Input and output embeddings")
def test_a_class_that_ties_whatever_its_configuration_says_is_refused(tied, tmp_path, monkeypatch):
    adapted(tied, tmp_path / "adapter", target_modules=["embed_tokens"])

    def tie(self: Any, *args: Any, **kwargs: Any) -> None:
        self.lm_head.weight = self.model.embed_tokens.weight

    monkeypatch.setattr(LlamaForCausalLM, "tie_weights", tie)
    with pytest.raises(CheckpointError, match=r"LlamaForCausalLM does not load \S+ as it was merged"):
        export(tmp_path / "adapter", tmp_path / "out", merge_adapter=True, base=str(tied))
    assert nothing_left(tmp_path)
