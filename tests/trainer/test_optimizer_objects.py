"""Optimizers and schedules that users hand over, or make in `create_optimizer`: what they hold, and what is resumed."""

import json
import shutil
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.optim import SGD, AdamW, NAdam
from torch.optim.lr_scheduler import ConstantLR, ExponentialLR, LambdaLR, OneCycleLR

from grpo_ext import GRPOTrainer
from grpo_ext.errors import CheckpointError, ModelError
from grpo_ext.run.checkpoint import write_listing
from tests.support.selection import few_of
from tests.support.tiny import tiny_model
from tests.support.trainers import LORA, make, other, parameters, ran, trained


def halving(optimizer: Any) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 0.5**step)


def groups(model: Any, *orders: bool) -> list[dict[str, Any]]:
    """Two groups: weights that are matrices, and others, in this order or the other."""
    return [{"params": [p for p in model.parameters() if (p.dim() > 1) is order]} for order in orders]


def steps(folder: Any, build: Any = AdamW, schedule: Any = halving, lr: float = 0.1, **changes: Any) -> GRPOTrainer:
    """A trainer with an optimizer and a schedule that were built of its model."""
    model = tiny_model()
    optimizer = build(model.parameters(), lr=lr)
    return other(folder, model=model, optimizers=(optimizer, schedule(optimizer)), max_completion_length=6, **changes)


def making(build: Any) -> type[GRPOTrainer]:
    """A user's subclass whose `create_optimizer` builds one of its model, without super()."""

    def create_optimizer(self: Any, model: Any = None) -> Any:
        if self.optimizer is None:
            self.optimizer = build(self.model)
        return self.optimizer

    return type("Mine", (GRPOTrainer,), {"create_optimizer": create_optimizer})


# ---- What an optimizer holds -----------------------------------------------------------------------------------------


def of_base(folder: Any) -> Any:
    model = tiny_model()
    return make(folder, model, optimizers=(AdamW(model.parameters()), None), peft_config=LoraConfig(**LORA))


def of_twin(folder: Any) -> Any:
    return make(folder, tiny_model(), optimizers=(AdamW(tiny_model().parameters()), None))


@pytest.mark.parametrize("build", [of_base, of_twin])
def test_an_optimizer_of_weights_that_are_not_trained_is_refused_at_construction(tmp_path, build):
    with pytest.raises(ModelError, match=r"AdamW holds none of the .* Build it from the trainer's model"):
        build(tmp_path)


