"""What test_two_processes.py runs on two processes, all in one launch: `tasks.py FOLDER` saves what each task returns.

A test that compares with one process calls a task itself.
"""

import functools
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import PartialState
from datasets import IterableDataset
from transformers import TrainerCallback

from grpo_ext import GRPOTrainer
from grpo_ext.errors import PrecisionError, ProcessError
from grpo_ext.forward import forms
from grpo_ext.forward.attention import PackRefused
from grpo_ext.run.record import STEP
from grpo_ext.runtime.collectives import gather_nested, gather_on_main, ragged_gather
from tests.support.images import Gallery, calling, image_model, image_processor, image_rows
from tests.support.launch import leave
from tests.support.own_generate import Sampler
from tests.support.padding import CausalMean, with_module
from tests.support.selection import selected
from tests.support.tiny import letter_reward, prompts, tiny_model
from tests.support.trainers import change, log_of, make, on, parameters

RANK = int(os.environ.get("RANK", "0"))
LOGGED = ("letters", "eval_letters", "rewards", "eval_rewards", "reward", "eval_reward")


def trainer_of(folder: Path, groups: int = 4, chunk: int = 4, **changes: Any) -> GRPOTrainer:
    """A trainer of two steps of `groups` groups, with micro-batches that leave a remainder."""
    sizes = {"global_batch_size": 4 * groups, "rollout_chunk_size": chunk, "per_device_train_batch_size": 3}
    return make(folder / "out", **{"train_dataset": prompts(), "max_steps": 2, **sizes, **changes})


def rank_of_length(prompts, completions, completion_ids, environments=None, **kwargs):
    """A reward that looks beyond the group: the rank of a length among all that it is called with."""
    lengths = [len(ids) for ids in completion_ids]
    return [sum(length < other for other in lengths) / len(lengths) for length in lengths]


async def logging_reward(prompts, completions, log_metric, log_extra, **kwargs):
    """Logs now and then: a metric and a column where a completion of the call has an a, another column elsewhere."""
    counts = [text.count("a") for text in completions]
    if any(counts):
        log_metric("letters", sum(counts) / 7)
        log_metric("letters", max(counts) / 3)
        log_extra("a", counts)
    else:
        log_extra("none", [text[:2] for text in completions])
    return [0.01 * n for n in counts]


@contextmanager
def memory_short_on_second_process() -> Iterator[list[int]]:
    """Inside, its first micro-batch does not fit; a list of the sizes that failed."""
    inner, failures = GRPOTrainer._loss_of, list[int]()

    def fails_once(*args: Any) -> torch.Tensor:
        loss = inner(*args)
        if RANK == 1 and not failures:
            failures.append(len(args[-1].columns["advantages"]))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return loss

    with mock.patch.object(GRPOTrainer, "_loss_of", fails_once):
        yield failures


def train_and_evaluate(folder: Path, groups: int, chunk: int = 4, own_model: bool = False) -> dict[str, Any]:
    """What this process scored, logged and learned."""
    scored: list[tuple[str, str]] = []

    def reward(prompts, completions, **kwargs):
        scored.extend(zip(prompts, completions))
        return letter_reward(prompts, completions)

    # every process makes weights of its own, and those of the first count
    model, sampler = tiny_model(seed=RANK), Sampler()
    if own_model:
        model.generate = sampler
    parts = {"reward": [reward, rank_of_length, logging_reward], "eval_dataset": prompts(3, seed=1)}
    trainer = trainer_of(folder, groups, chunk, model=model, beta=0.1, eval_pass_threshold=0.0, **parts)
    trainer.train()
    training_scored = list(scored)
    with memory_short_on_second_process() as failures:
        metrics = trainer.evaluate()
    return {
        "eval_loss": metrics["eval_loss"],
        "eval_kl": metrics["eval_kl"],
        "eval_failures": len(failures),
        "processes": trainer.accelerator.num_processes,
        "wrapper": type(trainer.model_wrapped).__name__,
        "scored": training_scored,
        "asked": [len(call["input_ids"]) for call in sampler.given],
        "evaluated": len(scored) - len(training_scored),
        "logged_prompts": len(trainer._logs["prompt"]),
        "eval_reward": metrics["eval_reward"],
        "passes": {name: value for name, value in metrics.items() if "@" in name},
        "kl": log_of(trainer, "kl"),
        "parameters": sum(float(p.detach().double().sum()) for p in trainer.model.parameters()),
        "metrics": [
            {name: value for name, value in line.items() if name.split("/")[0] in LOGGED}
            for line in trainer.state.log_history
        ],
        "table": {name: list(values) for name, values in trainer._logs["extra"].items()},
    }


