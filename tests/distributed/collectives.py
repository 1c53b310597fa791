"""Users' code that holds collectives, and code that fails, for test_collectives.py: one launch runs all of it."""

import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate.utils import gather_object
from trl.trainer import grpo_trainer

from grpo_ext import GRPOTrainer, compat
from grpo_ext.runtime import collectives as exchange
from grpo_ext.step import gradients
from tests.distributed.tasks import RANK, save, trainer_of
from tests.support.launch import leave
from tests.support.selection import selected
from tests.support.server import StandIn, stand_in
from tests.support.tiny import letter_reward, prompts, tiny_model
from tests.support.trainers import WithoutSuper, change


def half_teaches(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
    """No variance in the groups of some prompts, which dynamic sampling replaces one by one."""
    pairs = zip(prompts, letter_reward(prompts, completions))
    return [1.0 if len(prompt) % 2 else value for prompt, value in pairs]


class Reduces(GRPOTrainer):
    """A user's rollout that depends on what all processes hold: sums, means, extremes, rows and objects."""

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        seen = self.accelerator.reduce(torch.tensor(float(len(inputs)))).item()
        scored = super()._generate_and_score_completions(inputs)
        accelerator, mask = self.accelerator, scored["completion_mask"]
        lengths = mask.sum(1).float()
        total, count = accelerator.reduce(torch.stack([lengths.sum(), torch.tensor(float(len(lengths)))])).tolist()
        longest = accelerator.reduce(lengths.max(), reduction="max").item()
        prompts = accelerator.gather_for_metrics([row["prompt"] for row in inputs])
        ids = accelerator.pad_across_processes(scored["completion_ids"], dim=1)
        firsts = accelerator.gather({"ids": ids})["ids"][:, 0].float().mean().item()
        sizes = accelerator.gather(torch.tensor(len(lengths))).sum().item()
        assert sizes == count == len(prompts) == seen
        scored["advantages"] = scored["advantages"] * (total / count / longest + len(set(prompts)) + firsts / 10)
        return scored


class GathersObjects(GRPOTrainer):
    """Takes from accelerate.utils what leaves out no rows."""

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        scored = super()._generate_and_score_completions(inputs)
        scored["advantages"] = scored["advantages"] * len(set(gather_object([row["prompt"] for row in inputs])))
        return scored


class CountsProcesses(GRPOTrainer):
    """Learns something else on another number of processes."""

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        scored = super()._generate_and_score_completions(inputs)
        scored["advantages"][::2] *= self.accelerator.num_processes
        return scored


class InTheLoss(GRPOTrainer):
    """Gathers rows of a micro-batch in the loss, and of its log-probabilities, and notes how many there were."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.counted: list[tuple[int, float]] = []
        super().__init__(*args, **kwargs)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        rows = self.accelerator.gather(inputs["advantages"])
        share = self.accelerator.reduce(torch.tensor(1.0), reduction="mean").item()
        self.counted.append((len(rows), share))
        return loss

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        scores = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self.accelerator.gather(scores[0].sum(1))
        return scores


def hooked(trainer: Any) -> Any:
    """The trainer of a model whose forward hook gathers, in the backward of gradient checkpointing too."""

    def gather(module: Any, args: Any, output: Any) -> None:
        if module.training and torch.is_grad_enabled():
            trainer.accelerator.gather(output.detach().mean((1, 2)))

    trainer.model.model.layers[0].mlp.register_forward_hook(gather)
    return trainer


def with_gmpo() -> Any:
    from trl.experimental.gmpo import GMPOTrainer

    return type("Gmpo", (GMPOTrainer, GRPOTrainer), {})


# one process runs two micro-batches of 3 in a step, and the other one
UNEVEN = {"num_generations": 7, "global_batch_size": 7, "rollout_chunk_size": 7}
DYNAMIC = {"dynamic_sampling": True, "reward": half_teaches, "groups": 3, "train_dataset": prompts(12)}
CHECKPOINTED = {"gradient_checkpointing": True}
LEARNING: dict[str, Callable[[Path], Any]] = {
    "rollout without prompts": lambda folder: trainer_of(folder, groups=1, cls=Reduces),
    "rollout of several rounds": lambda folder: trainer_of(folder, cls=Reduces, **DYNAMIC),
    "objects": lambda folder: trainer_of(folder, groups=2, train_dataset=prompts(8), cls=GathersObjects),
    "loss": lambda folder: trainer_of(folder, cls=InTheLoss, beta=0.1, **UNEVEN),
    "bitwise": lambda folder: trainer_of(folder, groups=3, cls=InTheLoss, bitwise_invariant=True),
    "control": lambda folder: trainer_of(folder, groups=1, cls=CountsProcesses),
    "hook": lambda folder: hooked(trainer_of(folder, groups=3, **CHECKPOINTED)),
}
if importlib.util.find_spec("trl.experimental.gmpo") is not None:  # since TRL 1.16
    LEARNING["gmpo"] = lambda folder: trainer_of(folder, cls=with_gmpo(), num_iterations=2, **UNEVEN)


# with --full alone
FULL = (
    *("rollout of several rounds", "gmpo", "hook", "comparison", "rollout function", "send ahead"),
    "evaluation, memory",
)


def learned(folder: Path) -> dict[str, Any]:
    """What each user's code learned, and what it counted."""
    results = {}
    for name, build in selected(LEARNING, FULL).items():
        trainer = build(folder / name)
        results[name] = change(trainer), getattr(trainer, "counted", [])
    return results


class GathersTurns(GRPOTrainer):
    """Gathers where processes have other numbers of calls."""

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        self.accelerator.gather(torch.ones(1))
        return super()._generate_single_turn(*args, **kwargs)


class FieldOfOne(GRPOTrainer):
    """Adds a field on the second process alone."""

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        scored = super()._generate_and_score_completions(inputs)
        return scored | ({"extra": scored["advantages"]} if RANK else {})


class Fails(GRPOTrainer):
    """Fails on the second process, in a method and at a time; the first is in some exchange then."""

    error: Exception
    scored = False

    def fail(self, place: str) -> None:
        if RANK == 1 and self.place == place and self.state.global_step == self.at:
            raise self.error

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.fail("loss" if self.model.training else "evaluation")
        if self.place == "gathers" and RANK == 1:
            self.accelerator.gather(torch.ones(2))
        if self.place == "no super" and RANK == 1:
            return 0.0 * sum(p.sum() for p in model.parameters())
        if self.place == "objects of the loss":
            gather_object([float(inputs["advantages"].sum())])
        if self.place == "loss":
            self.accelerator.gather(torch.ones(1))
        return super().compute_loss(model, inputs, *args, **kwargs)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        self.fail("rollout")
        if self.place == "rollout":
            self.accelerator.reduce(torch.ones(1))
        scored = super()._generate_and_score_completions(inputs)
        self.scored = True  # the next forward compares a pack with padding
        return scored


def failing(folder: Path, place: str, at: int, error: Exception | None = None) -> Any:
    steps = at + ("evaluation" not in place)  # no more than it takes
    trainer = trainer_of(folder, groups=3, cls=Fails, eval_dataset=prompts(3, seed=1), max_steps=steps)
    trainer.place, trainer.at, trainer.error = place, at, error or KeyError("a fault")

    def compare(*args: Any) -> None:
        if trainer.scored:
            trainer.fail("comparison")

    trainer.model.model.layers[0].mlp.register_forward_hook(compare)
    trainer.train()
    if "evaluation" in place:
        trainer.evaluate()
    return trainer


def gathering_reward(folder: Path) -> Any:
    """A reward function that gathers, on the thread that samples ahead."""

    def reward(**columns: Any) -> list[float]:
        trainer.accelerator.gather(torch.ones(1))
        return letter_reward(**columns)

    trainer = trainer_of(folder, groups=4, reward=reward, rollout_lag=1)
    trainer.train()
    return trainer


def failing_reward(folder: Path) -> None:
    """Fails on the second process in the second step."""

    def reward(trainer_state: Any, **columns: Any) -> list[float]:
        if RANK == 1 and trainer_state.global_step == 1:
            raise KeyError("a fault")
        return letter_reward(**columns)

    trainer_of(folder, reward=reward).train()


def failing_rollout(folder: Path) -> None:
    """Fails on the first process before its first forward; the other compares its own with this one."""

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        if RANK == 0:
            raise KeyError("a fault")
        ids = trainer.processing_class(text=prompts)["input_ids"]
        return {"prompt_ids": ids, "completion_ids": [[5, 6, 7, 1]] * len(ids), "logprobs": None}

    trainer_of(folder, rollout_func=rollout, beta=0.1).train()


class SendsNothing(StandIn):
    """A server whose client fails; the main process alone sends."""

    def update_named_params(self, *args: Any) -> None:
        raise KeyError("a fault")


def failing_send(folder: Path, lag: int) -> None:
    before = grpo_trainer.VLLMGeneration, compat.VLLMClient
    stand_in(folder / "server", kind=SendsNothing)
    try:
        trainer_of(folder, use_vllm=True, vllm_mode="server", top_k=0, rollout_lag=lag).train()
    finally:
        grpo_trainer.VLLMGeneration, compat.VLLMClient = before


def failing_sum(folder: Path) -> None:
    """Fails on the second process once the backward passes are done; the other begins to sum gradients."""

    def used(self: Any, names: Any) -> Any:
        if RANK == 1:
            raise KeyError("a fault")
        return [name for name in self.parameters if name in names]

    with mock.patch.object(gradients.NativeGradients, "_used_anywhere", used):
        trainer_of(folder).train()


def failing_alone(folder: Path, run: Callable[[], None]) -> None:
    """The second process fails where the other waits in `run`."""
    with exchange.raise_on_all("the end"):
        if RANK == 1:
            raise KeyError("a fault")
        run()


MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
# places of `Fails`, and the steps at which it fails there
AT = {"comparison": 0, "loss": 1, "rollout": 1, "evaluation": 1, "gathers": 0, "no super": 0, "objects of the loss": 0}
FAILING: dict[str, Callable[[Path], Any]] = {
    **{place: partial(failing, place=place, at=at) for place, at in AT.items()},
    "evaluation, memory": lambda folder: failing(folder, "evaluation", at=1, error=MEMORY),
    "reward": failing_reward,
    "rollout function": failing_rollout,
    "send": partial(failing_send, lag=0),
    "send ahead": partial(failing_send, lag=1),
    "sum": failing_sum,
    "wait": partial(failing_alone, run=exchange.wait_for_all),
    "copy": partial(failing_alone, run=lambda: exchange.copy_from_main_process(tiny_model())),
    "objects": lambda folder: trainer_of(folder, cls=GathersObjects, **DYNAMIC).train(),
    "reward with a lag": gathering_reward,
    "turns": lambda folder: trainer_of(folder, groups=3, cls=GathersTurns).train(),
    "field of one": lambda folder: trainer_of(folder, cls=FieldOfOne).train(),
    "without super": lambda folder: trainer_of(folder, groups=3, cls=WithoutSuper).train(),
}


def failed(folder: Path) -> dict[str, Any]:
    """The errors on this process, or what was logged where there was none."""
    results = {}
    for name, fail in selected(FAILING, FULL).items():
        try:
            trainer = fail(folder / name)
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
        else:
            results[name] = sorted(trainer.state.log_history[0])
    return results


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    save(folder, (learned(folder / "learned"), failed(folder / "failed")))
    leave(folder)