def test_create_optimizer_is_looked_at_before_training(tmp_path):
    trainer = make(tmp_path, cls=making(lambda model: AdamW(tiny_model().parameters())))
    with pytest.raises(ModelError, match="holds none of the 27 weights"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_an_optimizer_of_the_adapter_trains_it(tmp_path):
    model = get_peft_model(tiny_model(), LoraConfig(**LORA))
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    start = trained(model)
    ran(make(tmp_path, model, optimizers=(optimizer, None), max_steps=1))
    assert (trained(model) - start).abs().max() > 0.01


@pytest.mark.parametrize("handed_over", [True, False])
def test_weights_that_no_group_holds_are_named(tmp_path, caplog, handed_over):
    def some(model: Any) -> Any:
        return AdamW(groups(model, True))

    model = tiny_model()
    parts = {"optimizers": (some(model), None)} if handed_over else {"cls": making(some)}
    ran(make(tmp_path, model, **parts, max_steps=1))
    assert caplog.text.count("11 of 27 trained weights are in no group of the optimizer AdamW") == 1
    assert "model.layers.0.self_attn.q_proj.bias" in caplog.text
    caplog.clear()
    ran(make(tmp_path / "all", max_steps=1))
    assert "in no group" not in caplog.text


class OnCopies(torch.optim.Optimizer):
    """As torchao's offloaded optimizers: its groups are computed, and hold copies."""

    def __init__(self, weights: Any) -> None:
        self.weights = list(weights)
        self.inner = SGD([p.detach().clone() for p in self.weights], lr=0.1)
        self.state, self.defaults = self.inner.state, self.inner.defaults

    @property
    def param_groups(self) -> Any:
        return self.inner.param_groups

    def state_dict(self) -> dict[str, Any]:
        return dict(self.inner.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)

    def step(self, closure: Any = None) -> None:
        for weight, copied in zip(self.weights, self.inner.param_groups[0]["params"]):
            copied.grad = weight.grad
        self.inner.step()
        with torch.no_grad():
            for weight, copied in zip(self.weights, self.inner.param_groups[0]["params"]):
                weight.copy_(copied)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for weight in self.weights:
            weight.grad = None


def test_an_optimizer_that_keeps_copies_is_not_refused(tmp_path):
    model = tiny_model()
    start = trained(model)
    ran(make(tmp_path, model, cls=making(lambda model: OnCopies(model.parameters())), max_steps=1))
    assert (trained(model) - start).abs().max() > 0


# ---- Cases of a step, which the optimizer makes again ---------------------------------------------------------------


class Holder(torch.optim.Optimizer):
    """As Lookahead, or Muon with AdamW: it steps optimizers that it holds, and computes its own from theirs."""

    def __init__(self, *inner: Any) -> None:
        self.inner, self.defaults = list(inner), {}

    @property
    def param_groups(self) -> Any:
        return [group for optimizer in self.inner for group in optimizer.param_groups]

    @property
    def state(self) -> Any:
        return {weight: values for optimizer in self.inner for weight, values in optimizer.state.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"inner": [optimizer.state_dict() for optimizer in self.inner]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for optimizer, part in zip(self.inner, state["inner"], strict=True):
            optimizer.load_state_dict(part)

    def step(self, closure: Any = None) -> None:
        for optimizer in self.inner:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.inner:
            optimizer.zero_grad(set_to_none)


class InGroups(SGD):
    """As Prodigy: it keeps numbers in its groups, changes them in place, and adds to them."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group.setdefault("steps", torch.zeros(())).add_(1)
            group["lr"] = 0.01 * (1 + float(group["steps"]))
        return super().step(closure)


class Hidden(SGD):
    """It counts its steps where nobody looks."""

    count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        for group in self.param_groups:
            group["lr"] = 0.01 * self.count
        return super().step(closure)


def held(model: Any) -> Any:
    matrices, others = groups(model, True, False)
    return Holder(AdamW([matrices], lr=0.01), SGD([others], lr=0.01, momentum=0.9))


STEP: dict[str, Any] = {"max_steps": 1, "save_strategy": "no", "trail": True}
CASES = [{"loss_type": "dr_grpo"}, {"epsilon": 0.5}]


def made_again(folder: Any, build: Any) -> Any:
    """A step of an optimizer that is built of the model, and what its rerun with cases says."""
    ran(make(folder, cls=making(build), **STEP))
    return make(folder, cls=making(build), **STEP).rerun(1, cases=CASES)


@pytest.mark.parametrize(
    "build", [held, lambda model: InGroups(model.parameters(), lr=0.01)], ids=["holds others", "groups"]
)
def test_a_case_leaves_an_optimizer_that_holds_others_or_numbers_in_groups_as_it_was(tmp_path, build):
    again = made_again(tmp_path, build)
    assert again.comparison.verdict == "same bits"
    assert [case["noise"]["update"] for case in again.cases] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda model: OnCopies(model.parameters()), "the optimizer holds copies of the weights"),
        (lambda model: Hidden(model.parameters(), lr=0.01), "the optimizer draws random numbers, or changes more than"),
    ],
    ids=["copies", "hidden"],
)
def test_an_optimizer_whose_step_cannot_be_made_again_has_no_cases(tmp_path, build, reason):
    again = made_again(tmp_path, build)
    assert all(reason in case["reason"] for case in again.cases)
    assert again.comparison.verdict == ("same bits" if "copies" in reason else "different")


def test_a_case_whose_optimizer_fails_leaves_weights_and_optimizer_as_they_were(tmp_path):
    class Failing(InGroups):
        fails = False

        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            if self.fails:
                raise RuntimeError("no room")

    model = tiny_model()
    trainer = make(tmp_path, model, cls=making(lambda model: Failing(model.parameters(), lr=0.01)), **STEP)
    ran(trainer)
    Failing.fails = True
    fresh = tiny_model()
    before = trained(fresh)
    again = make(tmp_path, fresh, cls=making(lambda model: Failing(model.parameters(), lr=0.01)), **STEP)
    with pytest.raises(RuntimeError, match="no room"):
        again.rerun(1, cases=CASES)
    assert torch.equal(trained(fresh), before)
    assert not any("steps" in group for group in again.optimizer.param_groups)


# ---- Resume ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Any:
    """The folder of a run with an optimizer and a schedule of its own."""
    folder = tmp_path_factory.mktemp("saved")
    steps(folder).train()
    return folder


OTHERS = {
    "optimizer.class": {"build": SGD},
    'optimizer.class: "AdamW" in the checkpoint, "NAdam" now': {"build": NAdam},
    "optimizer.group 0 lr: 0.1 in the checkpoint, 0.05 now": {"lr": 0.05},
    "optimizer.group 0 betas": {"build": lambda weights, lr: AdamW(weights, lr=lr, betas=(0.8, 0.99))},
    "optimizer.group 0 weight_decay": {"build": lambda weights, lr: AdamW(weights, lr=lr, weight_decay=0.5)},
    'lr_scheduler: "LambdaLR" in the checkpoint, "ConstantLR" now': {"schedule": ConstantLR},
}


@pytest.mark.parametrize("words", OTHERS)
def test_another_optimizer_or_schedule_is_refused_on_resume(saved, words):
    """Before anything of the run's folder is renamed."""
    with pytest.raises(CheckpointError) as error:
        steps(saved, **OTHERS[words]).train(str(saved / "checkpoint-1"))
    assert words in str(error.value)
    remedy = "the optimizer keeps the checkpoint's optimizer." if "optimizer" in words else "changed_on_resume=['lr_sch"
    assert remedy in str(error.value)
    assert (saved / "checkpoint-3").is_dir()


@pytest.mark.parametrize("handed_over", few_of([True, False], [True]))
def test_groups_in_another_order_are_refused_on_resume(tmp_path, handed_over):
    """Also where both have as many weights, whose moments would be loaded into the wrong ones."""

    def run(name: str, *orders: bool) -> Any:
        def build(model: Any) -> Any:
            return AdamW(groups(model, *orders), lr=1e-2)

        model = tiny_model()
        parts = {"optimizers": (build(model), None)} if handed_over else {"cls": making(build)}
        return other(tmp_path / name, model=model, max_steps=2, max_completion_length=6, **parts)

    run("whole", True, False).train()
    again = ran(run("again", True, False), tmp_path / "whole" / "checkpoint-1")
    assert again.state.global_step == 2
    with pytest.raises(
        CheckpointError,
        match=r"optimizer\.group 0 weights: \"16 weights .*model\.embed_tokens.*\" in the checkpoint, \"11 weights",
    ):
        run("other", False, True).train(str(tmp_path / "whole" / "checkpoint-1"))


@pytest.mark.parametrize("build", few_of([AdamW, NAdam, SGD], [SGD]))
def test_a_run_resumes_with_objects_that_are_built_alike(tmp_path, build):
    """Also a schedule that moves more than the rate; whole and resumed runs have the same bits."""

    def schedule(optimizer: Any) -> OneCycleLR:
        return OneCycleLR(optimizer, 1e-2, 10, cycle_momentum=build is not SGD)

    whole = ran(steps(tmp_path / "a", build, schedule))
    again = steps(tmp_path / "b", build, schedule)
    again.train(str(tmp_path / "a" / "checkpoint-1"))
    assert torch.equal(parameters(whole), parameters(again))
    again.train(str(tmp_path / "a" / "checkpoint-2"))  # whose groups have moved since it was built
    assert torch.equal(parameters(whole), parameters(again))


@pytest.mark.parametrize("own", [True, False])
def test_a_schedule_of_another_optimizer_is_refused(tmp_path, own):
    model = tiny_model()
    optimizer = AdamW(model.parameters()) if own else None
    schedule = ConstantLR(AdamW(model.parameters()))
    with pytest.raises(ModelError, match="ConstantLR moves the learning rate of another optimizer"):
        make(tmp_path, model, optimizers=(optimizer, schedule)).train()


SCHEDULES = {
    "one that multiplies": lambda optimizer: ExponentialLR(optimizer, 0.1),
    "one with values in the groups": lambda optimizer: OneCycleLR(optimizer, 2.5, 9, cycle_momentum=False),
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_that_may_change_begins_at_its_start(tmp_path, saved, kind):
    """And the moments are the checkpoint's."""
    model = tiny_model()
    alone = SCHEDULES[kind](optimizer := AdamW(model.parameters(), lr=0.1))
    rates = []
    for _ in range(2):
        rates += alone.get_last_lr()
        optimizer.step()
        alone.step()
    parts = {"schedule": SCHEDULES[kind], "allow_changed_on_resume": ["lr_scheduler"]}
    trainer = ran(steps(tmp_path / "b", **parts), saved / "checkpoint-1")
    assert [line["learning_rate"] for line in trainer.state.log_history if "loss" in line][1:] == pytest.approx(rates)
    assert {int(state["step"]) for state in trainer.optimizer.state.values()} == {3}


def test_a_checkpoint_without_a_record_is_loaded_with_a_warning(tmp_path, saved, caplog):
    checkpoint = shutil.copytree(saved / "checkpoint-2", tmp_path / "checkpoint-2")
    identity = json.loads((checkpoint / "grpo_ext_identity.json").read_text())
    identity = {
        name: value for name, value in identity.items() if name.split(".")[0] not in ("optimizer", "lr_scheduler")
    }
    (checkpoint / "grpo_ext_identity.json").write_text(json.dumps(identity))
    write_listing(checkpoint, {"step": 2, "processes": 1})
    ran(steps(tmp_path / "b"), checkpoint)
    assert "checkpoint-2 does not name its optimizer" in caplog.text
