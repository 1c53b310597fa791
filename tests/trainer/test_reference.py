"""The reference model is the policy at its start, for every kind of model and adapter."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

from grpo_ext import GRPOTrainer
from grpo_ext.compat import as_reference
from grpo_ext.errors import CheckpointError, ConfigError, ModelError
from grpo_ext.run.checkpoint import checkpoints
from grpo_ext.run.state import load_state
from grpo_ext.upstream import reference
from tests.support.tiny import tiny_model
from tests.support.trainers import LORA, SAVE, log_of, make, on

load = transformers.AutoModelForCausalLM.from_pretrained
_ATTENTION = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("models") / "start"
    tiny_model("llama").save_pretrained(folder)
    return str(folder)


def lora(**settings: Any) -> peft.LoraConfig:
    return peft.LoraConfig(**{**LORA, **settings})


def moved(model: Any) -> Any:
    """The model with other values in all trained parameters."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def merged(name: str) -> Any:
    return peft.get_peft_model(load(name), lora(init_lora_weights=False)).merge_and_unload().requires_grad_()


def resized(name: str, tokens: int = 64) -> Any:
    model = load(name)
    model.resize_token_embeddings(tokens)
    return model


def headless(name: str) -> str:
    """A folder without the head's weights, which are drawn anew at each load."""
    folder = f"{name}-headless"
    model = tiny_model("qwen2", tie_word_embeddings=False)
    state = {key: value for key, value in model.state_dict().items() if key != "lm_head.weight"}
    model.save_pretrained(folder, state_dict=state)
    return folder


def changed_config(name: str) -> Any:
    model = load(name)
    model.model.layers[0].self_attn.scaling *= 2.0
    return model


def adapted(name: str, config: Any, adapter: str = "default") -> Any:
    return moved(peft.get_peft_model(load(name), config, adapter_name=adapter))


def with_two(name: str) -> Any:
    model = adapted(name, lora())
    model.add_adapter("second", lora(r=2))
    model.set_adapter("second")
    return moved(model)


def seen_before(name: str) -> Any:
    model = adapted(name, lora())
    model.add_adapter("ref", lora())  # as an earlier trainer of TRL's leaves it
    return model


MODELS: dict[str, Callable[[str], Any]] = {
    "name": lambda name: name,
    "object": load,
    "bfloat16": lambda name: load(name, dtype=torch.bfloat16),
    "untied": lambda name: tiny_model("qwen2", tie_word_embeddings=False),
    "changed": lambda name: moved(load(name)),
    "changed_config": changed_config,
    "merged": merged,
    "resized": resized,
    "headless_name": headless,
    "headless_object": lambda name: load(headless(name)),
}
ADAPTERS: dict[str, Callable[[], Any]] = {
    "lora": lora,
    "rslora": lambda: lora(use_rslora=True),
    "dora": lambda: lora(use_dora=True, init_lora_weights=False),
    "gaussian": lambda: lora(init_lora_weights="gaussian"),
    "random": lambda: lora(init_lora_weights=False),
    "pissa": lambda: lora(init_lora_weights="pissa"),
    "olora": lambda: lora(init_lora_weights="olora"),
    "orthogonal": lambda: lora(init_lora_weights="orthogonal"),
    "head": lambda: lora(modules_to_save=["lm_head"]),
    "biases": lambda: lora(bias="all"),
    "embedding": lambda: lora(target_modules=["embed_tokens", "q_proj"], init_lora_weights=False),
    "tokens": lambda: lora(trainable_token_indices=[4, 5], init_lora_weights="olora"),
    "adalora": lambda: peft.AdaLoraConfig(total_step=9, init_lora_weights=False, **_ATTENTION),
    "ia3": lambda: peft.IA3Config(feedforward_modules=[], **_ATTENTION),
    "unilora": lambda: peft.UniLoraConfig(init_theta_d_bound=0.5, **_ATTENTION),
    "hra": lambda: peft.HRAConfig(**_ATTENTION),
}
LOADED: dict[str, Callable[[str], Any]] = {
    "trained": lambda name: adapted(name, lora()),
    "other_name": lambda name: adapted(name, lora(), "mine"),
    "two": with_two,
    "seen_before": seen_before,
    "ia3": lambda name: adapted(name, ADAPTERS["ia3"]()),
    "vera": lambda name: adapted(name, peft.VeraConfig(**_ATTENTION)),
    "embedding": lambda name: adapted(name, ADAPTERS["embedding"]()),
    "pissa": lambda name: adapted(name, ADAPTERS["pissa"]()),
    "replicated": lambda name: adapted(name, lora(layer_replication=[(0, 2), (1, 2)])),
    "dora": lambda name: adapted(name, ADAPTERS["dora"]()),
    "head": lambda name: adapted(name, ADAPTERS["head"]()),
}
KINDS = {"model": MODELS, "adapter": ADAPTERS, "loaded": LOADED}
QUICK = {"model-changed", "adapter-random"}


