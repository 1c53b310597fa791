"""Trainers in this process with the settings that most of tests/trainer share, and what they have learned."""

import dataclasses
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import trl
from transformers import TrainerCallback, TrainerState

from grpo_ext import GRPOConfig, GRPOTrainer
from tests.support.tiny import TINY, config_kwargs, letter_reward, prompts, tiny_model, tiny_tokenizer
from tests.tolerances import ADAM_EPSILON

BASE: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "rollout_chunk_size": None,
    "max_steps": 3,
    "adam_epsilon": ADAM_EPSILON,
    "use_cpu": True,
}
SAVE = {"save_strategy": "steps", "save_steps": 1}
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
TRLS_PARTS = set(inspect.signature(trl.GRPOTrainer.__init__).parameters)
TRLS_SETTINGS = {spec.name for spec in dataclasses.fields(trl.GRPOConfig)}


def make(folder: Any, model: Any = "qwen2", reward: Any = letter_reward, cls: Any = GRPOTrainer, **changes: Any) -> Any:
    """A trainer of a tiny model (a kind, a path, or itself); `changes` are arguments of the trainer and settings.

    A teacher is an argument as a model, and a setting as a path.
    """
    parts: dict[str, Any] = {
        "model": tiny_model(model) if isinstance(model, str) and model in TINY else model,
        "reward_funcs": reward,
        "train_dataset": prompts(12),
        "processing_class": tiny_tokenizer(),
    }
    teacher = {"teacher_model"} if isinstance(changes.get("teacher_model"), torch.nn.Module) else set()
    parts |= {name: value for name, value in changes.items() if name in TRLS_PARTS | teacher}
    settings = {name: value for name, value in changes.items() if name not in TRLS_PARTS | teacher}
    settings = config_kwargs(folder, **{**BASE, **settings})
    if issubclass(cls, GRPOTrainer):
        return cls(**{"args": GRPOConfig(**settings), **parts})
    settings = {name: value for name, value in settings.items() if name in TRLS_SETTINGS}
    return cls(args=trl.GRPOConfig(**settings), **parts)


def other(folder: Any, **changes: Any) -> GRPOTrainer:
    """The same, which saves a checkpoint of every step."""
    return make(folder, **{**SAVE, **changes})


def parameters(trainer: GRPOTrainer) -> torch.Tensor:
    return torch.cat([p.detach().double().flatten() for p in trainer.model.parameters()])


def trained(model: torch.nn.Module) -> torch.Tensor:
    """The parameters that are trained, float64."""
    return torch.cat([p.detach().double().flatten() for p in model.parameters() if p.requires_grad])


def ran(trainer: Any, checkpoint: Any = None) -> Any:
    """The trainer, once it has trained; from a checkpoint, if one is named."""
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer


def change(trainer: Any) -> torch.Tensor:
    """What training changed, float64."""
    start = trained(trainer.model)
    trainer.train()
    return trained(trainer.model) - start


def update(folder: Any, model: Any = "qwen2", **settings: Any) -> tuple[torch.Tensor, GRPOTrainer]:
    trainer = make(folder, model, **settings)
    return change(trainer), trainer


