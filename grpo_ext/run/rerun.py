"""`trainer.rerun(step)`: a step of a run again, token by token, and whether it is the step that the run made.

A rerun is a run of its own in `rerun/step-N` of the run's folder, with a log and a trail, that ends after step N. It
begins at the newest checkpoint before the step, or at the start, and writes nothing elsewhere.
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from transformers import DefaultFlowCallback, PrinterCallback, ProgressCallback, TrainerCallback

from ..algorithms.digests import digest
from ..compat import SyncRefModelCallback
from ..errors import ConfigError
from ..rollouts.local import RewardsCall
from ..rollouts.source import Rollouts
from ..runtime.attributes import assigned
from ..runtime.collectives import from_main_process, gather_lists
from ..step.optimizer_step import StepPlanner
from ..step.record import StepRecord
from ..view import TrainerView
from .checkpoint import checkpoints, why_not_resumable
from .diff import SAME, Comparison, RunOnDisk, changes, compare_runs, listed, read_run
from .fingerprint import fingerprint_of
from .keeper import RunKeeper
from .log import LOG, LineFile, read_log
from .trail import ReadTrail

RERUNS, STEP = "rerun", "step.jsonl"
_NEEDED = (DefaultFlowCallback, SyncRefModelCallback, ProgressCallback, PrinterCallback)
_COLUMNS = ("prompt_ids", "completion_ids", "advantages")

logger = get_logger(__name__)


@dataclass(frozen=True)
class Rerun:
    """A step that was run again: `folder` holds `step.jsonl`, with all that the step computed, a log and a trail."""

    folder: Path
    steps: range  # those that ran again, the step that was asked for at the end
    comparison: Comparison  # with the run

    @property
    def text(self) -> str:
        alike = SAME.get(self.comparison.verdict)
        return f"{_named(self.steps)}: {alike or f'not the same. {self.comparison.text}'}"


@dataclass
class StepAgain:
    """Runs steps again: what `rerun` of the trainer hands over to."""

    view: TrainerView
    keeper: RunKeeper
    rollouts: Rollouts
    planner: StepPlanner

    def run(self, train: Callable[..., Any], step: int, gradients: bool, call_rewards: bool) -> Rerun:
        """Train from the newest checkpoint before a step, or from the start, to the step; compare with the run's trail.

        Rewards are the run's, or with `call_rewards` computed again. `gradients`: record that of each completion too.
        `train` is the trainer's; afterwards its weights are those after the step.

        Raises:
            ConfigError: the run has no trail or not this step, is another run, or samples in a way of its own.
        """
        view, accelerator = self.view, self.view.accelerator
        run, folder, checkpoint, first = from_main_process(accelerator, lambda: self._begin(step))
        record = StepRecord(gradients)
        ours, callbacks = (self.keeper, self.keeper.watch, self.rollouts.worker.clock), view.callback_handler.callbacks
        kept = [callback for callback in callbacks if callback in ours or isinstance(callback, _NEEDED)]
        if left_out := [type(callback).__name__ for callback in callbacks if callback not in kept]:
            logger.info(f"Without the callbacks {', '.join(left_out)}.")
        quiet = dict.fromkeys(("eval_on_start", "load_best_model_at_end", "push_to_hub", "log_completions"), False)
        here = {"output_dir": str(folder), "trail": True, "save_strategy": "no", "eval_strategy": "no"}
        allowed = [*(view.args.allow_changed_on_resume or ()), "stopped_early"]
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(assigned(view.args, **quiet, **here, allow_changed_on_resume=allowed))
                if self.keeper.user_args is not None:
                    stack.enter_context(assigned(self.keeper.user_args, output_dir=str(folder)))
                rewards = None if call_rewards else self._rewards_of(run.trail)
                stack.enter_context(view.only_training(rewards))
                ending = _Ending(step, self.planner, record)
                stack.enter_context(assigned(view.callback_handler, callbacks=[*kept, ending]))
                train(resume_from_checkpoint=checkpoint)
            record.gather()
            return from_main_process(accelerator, lambda: self._end(run, folder, range(first, step + 1), record))
        finally:
            if checkpoint is not None and accelerator.is_main_process:
                shutil.rmtree(checkpoint, ignore_errors=True)

    def _begin(self, step: int) -> tuple[RunOnDisk, Path, str | None, int]:
        """The run, the new folder, the checkpoint in it (None: from the start), and the first step to train."""
        view, source = self.view, Path(str(self.view.args.output_dir))
        run, log = read_run(source), read_log(source / LOG)
        if step < 1 or step not in run.trail.steps:
            known = sorted(run.trail.steps.keys() - {0}) or [0]
            raise ConfigError(f"{source} has no step {step}; its trail has the steps {known[0]} to {known[-1]}.")
        begins = [*[0] * (len(log.starts) - len(log.resumed_from)), *log.resumed_from]
        made_by = [start for start, begin in zip(log.starts, begins, strict=True) if begin < step]
        # the start that made the step; the run may go on
        run = dataclasses.replace(run, start={**made_by[-1], "ended": "before"})
        if view.rollout_func is not None:
            raise ConfigError("a run with a rollout_func cannot be run again: what it samples is not known here.")
        if view.use_vllm and (view.args.bf16 or view.args.fp16):
            raise ConfigError("vLLM does not sample the same completions again in half precision; use bf16=False.")
        fingerprint = json.loads(json.dumps(fingerprint_of(view, self.keeper.geometry)))
        if changed := changes(run.settings, dataclasses.replace(run, start=fingerprint).settings):
            raise ConfigError(f"this is not the run of {source}, so its steps would be others: {listed(changed)}.")
        names = (f"step-{step}", *(f"step-{step}-{number}" for number in range(2, 1000)))
        folder = next(path for name in names if not (path := source / RERUNS / name).exists())
        start, checkpoint = 0, None
        for path in reversed(checkpoints(source)):
            number = int(path.name.rpartition("-")[2])
            if number < step and _linked(path, folder / path.name):
                start, checkpoint = number, str(folder / path.name)
                break
        if checkpoint is None and view.state.global_step:
            raise ConfigError(
                f"{source} has no checkpoint before step {step}, and this trainer has trained already; build the "
                "trainer anew, or save checkpoints (save_strategy='steps')."
            )
        folder.mkdir(parents=True, exist_ok=True)
        pace = log.seconds / log.entries[-1]["step"] if log.entries else math.nan
        time = "" if math.isnan(pace) else f", about {max(pace * (step - start), 1.0):.0f} s at the run's pace"
        begin = "the start" if checkpoint is None else Path(checkpoint).name
        which = _named(range(start + 1, step + 1))
        logger.info(f"Running {which} of {source} again from {begin}{time}, in {folder}.")
        return run, folder, checkpoint, start + 1

    def _rewards_of(self, trail: ReadTrail) -> Callable[..., torch.Tensor]:
        """A `_calculate_rewards` that returns the trail's rewards of the same completions, and computes all others."""
        view, calculate = self.view, self.view.calculate_rewards

        def rewards(inputs: Any, prompts: Any, completions: Any, ids: Any) -> torch.Tensor:
            call = self.rollouts.worker.calls.innermost(RewardsCall)
            real = [] if call is not None and call.local.request.stands_in else map(torch.tensor, ids)
            # a completion that is masked out has one token, with mask 0
            pairs = [(digest(row, torch.ones_like(row)), digest(row[:1], torch.zeros_like(row[:1]))) for row in real]
            found = gather_lists(pairs)
            for part in trail.rollouts.get(view.state.global_step + 1, {}).get("rounds", ()):
                known = part["count"] == len(part["completions"]) == len(found)
                known = known and len(part["rewards"]) == len(view.reward_funcs)
                if known and all(one in pair for one, pair in zip(part["completions"], found, strict=True)):
                    columns = [[math.nan if x is None else x for x in column] for column in part["rewards"].values()]
                    return torch.tensor(columns).T.to(view.accelerator.device)
            return calculate(inputs, prompts, completions, ids)

        return rewards

    def _end(self, run: RunOnDisk, folder: Path, steps: range, record: StepRecord) -> Rerun:
        again = read_run(folder)
        until = {number: line for number, line in run.trail.steps.items() if number <= steps[-1]}
        before = dataclasses.replace(run, trail=dataclasses.replace(run.trail, steps=until))
        comparison = compare_runs(before, again)
        comparison.missing.clear()  # a rerun has no trail before its checkpoint
        rerun = Rerun(folder, steps, comparison)
        values = again.trail.steps[steps[-1]]["values"]
        file = LineFile(STEP, "record of the step")
        file.begin(folder, None)
        about = {name: values.get(name) for name in ("loss", "grad_norm", "learning_rate")}
        file.append({"step": steps[-1], **about, "layers": record.layers, "verdict": rerun.text})
        trail = ReadTrail(run.trail.rollouts | again.trail.rollouts)
        origins = _origins(trail, steps[-1], self.view.geometry.global_batch_size)
        for line in self._lines(record, origins or [{}] * len(record.rollout)):
            file.append(line)
        logger.info(f"{rerun.text}. Tokens, rewards and gradients: {folder / STEP}")
        return rerun

    def _lines(self, record: StepRecord, origins: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """What is recorded of each completion."""
        decode, data = self.view.tokenizer.decode, self.view.train_dataset
        columns = [[part.tolist() for part in record.rollout[name]] for name in _COLUMNS]
        text_of = functools.cache(lambda token: decode([token]))
        for row, (origin, prompt, ids, advantage) in enumerate(zip(origins, *columns, strict=True)):
            of_tokens = record.tokens.get(row, {}).items()
            tokens = {name: None if values is None else values[: len(ids)] for name, values in of_tokens}
            data_row = {} if (number := origin.get("prompt_row")) is None else dict(data[number])
            yield {
                "row": row,
                **origin,
                "prompt": decode(prompt),
                "answer": data_row.get("answer", data_row.get("solution")),
                "completion": decode(ids, skip_special_tokens=True),
                "advantage": advantage,
                "share": None if tokens.get("share") is None else math.fsum(tokens["share"] or ()),
                "gradient": record.gradients.get(row),
                "tokens": {"ids": ids, "text": list(map(text_of, ids)), **tokens},
            }


@dataclass
class _Ending(TrainerCallback):
    """Records a step, and ends the training after it."""

    step: int
    planner: StepPlanner
    record: StepRecord

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 == self.step:
            self.planner.record = self.record

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.planner.record, self.record.moved = None, True
            self.record.forward_again()
            control.should_training_stop = True


def _named(steps: range) -> str:
    return f"step {steps[-1]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


def _linked(checkpoint: Path, copy: Path) -> bool:
    """Whether a checkpoint is complete in `copy` now: hard links, because the run may delete its own."""

    def link(source: str, target: str) -> None:
        try:
            os.link(source, target)
        except OSError:  # a file system without links
            shutil.copy2(source, target)

    with contextlib.suppress(OSError):  # it was deleted meanwhile
        shutil.copytree(checkpoint, copy, copy_function=link)
        if why_not_resumable(copy) is None:
            return True
    shutil.rmtree(copy, ignore_errors=True)
    return False


def _origins(trail: ReadTrail, step: int, size: int) -> list[dict[str, Any]]:
    """The prompt's row, the generation and the rewards of each completion of a step; empty where the trail sums up."""
    first = max((number for number in trail.rollouts if number <= step), default=0)
    made, line = list[dict[str, Any]](), trail.rollouts.get(first, {"rounds": (), "chosen": None})
    for part in line["rounds"]:
        if part["count"] != len(part["completions"]):
            return []
        for place in range(part["count"]):
            prompt, generation = divmod(place, part["group"])
            number = part["rows"][prompt] if prompt < len(part["rows"]) else None
            rewards = {name: values[place] for name, values in part["rewards"].items()}
            made.append({"prompt_row": number, "generation": generation, "rewards": rewards})
    batch = made if line["chosen"] is None else [made[place] for place in line["chosen"]]
    start = (step - first) % max(math.ceil(len(batch) / size), 1) * size
    return batch[start : start + size]