def each(*names: str) -> list[Any]:
    """The kind and the name of models and adapters, in the form "adapter-pissa"; most of them run with `--full`."""
    pairs = [name.split("-") for name in names] or [[kind, name] for kind, of in KINDS.items() for name in of]
    return [
        pytest.param(*pair, id=name, marks=() if name in QUICK or names else pytest.mark.full)
        for name, pair in (("-".join(pair), pair) for pair in pairs)
    ]


def trainer_of(folder: Any, saved: str, kind: str, name: str, **settings: Any) -> GRPOTrainer:
    torch.manual_seed(5)
    if kind == "adapter":
        parts = {"model": saved, "peft_config": ADAPTERS[name]()}
    else:
        parts = {"model": KINDS[kind][name](saved)}
    usual = {"beta": 0.1, "max_steps": 2, "learning_rate": 0.3, "optim": "sgd", "max_grad_norm": 0.0}
    usual["max_completion_length"] = 6
    return make(folder, **{**parts, **usual, **settings})


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([[3, 4, 5, 6]])).logits.double()


def of_reference(trainer: GRPOTrainer) -> torch.Tensor:
    if trainer.ref_model is not None:
        return logits(trainer.ref_model)
    with as_reference(trainer.model):
        return logits(trainer.model)


@pytest.mark.parametrize(("kind", "name"), each())
def test_the_reference_is_the_policy_at_its_start(tmp_path, saved, kind, name):
    trainer = trainer_of(tmp_path, saved, kind, name)
    start = logits(trainer.model)
    trainer.train()
    assert log_of(trainer, "kl")[0] == pytest.approx(0.0, abs=1e-9)
    assert torch.allclose(of_reference(trainer), start, rtol=0, atol=1e-5)
    assert not torch.allclose(logits(trainer.model), start, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("kind", "name"), each("adapter-random", "adapter-pissa", "loaded-ia3"))
def test_without_a_copy_of_its_start_an_adapter_would_have_another_reference(tmp_path, saved, kind, name):
    """The control: the model with the adapter off, as stock TRL takes it."""
    trainer = trainer_of(tmp_path, saved, kind, name)
    start = logits(trainer.model)
    with trainer.model.disable_adapter():
        assert not torch.allclose(logits(trainer.model), start, rtol=0, atol=1e-3)


@pytest.mark.parametrize("kind", sorted(reference._NEUTRAL))
def test_neutral_adapters_change_nothing_before_they_are_trained(saved, kind):
    adapter = PEFT_TYPE_TO_CONFIG_MAPPING[kind](**_ATTENTION | ({"feedforward_modules": []} if kind == "IA3" else {}))
    assert torch.equal(logits(peft.get_peft_model(load(saved), adapter)), logits(load(saved)))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *each("model-headless_name", "adapter-pissa", "loaded-two"),
        pytest.param("adapter", "biases", id="adapter-biases", marks=pytest.mark.full),
    ],
)
def test_a_resumed_run_has_the_reference_of_its_start(tmp_path, saved, kind, name):
    straight, resumed = (trainer_of(tmp_path / "out", saved, kind, name, **SAVE) for _ in range(2))
    straight.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))
    assert torch.equal(of_reference(straight), of_reference(resumed))
    assert torch.equal(logits(straight.model), logits(resumed.model))
    assert log_of(straight, "kl") == log_of(resumed, "kl")