def on(event: str, act: Callable[[TrainerState], Any], at: int | None = None) -> TrainerCallback:
    """A user's callback for one event, at every step or at one."""

    def called(self: Any, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if at is None or state.global_step == at:
            act(state)

    return type("OnEvent", (TrainerCallback,), {event: called})()


def signals(at: int, *numbers: int) -> TrainerCallback:
    """Sends this process signals in the middle of a step."""
    return on("on_pre_optimizer_step", lambda state: [os.kill(os.getpid(), number) for number in numbers], at)


def stopping(event: str, at: int | None = None, save: bool = False) -> TrainerCallback:
    """A user's callback that ends the run at an event, and may ask for a checkpoint."""

    def called(self: Any, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if at is None or state.global_step == at:
            control.should_training_stop = True
            control.should_save |= save

    return type("Stopping", (TrainerCallback,), {event: called})()


def watched(note: Callable[..., Any]) -> Callable[..., list[float]]:
    """The reward of letters, whose arguments are shown to `note` before."""

    def reward(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        note(prompts=prompts, completions=completions, **columns)
        return letter_reward(prompts, completions)

    reward.__name__ = letter_reward.__name__
    return reward


def passing_on(*names: str) -> Any:
    """A user's subclass whose overrides of these methods pass on what they are given."""

    def override(name: str) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            return getattr(GRPOTrainer, name)(self, *args, **kwargs)

        return method

    return type("Own", (GRPOTrainer,), {name: override(name) for name in names})


class OtherMask(GRPOTrainer):
    """A user's loss that scores with a mask of its own."""

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        mask = inputs["completion_mask"].clone()
        mask[:, 1] = 0
        return super()._compute_loss(model, {**inputs, "completion_mask": mask})


class WithoutSuper(GRPOTrainer):
    """A user's rollouts, made without TRL's method."""

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        ids = torch.arange(5, 9).repeat(len(inputs), 1)
        ones, advantages = torch.ones_like(ids), torch.arange(float(len(inputs))) % 4 - 1.5
        scored = {"prompt_ids": ids, "prompt_mask": ones, "completion_ids": ids, "completion_mask": ones}
        return scored | {"advantages": advantages}


def native_fp16(inner: Callable[..., None]) -> Callable[..., None]:
    """`Accelerator.__init__` with fp16 on a CPU, which Accelerate leaves off; torch's own autocast works there."""

    def built(self: Any, *args: Any, **kwargs: Any) -> None:
        inner(self, *args, **kwargs)
        if self.mixed_precision == "fp16":
            self.native_amp = True

    return built


class Overflow(TrainerCallback):
    """Makes the gradients of chosen steps infinite, as a backward pass in float16 would."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        def spoil(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
            if output.requires_grad:
                output.register_hook(lambda gradient: gradient * float("inf"))

        if state.global_step in self.steps:
            self.hook = model.model.layers[0].mlp.register_forward_hook(spoil)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        if hasattr(self, "hook"):
            self.hook.remove()


def noted_events(trainer: Any, *names: str) -> list[str]:
    """The names of these events, in the order in which callbacks are told of them from now on."""
    events: list[str] = []
    for name in names:
        trainer.add_callback(on(name, lambda state, name=name: events.append(name)))
    return events


def batches_of(trainer: Any) -> list[Any]:
    """The completions of every step, which are there once it is trained."""
    prepare, batches = trainer._prepare_inputs, []

    def keep(rows: Any) -> Any:
        batches.append(prepare(rows))
        return batches[-1]

    trainer._prepare_inputs = keep
    return batches


def train_and_keep_first(trainer: Any) -> Any:
    """Train, and return the completions of the first step."""
    batches = batches_of(trainer)
    trainer.train()
    return batches[0]


def form_of(trainer: Any) -> str:
    """The form in which the last step ran, by what it logs of padding and of prompts that were run again."""
    padding, again = (log_of(trainer, f"layout/{kind}_share")[-1] for kind in ("padding", "duplicate"))
    if again > 0:
        return "padded"
    return "prefix" if padding > 0 else "packed"


def first_line(folder: Any, model: Any = "qwen2", **settings: Any) -> dict[str, Any]:
    """What a run of one step logs of it."""
    trainer = make(folder, model, **{**settings, "max_steps": 1})
    trainer.train()
    return trainer.state.log_history[0]


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / a.norm())


def log_of(trainer: GRPOTrainer, name: str) -> list[float]:
    return [line[name] for line in trainer.state.log_history if name in line]


def far(folder: Path, model: Any, learning_rate: float, adapter: Any = None, data: Any = None, **settings: Any) -> Any:
    """A trainer that takes a step of SGD, large beside the rounding of the parameters."""
    torch.manual_seed(0)  # of an adapter's start
    sgd = {"optim": "sgd", "learning_rate": learning_rate, "max_grad_norm": 0.0, "max_steps": 1, "adam_epsilon": 1e-8}
    parts = {"peft_config": adapter, "train_dataset": prompts() if data is None else data}
    return make(folder / "out", model, **{**parts, **sgd, **settings})