class ChangesRollouts(GRPOTrainer):
    """Leaves a token out, and adds fields of every kind, whose widths differ between processes."""

    shapes: list[list[int]]

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        scored: dict[str, Any] = super()._generate_and_score_completions(inputs)
        ids = scored["completion_ids"]
        if ids.size(1) > 3:
            scored["completion_mask"][ids[:, 0] % 2 == 0, 1] = 0
        first = ids[:, 0] / 20
        scored["one"] = first
        scored["few"] = torch.nn.functional.pad(first[:, None], (0, 1 + RANK))
        scored["tokens"] = ids / 30 * scored["completion_mask"]
        scored["texts"] = ["a" * (int(n) % 3) for n in ids[:, 0]]
        scored["shift"] = torch.tensor(0.5)
        return scored

    def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        self.shapes = [list(inputs[name].shape[1:]) for name in ("one", "few", "completion_ids", "tokens")]
        ids, mask = (torch.cat([inputs[f"prompt_{n}"], inputs[f"completion_{n}"]], 1) for n in ("ids", "mask"))
        width = inputs["completion_ids"].size(1)
        logps, _, _ = self._get_per_token_logps_and_entropies(model, ids, mask, width)
        texts = torch.tensor([float(len(text)) for text in inputs["texts"]])
        by_row = inputs["shift"] + inputs["one"] + inputs["few"].sum(1) + texts
        added = ((logps * inputs["tokens"]).sum(1) * by_row).mean() / self.current_gradient_accumulation_steps
        return super()._compute_loss(model, inputs) + added / 10


def changed_rollouts(folder: Path, groups: int, size: int = 3) -> dict[str, Any]:
    """What this process learned, and the shapes that the loss was parts."""
    trainer = trainer_of(folder, groups, cls=ChangesRollouts, num_iterations=2, per_device_train_batch_size=size)
    return {"update": change(trainer), "shapes": trainer.shapes}


def shown_images(folder: Path, groups: int) -> torch.Tensor:
    parts = {"processing_class": calling(image_processor("llava")), "environment_factory": Gallery, "reward": None}
    turns = {"max_completion_length": 60, "max_tool_calling_iterations": 2, "num_iterations": 2}
    rows = image_rows(8).remove_columns("images")
    return change(trainer_of(folder, groups, model=image_model("llava"), train_dataset=rows, **parts, **turns))


def changed_by_padding(folder: Path, size: int) -> torch.Tensor:
    return change(trainer_of(folder, 3, model=with_module(CausalMean), per_device_train_batch_size=size))


def packs_on_one(folder: Path, what: str) -> list[float]:
    """Packs go wrong (`fault`), or are not taken (`refusal`), on the second process alone; the shares of padding."""
    trainer = trainer_of(folder, groups=2, bf16=True, num_iterations=2)
    build = forms.build_pack

    def changed(*args):
        if RANK and what == "refusal":
            raise PackRefused("the second process takes none")
        pack = build(*args)
        if RANK:
            pack.positions_N[:] = range(len(pack.positions_N))
        return pack

    with mock.patch.object(forms, "build_pack", changed):
        trainer.train()
    return log_of(trainer, "layout/padding_share")


def gathered(folder: Path) -> dict[str, Any]:
    """Of no rows on the first process, and three on the second; and what rewards get of rows with keys of their own."""
    PartialState(cpu=True)
    columns = {base.__name__: row_columns(folder / base.__name__, base) for base in (GRPOTrainer, Rewards)}
    return {
        "rows": ragged_gather(torch.arange(3.0 * RANK)).tolist(),
        "columns": columns,
        "nested": gather_nested(nested(RANK)),
        "on main": gather_on_main([RANK] * (RANK + 1)),
        "table": table_of(folder / "table"),
    }


def nested(rank: int) -> dict[str, Any]:
    """Values of a process; on the first one a tensor is empty."""
    numbers = torch.arange(rank * 5, dtype=torch.int32)
    cube = torch.full((2, 3, 4), 1 / (rank + 3), dtype=torch.float64)
    return {"ids": numbers, "parts": [{"flags": torch.tensor([True, False] * rank)}, f"text {rank}"], "cube": cube}


def table_of(folder: Path) -> list[int]:
    """How many entries of TRL's table this process has after two steps, with and without their texts."""
    trainer = trainer_of(folder, max_steps=2)
    trainer.train()
    texts = [text for name in ("prompt", "completion") for text in trainer._logs[name] if text is not None]
    return [len(trainer._logs["advantages"]), len(trainer._logs["prompt"]), len(texts)]


class Rewards(GRPOTrainer):
    """Hands rows on to TRL's method, with a column for some."""

    def _calculate_rewards(self, inputs: Any, *args: Any) -> torch.Tensor:
        rows = [row | ({"late": 1} if row["prompt"] == "c>" else {}) for row in inputs]
        return super()._calculate_rewards(rows, *args)


