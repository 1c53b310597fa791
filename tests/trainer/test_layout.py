"""Every switch of the layout changes where work is done, and nothing that is learned."""

import functools
import inspect
import re
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, modeling_utils

from grpo_ext import GRPOTrainer
from grpo_ext.errors import ConfigError
from grpo_ext.forward import choice
from grpo_ext.rollouts.ahead import RolloutsAhead
from tests.support.architectures import architecture
from tests.support.decoding import decoding
from tests.support.selection import few_of
from tests.support.tiny import prompts, sparse_reward, tiny_model
from tests.support.trainers import change, error, form_of, log_of, make, ran, update
from tests.tolerances import UPDATE

PLAIN: dict[str, Any] = {"forward": "padded", "skip_zero_contribution": False}
FULL: dict[str, Any] = {"forward": "auto", "skip_zero_contribution": True}
OTHER_TERMS = [{"beta": 0.1}, {"entropy_coef": 0.01}, {"top_entropy_quantile": 0.5}]
SWITCHES: list[dict[str, Any]] = [{"micro_batch_tokens": 50}, {"gradient_checkpointing": True}, FULL]


@pytest.fixture(scope="module")
def plain_update(tmp_path_factory):
    """The update of a kind of model with every switch off."""

    @functools.cache
    def of(kind: str) -> torch.Tensor:
        with decoding(compact=False):
            return update(tmp_path_factory.mktemp("plain"), model=kind, reward=sparse_reward, max_steps=1, **PLAIN)[0]

    return of


@pytest.mark.parametrize(
    ("kind", "switch"),
    [*(("qwen2", switch) for switch in SWITCHES), pytest.param("moe", FULL, marks=pytest.mark.full)],
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)
def test_a_switch_does_not_change_the_update(tmp_path, plain_update, kind, switch):
    plain = plain_update(kind)
    with decoding(compact=switch is FULL):
        settings = {"reward": sparse_reward, "max_steps": 1, **PLAIN, **switch}
        switched, _ = update(tmp_path / "switched", model=kind, **settings)
    assert error(plain, switched) <= UPDATE


def sizes_of_forwards(trainer: GRPOTrainer, dim: int | None = None) -> list[int]:
    """The tokens of each forward that has a gradient, or its size in a dimension (0: completions, where padded)."""
    sizes: list[int] = []

    def note(module: Any, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            sizes.append(args[0].numel() if dim is None else args[0].size(dim))

    trainer.model.get_input_embeddings().register_forward_hook(note)
    return sizes


@pytest.mark.parametrize("settings", [{}, {"skip_zero_contribution": False}, *few_of(OTHER_TERMS, [])], ids=str)
def test_completions_without_a_contribution_are_not_run(tmp_path, settings):
    trainer = make(tmp_path, reward=sparse_reward, forward="padded", max_steps=1, **settings)
    rows = sizes_of_forwards(trainer, 0)
    trainer.train()
    assert sum(rows) == 16 if settings else 0 < sum(rows) < 16


def test_the_budget_holds_in_every_forward(tmp_path):
    trainer = make(tmp_path, micro_batch_tokens=45, max_steps=1)
    tokens = sizes_of_forwards(trainer)
    trainer.train()
    assert max(tokens) <= 45
    assert len(tokens) > 2


def test_a_form_is_chosen_and_can_be_set(tmp_path):
    shares = {}
    for form in ("auto", "packed", "prefix", "padded"):
        trainer = ran(make(tmp_path, forward=form, max_steps=1))
        assert form_of(trainer) == ("packed" if form == "auto" else form)
        shares[form] = [log_of(trainer, f"layout/{kind}_share")[0] for kind in ("padding", "duplicate")]
    assert shares["auto"] == shares["packed"] == [0.0, 0.0]
    assert shares["prefix"][0] > shares["prefix"][1] == 0.0  # prompts once, completions in columns
    assert shares["padded"][0] > 0 < shares["padded"][1]
    with pytest.raises(ConfigError, match="forward='fast' is unknown; use one of 'auto', 'packed', 'prefix', 'padded'"):
        make(tmp_path, forward="fast")


def test_the_plan_says_which_form_runs_and_why_and_a_refused_one_is_warned_of(tmp_path, caplog):
    refused = "The best form of the forward was refused; completions run as shared prefixes: "
    make(tmp_path / "hybrid", architecture("lfm2"), max_steps=1).train()
    why = r"\(no packs: Lfm2ForCausalLM has layers that packs do not support \(conv\)\)\n"
    assert re.search(f"  forward +shared prefixes: .* {why}", caplog.text)
    assert refused not in caplog.text
    caplog.clear()
    make(tmp_path / "refused", tiny_model("nemotron", bos_token_id=1), max_steps=1).train()
    assert caplog.text.count(refused) == 1
    assert "(no packs: " in caplog.text


@pytest.mark.parametrize("lag", few_of([0, 1], [1]))
def test_forms_are_compared_once_before_training_or_an_evaluation(tmp_path, monkeypatch, lag):
    compared, why_form_fails = [], choice.why_form_fails

    def watched(form: Any, alone: Any, *args: Any) -> str | None:
        if form != "padded":
            compared.append(alone.model)
        return why_form_fails(form, alone, *args)

    monkeypatch.setattr(choice, "why_form_fails", watched)
    settings = {"beta": 0.1, "max_steps": 2, "rollout_lag": lag, "eval_dataset": prompts(4)}
    trainer = make(tmp_path, **settings)
    models, forms = [trainer.model, trainer.ref_model], trainer._forwards.choice
    assert [forms.form(model) for model in models] == ["padded", "padded"]
    if lag:
        sample = RolloutsAhead._sample

        def spied(ahead: RolloutsAhead, *args: Any) -> Any:
            models.extend((ahead.snapshot.policy, ahead.snapshot.reference))
            return sample(ahead, *args)

        monkeypatch.setattr(RolloutsAhead, "_sample", spied)
    else:
        trainer.evaluate()
        assert compared == models
    trainer.train()
    assert compared == models[:2]
    assert {forms.form(model) for model in models} == {"packed"}
    assert len(models) >= 2 + 2 * lag


@pytest.mark.parametrize("kind", ["doge", "bloom"])
@pytest.mark.full
def test_models_that_take_no_packs_train_with_default_settings(tmp_path, caplog, kind):
    """The first looks as if it did, and fails on its mask."""
    no_experts = {"router_aux_loss_coef": 0.0}  # Doge's configuration names a coefficient also without experts
    settings = {"bf16": None, "gradient_checkpointing": True, "beta": 0.1, "max_steps": 2, **no_experts}
    trainer = make(tmp_path, tiny_model(kind, bos_token_id=1, initializer_range=0.02), **settings)
    assert trainer.args.bf16
    trainer.train()
    assert form_of(trainer) == "prefix"
    assert "Padded batches run" not in caplog.text
    assert all(share > 0 for share in log_of(trainer, "layout/padding_share"))


def test_a_loss_computed_outside_a_step_does_not_run_packs_under_checkpointing(tmp_path):
    """Its backward pass runs the layers again where packs are off."""
    trainer = ran(make(tmp_path, gradient_checkpointing=True, max_steps=1))
    plain = make(tmp_path / "plain", gradient_checkpointing=True, forward="padded")
    plain.model.load_state_dict(trainer.model.state_dict())
    rows = [row for row in prompts(2).to_list() for _ in range(4)]
    scored, gradients = trainer._generate_and_score_completions(rows), []
    for one in (trainer, plain):
        one.model.train()
        one.model.zero_grad()
        with torch.enable_grad():
            loss = one.compute_loss(one.model, dict(scored))
        loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in one.model.parameters() if p.grad is not None]))
    assert error(gradients[1], gradients[0]) <= UPDATE


