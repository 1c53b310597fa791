"""The contract with TRL, transformers and Accelerate holds, and one that does not is an error that says where."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers
import trl

from grpo_ext import GRPOConfig, GRPOTrainer, checks, compat, contract
from grpo_ext.contract import Point, broken_point
from grpo_ext.errors import ContractError
from grpo_ext.forward import reference
from grpo_ext.rollouts import build
from grpo_ext.run import fingerprint, state
from grpo_ext.step import loss, terms
from tests.support.tiny import config_kwargs, letter_reward, prompts, tiny_model, tiny_tokenizer


@pytest.fixture
def verify_anew():
    contract.verify.cache_clear()
    yield contract.verify
    contract.verify.cache_clear()


def test_the_contract_holds_beside_the_installed_versions(verify_anew):
    verify_anew()
    assert contract.untested() is None


POINTS = [*contract.OVERRIDES.values(), *contract.CALLED]


@pytest.mark.parametrize("point", POINTS, ids=lambda p: p.name)
def test_each_point_holds(point):
    assert broken_point(point) is None


# ---- A broken contract ----------------------------------------------------------------------------------------------


def moved(self, model, inputs, extra):
    """TRL's `_compute_loss` with a parameter more."""


def test_a_parameter_more_on_a_method_that_is_overridden_is_named(monkeypatch, verify_anew, tmp_path):
    monkeypatch.setattr(trl.GRPOTrainer, "_compute_loss", moved)
    with pytest.raises(ContractError) as caught:
        GRPOConfig(str(tmp_path))
    text = str(caught.value)
    assert "GRPOTrainer._compute_loss takes (model, inputs, extra), not (model, inputs)" in text
    assert f"trl {trl.__version__}" in text
    assert "1.15.0 and 1.16.0" in text


def test_a_method_that_is_gone_is_named(monkeypatch, verify_anew):
    monkeypatch.delattr(transformers.Trainer, "_finalize_training")
    with pytest.raises(ContractError, match=r"GRPOTrainer\._finalize_training is missing"):
        verify_anew()


def test_an_attribute_that_trl_no_longer_sets_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(contract, "ATTRIBUTES", (*contract.ATTRIBUTES, "_gone"))
    with pytest.raises(ContractError, match=r"trl\.GRPOTrainer sets no _gone"):
        trainer(tmp_path)


def test_an_attribute_of_environments_is_wanted_where_there_are_some(monkeypatch):
    monkeypatch.setattr(contract, "ATTRIBUTES", ())
    seen = SimpleNamespace(use_vllm=True, vllm_generation=None, _last_loaded_step=-1, environment_factories=None)
    contract.verify_built(seen)
    seen.environment_factories = {None: list}
    with pytest.raises(ContractError, match=r"trl\.GRPOTrainer sets no _env_tools, _environment_pool"):
        contract.verify_built(seen)


def trainer(folder: Path) -> GRPOTrainer:
    return GRPOTrainer(
        model=tiny_model(),
        reward_funcs=letter_reward,
        args=GRPOConfig(**config_kwargs(folder)),
        train_dataset=prompts(),
        processing_class=tiny_tokenizer(),
    )


class Lines:
    def method(self):
        first = 1
        return first + 2


def test_parameters_may_follow_where_the_override_passes_them_on():
    assert broken_point(Point(Lines, "method", ())) is None
    assert broken_point(Point(trl.GRPOTrainer, "_compute_loss", ("model",))) is None
    assert broken_point(Point(trl.GRPOTrainer, "_compute_loss", ("model",), closed=True)) is not None


# ---- A newer TRL ----------------------------------------------------------------------------------------------------