def test_a_resumed_run_has_the_reference_that_a_callback_has_moved(tmp_path, saved):
    """Also one that resumes a run that was resumed itself, and moved none."""

    def run(name: str, checkpoint: Path | None = None, moves: bool = True) -> GRPOTrainer:
        trainer = trainer_of(tmp_path / name, saved, "model", "object", max_steps=3, **SAVE)
        if moves:
            move = on("on_step_end", lambda _: trainer.ref_model.load_state_dict(trainer.model.state_dict()), at=1)
            trainer.add_callback(move)
        trainer.train(checkpoint and str(checkpoint))
        return trainer

    straight, unmoved = run("straight"), run("unmoved", moves=False)
    for resumed in (
        run("resumed", tmp_path / "straight" / "checkpoint-1"),
        run("again", tmp_path / "resumed" / "checkpoint-2"),
    ):
        assert torch.equal(of_reference(straight), of_reference(resumed))
        assert torch.equal(logits(straight.model), logits(resumed.model))
        assert log_of(straight, "kl") == log_of(resumed, "kl")
    assert not torch.equal(logits(straight.model), logits(unmoved.model))
    for folder in checkpoints(tmp_path / "unmoved"):
        state = load_state(folder)
        assert state is not None
        assert not state["reference"]  # it can be built again


def test_a_run_is_not_resumed_with_another_start(tmp_path, saved):
    trainer_of(tmp_path / "out", saved, "loaded", "other_name", **SAVE).train()
    moved = {"model": adapted(saved, lora(), "mine")}  # by random numbers that no seed has set
    run, checkpoint = (tmp_path / "out", saved, "loaded", "other_name"), tmp_path / "out" / "checkpoint-1"
    with pytest.raises(CheckpointError, match=r"model\.frozen.*\n.*allow_changed_on_resume=\['model\.frozen'\]"):
        trainer_of(*run, **moved).train(checkpoint)
    trainer_of(*run, **moved, allow_changed_on_resume=["model.frozen"]).train(checkpoint)


def test_a_moving_reference_is_refused_with_an_adapter(tmp_path, saved):
    moving = {"sync_ref_model": True, "ref_model_sync_steps": 1}
    for kind, name in (("adapter", "lora"), ("adapter", "random"), ("loaded", "other_name")):
        with pytest.raises(ConfigError, match="set it to False"):
            trainer_of(tmp_path, saved, kind, name, **moving)


def test_an_adapter_of_transformers_is_refused(tmp_path, saved):
    """What PEFT's functions make is saved and resumed; transformers' Trainer does not load the others."""
    added = load(saved)
    try:
        added.add_adapter(lora())
    except ValueError as error:  # transformers 5.24 asks for PEFT 0.22
        pytest.skip(f"transformers has no add_adapter beside this PEFT: {error}")
    adapted(saved, lora()).save_pretrained(tmp_path / "adapter")
    for model in (added, load(tmp_path / "adapter")):  # transformers adds that of a folder to its base
        for beta in (0.0, 0.1):
            with pytest.raises(ModelError, match=r"add_adapter.*peft_config.*get_peft_model"):
                make(tmp_path, model=model, beta=beta)
    added.delete_adapter("default")
    make(tmp_path, model=added.requires_grad_(), max_steps=1).train()


def test_weights_that_a_checkpoint_would_not_hold_are_refused(tmp_path, saved):
    beside = peft.get_peft_model(load(saved), lora())
    beside.get_base_model().model.norm.weight.requires_grad_(True)
    with pytest.raises(ModelError, match=r"norm\.weight.*modules_to_save"):
        make(tmp_path, model=beside)
    trained = peft.get_peft_model(load(saved), lora(modules_to_save=["norm"]))
    make(tmp_path, model=trained, max_steps=1).train()  # the remedy
    two = with_two(saved)
    two.base_model.set_adapter(["default", "second"])
    with pytest.raises(ModelError, match=r"default.*second.*merge_and_unload"):
        make(tmp_path, model=two)


def test_an_adapter_whose_copy_would_run_the_trained_weights_is_refused(tmp_path, saved):
    model = adapted(saved, lora(), "mine")
    forward = model.get_base_model().model.layers[0].forward
    model.get_base_model().model.layers[0].forward = lambda *args, **kwargs: forward(*args, **kwargs)
    with pytest.raises(ModelError, match=r"layers\.0 was replaced.*beta=0"):
        make(tmp_path, model=model, beta=0.1)
    make(tmp_path, model=model, max_steps=1).train()