def test_a_step_without_any_contribution_changes_nothing(tmp_path):
    learned, trainer = update(tmp_path, reward=lambda completions, **kwargs: [1.0] * len(completions))
    assert not learned.any()
    assert log_of(trainer, "loss") == [0.0, 0.0, 0.0]


KNOWS_LAYERS = "every_n_layers" in inspect.signature(PreTrainedModel._set_gradient_checkpointing).parameters


@pytest.mark.skipif(not KNOWS_LAYERS, reason="transformers before 5.23 checkpoints every layer")
@pytest.mark.parametrize(
    ("kwargs", "settings"),
    [
        ({"every_n_layers": 2}, {"beta": 0.1}),
        pytest.param({"every_n_layers": 2, "use_reentrant": False}, {"forward": "prefix"}, marks=pytest.mark.full),
        pytest.param({"every_n_layers": 2}, {"rollout_lag": 1}, marks=pytest.mark.full),
        pytest.param({"offload": True}, {"num_iterations": 2}, marks=pytest.mark.full),
    ],
)
def test_gradient_checkpointing_stays_as_the_trainer_enabled_it(tmp_path, monkeypatch, kwargs, settings):
    # no host memory is pinned without an accelerator
    monkeypatch.setattr(modeling_utils, "save_on_cpu", lambda **options: torch.autograd.graph.save_on_cpu())
    checkpointed = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": kwargs}
    layers: set[tuple[bool, ...]] = set()
    functions: set[int] = set()
    trainer = make(tmp_path, max_steps=2, **checkpointed, **settings)
    model = trainer.model.model

    def note(module: Any, args: Any) -> None:
        if module.training and torch.is_grad_enabled():
            layers.add(tuple(layer.gradient_checkpointing for layer in model.layers))
            functions.add(id(model.layers[0]._gradient_checkpointing_func))

    model.register_forward_pre_hook(note)
    update = change(trainer)
    assert layers == {(True, "every_n_layers" not in kwargs)}
    assert len(functions) == 1 + (settings.get("forward") == "prefix")  # the comparison of forms has its own
    assert error(change(make(tmp_path / "plain", max_steps=2, **settings)), update) <= UPDATE