def test_a_newer_trl_whose_contract_holds_trains_and_is_said_once_to_be_untested(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(contract, "_installed", lambda package: "1.99.0")
    run = trainer(tmp_path)
    with caplog.at_level("WARNING"):
        run.train()
    said = [r.getMessage() for r in caplog.records if "1.99.0" in r.getMessage()]
    assert len(said) == 1
    assert "grpo-ext check" in said[0]
    assert run.state.global_step == 2


def test_tested_versions_are_not_said_to_be_untested(monkeypatch):
    for tested in contract.TESTED_TRL:
        versions = {**contract.NEWEST_TESTED, "trl": tested}
        monkeypatch.setattr(contract, "_installed", versions.get)
        assert contract.untested() is None


def test_a_newer_transformers_is_said_to_be_untested(monkeypatch):
    monkeypatch.setattr(contract, "_installed", {**contract.NEWEST_TESTED, "transformers": "5.99.0"}.get)
    assert contract.untested().startswith("transformers 5.99.0 is newer than 5.")


# ---- The contract says what the package does ------------------------------------------------------------------------


def own_classes() -> list[type]:
    return [c for c in GRPOTrainer.__mro__ if c.__module__.startswith("grpo_ext")]


def test_every_override_is_in_the_contract():
    ours = {name for c in own_classes() for name, value in vars(c).items() if inspect.isfunction(value)}
    assert {name for name in ours if hasattr(trl.GRPOTrainer, name)} == set(contract.OVERRIDES)


@pytest.mark.parametrize("name", [n for n, p in contract.OVERRIDES.items() if not p.closed])
def test_an_override_whose_contract_is_open_passes_on_what_follows(name):
    found = inspect.signature(getattr(GRPOTrainer, name)).parameters.values()
    assert inspect.Parameter.VAR_KEYWORD in {p.kind for p in found}
    # TRL gives by name what follows those that are named here
    named = [p.name for p in found if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert inspect.Parameter.VAR_POSITIONAL in {p.kind for p in found} or named[1:] == list(
        contract.OVERRIDES[name].parameters
    )


def reads(tree: ast.AST, context: type = ast.Load, owner: str = "self") -> set[str]:
    """Names X of `self.X` in a tree."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == owner
        and isinstance(node.ctx, context)
    }


def test_the_attributes_that_the_trainer_reads_of_trls_are_in_the_contract():
    trees = [ast.parse(inspect.getsource(inspect.getmodule(c))) for c in own_classes()]
    read, own = set().union(*map(reads, trees)), set().union(*(reads(tree, ast.Store) for tree in trees))
    kept = (fingerprint, state)
    for module in (checks.trainer, checks.ahead, compat, *kept, reference, build, loss, terms):  # they take the trainer
        read |= reads(ast.parse(inspect.getsource(module)), owner="trainer")
    own |= reads(ast.parse(inspect.getsource(reference)), ast.Store, owner="trainer")
    theirs = read - own - {"_tr_loss", "_total_loss_scalar", "_globalstep_last_logged"} - set(dir(GRPOTrainer))
    conditional = (*contract.SAMPLING_ATTRIBUTES.values(), contract.ENVIRONMENT_ATTRIBUTES)
    assert theirs == set(contract.ATTRIBUTES).union(*conditional)


# ---- Views ----------------------------------------------------------------------------------------------------------


class Base:
    def both(self) -> tuple[str, str]:
        return self.name, self.inner()


class Thing(Base):
    name = "own"

    def inner(self) -> str:
        return self.name

    def both(self) -> tuple[str, str]:
        self.asked = True
        return super().both()


def test_a_method_sees_a_view_and_what_it_calls_sees_the_object():
    thing = Thing()
    assert compat.on_view(thing.both, {"name": "other"}) == ("other", "own")
    assert thing.both() == ("own", "own")
    assert compat.on_view(thing.both, {"inner": lambda: "replaced"}) == ("own", "replaced")


def test_what_is_set_on_a_view_is_set_on_the_object_and_nothing_else_changes():
    thing = Thing()
    compat.on_view(thing.both, {"name": "other"})
    assert vars(thing) == {"asked": True}
    view = compat.View(thing, {"name": "other"})
    assert isinstance(view, Thing)
    with pytest.raises(AttributeError, match="nothing"):
        _ = view.nothing


def test_what_is_replaced_can_be_replaced_again_without_reaching_the_object():
    class Mixin(Thing):
        def both(self) -> tuple[str, str]:
            before, self.name = self.name, "mixed"
            try:
                return super().both()
            finally:
                self.name = before

    thing = Mixin()
    assert compat.on_view(thing.both, {"name": "other"}) == ("mixed", "own")
    assert "name" not in vars(thing)


def test_a_method_that_was_replaced_by_a_function_is_named():
    thing = Thing()
    thing.inner = lambda: "patched"
    with pytest.raises(ContractError, match="was put in the place of a method"):
        compat.on_view(thing.inner, {})