def row_columns(folder: Path, base: Any) -> list[tuple[Any, ...]]:
    """What this process's calls of a reward function got of a stream in which each row has a key of its own."""
    calls: list[tuple[Any, ...]] = []

    def reward(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        known = {name: values for name, values in columns.items() if name in (*"abcd", "late")}
        calls.extend(zip(prompts, itertools.repeat(tuple(sorted(known))), *known.values()))
        return [float(len(text)) for text in completions]

    rows = IterableDataset.from_generator(lambda: ({"prompt": f"{name}>", name: 1} for name in "abcd"))
    trainer_of(folder, cls=base, reward=reward, train_dataset=rows, max_steps=1).train()
    return calls


def shared_disk(folder: Path) -> list[str]:
    """The folders of a run whose processes are on two nodes with one disk, the second of which looks slowly."""
    trainer = trainer_of(folder, max_steps=1, save_strategy="steps", save_steps=1)
    first = mock.patch.object(PartialState(), "local_process_index", 0)  # each is the first process of its node
    is_dir = Path.is_dir

    def slow(path: Path) -> bool:
        there = is_dir(path)
        if RANK and "_writing-" in str(path):
            time.sleep(2)
        return there

    with first, mock.patch.object(Path, "is_dir", slow):
        trainer.train()
        trainer.accelerator.wait_for_everyone()
    return sorted(path.name for path in (folder / "out").iterdir() if not path.name.startswith("_"))


def step_again(folder: Path) -> tuple[str, dict[str, Any], list[dict[str, Any]]]:
    """A step that ran again: the verdict, and what is recorded of the step and of its completions."""
    saves = {"max_steps": 3, "logging_steps": 1, "save_strategy": "steps", "save_steps": 2}
    trainer_of(folder, **saves).train()
    cases = [{"loss_type": "luspo"}, {"scale_rewards": "none"}, {"epsilon": 0.1}]
    again = trainer_of(folder, **saves).rerun(3, gradients=True, cases=cases)
    about, *rows = map(json.loads, (again.folder / STEP).read_text().splitlines())
    return again.text, about, rows


class Spoiled(GRPOTrainer):
    """The second process has a gradient that is not finite in the second step, and a finite loss."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        return loss + 0 * (loss - loss.detach()).sqrt() if RANK and self.state.global_step else loss


def not_finite(folder: Path, cls: Any = GRPOTrainer, **changes: Any) -> tuple[str, bool, list[str]]:
    """The error that ends a run in its second step, whether that has moved a weight, and the checkpoints."""
    trainer, weights = trainer_of(folder, cls=cls, save_strategy="steps", save_steps=1, **changes), list[torch.Tensor]()
    trainer.add_callback(on("on_step_begin", lambda state: weights.append(parameters(trainer))))
    with pytest.raises(PrecisionError) as caught:
        trainer.train()
    trainer.accelerator.wait_for_everyone()
    moved = not torch.equal(weights[-1], parameters(trainer))
    return str(caught.value), moved, [path.name for path in (folder / "out").glob("*checkpoint-*")]


def infinite_rate(folder: Path) -> tuple[str, bool, list[str]]:
    def spoil(self: Any, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        for group in optimizer.param_groups if state.global_step else ():
            group["lr"] = math.inf

    return not_finite(folder, callbacks=[type("Rate", (TrainerCallback,), {"on_pre_optimizer_step": spoil})()])


def unrecorded(folder: Path) -> str:
    """The error of a run whose record the main process cannot begin."""
    trainer = trainer_of(folder)
    fails = mock.patch("grpo_ext.run.keeper.fingerprint_of", side_effect=LookupError("no source"))
    with fails, pytest.raises((LookupError, ProcessError)) as caught:
        trainer.train()
    trainer.accelerator.wait_for_everyone()
    return f"{type(caught.value).__name__}: {caught.value}"


def save(folder: Path, result: Any) -> None:
    torch.save(result, folder / f"rank_{RANK}.pt")


def results(folder: Path) -> list[Any]:
    """What each of two processes has saved."""
    return [torch.load(folder / f"rank_{rank}.pt", weights_only=False) for rank in (0, 1)]


TASKS: dict[str, Callable[[Path], Any]] = {
    "four groups": lambda folder: train_and_evaluate(folder, 4),
    "one group": lambda folder: train_and_evaluate(folder, 1),
    "own model": lambda folder: train_and_evaluate(folder, 1, own_model=True),
    "gathered": gathered,
    "padding": lambda folder: changed_by_padding(folder, 3),
    "images": lambda folder: shown_images(folder, 3),
    "shared disk": shared_disk,
    "step again": step_again,
    "gradient": functools.partial(not_finite, cls=Spoiled),
    "weights": infinite_rate,
    "unrecorded": unrecorded,
    **{what: functools.partial(packs_on_one, what=what) for what in ("fault", "refusal")},
    **{f"changed, {n} groups": functools.partial(changed_rollouts, groups=n) for n in (3, 1)},
}
# with --full alone
FULL = ("images", "own model", "shared disk", "refusal", "changed, 1 groups")

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    save(folder, {name: task(folder / name) for name, task in selected(TASKS, FULL).items()})
    leave(folder)
