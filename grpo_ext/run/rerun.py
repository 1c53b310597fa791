"""`trainer.rerun(step)`: a step of a run again, token by token, and whether it is the step that the run made.

A rerun is a run of its own in `rerun/step-N` of the run's folder, with other arguments and callbacks, that ends after
step N. It begins at the newest checkpoint before the step, or at the start, and writes nothing elsewhere.
"""

import contextlib
import copy
import dataclasses
import functools
import itertools
import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import DefaultFlowCallback, PrinterCallback, ProgressCallback, TrainerCallback
from transformers.trainer_utils import IntervalStrategy

from ..batching.sizes import require_whole
from ..compat import SyncRefModelCallback
from ..config import GRPOConfig
from ..errors import ConfigError
from ..rollouts.join import digest_of
from ..rollouts.source import Rollouts
from ..runtime.collectives import from_main_process, gather_lists
from ..runtime.messages import logger
from ..settings import NOTED, resumes
from ..step.optimizer_step import StepPlanner
from ..step.record import StepRecord
from ..view import TrainerView
from .case_comparison import case_text
from .cases import Case, Cases, attributes_of, title_of
from .checkpoint import checkpoints, link, make_first, why_not_resumable
from .diff import Changes, RunOnDisk, changes, compare_runs, listed, read_run, settings_of
from .fingerprint import fingerprint_of
from .log import LineFile
from .record import RERUNS, STEP, Identity, Line, Record, finite, refuse_unknown
from .trail import origins_of, rewards_of
from .trail_comparison import SAME, Comparison

_NEEDED = (DefaultFlowCallback, SyncRefModelCallback, ProgressCallback, PrinterCallback)
_CANNOT = "cannot be run again"


@dataclass(frozen=True)
class Rerun:
    """A step that was run again: `folder` holds `step.jsonl`, with all that the step computed, a log and a trail."""

    folder: Path
    steps: range  # those that ran again, the step that was asked for at the end
    comparison: Comparison  # with the run
    cases: Sequence[Line] = ()  # what other settings would make of the step

    @property
    def text(self) -> str:
        which, found = _named(self.steps), self.comparison
        text = f"{which}: not the same (A is the run, B the rerun).\n{found.text}"
        if found.verdict in SAME:
            sizes = f" (largest: {found.sizes})" if found.verdict == "rounding" else ""
            known = found.weights_known >= self.steps[0]
            weights = "" if known else "; weights were not compared, because the run has no digest of theirs here"
            text = f"{which}: {SAME[found.verdict]}{sizes}{weights}"
        return "\n".join([text, *(case["text"] for case in self.cases)])


@dataclass(frozen=True)
class Beginning:
    """Where a rerun begins: at a checkpoint in its folder, or without one at the start of the run."""

    run: RunOnDisk
    folder: Path
    checkpoint: str | None
    steps: range  # to train
    call_rewards: bool

    def arguments(self, args: GRPOConfig) -> GRPOConfig:
        """A copy of a trainer's arguments: nothing is saved, evaluated or pushed."""
        again = copy.copy(args)
        again.output_dir, again.trail = str(self.folder), True
        again.allow_changed_on_resume = ["stopped_early", *args.may_change]
        again.save_strategy = again.eval_strategy = IntervalStrategy.NO
        again.eval_on_start = again.load_best_model_at_end = again.push_to_hub = again.log_completions = False
        return again


def run_again(view: TrainerView, step: int, gradients: bool, call_rewards: bool, cases: Sequence[Case] = ()) -> Rerun:
    """Run a step of the run in a trainer's `output_dir` again, token by token, and compare it with the run's record.

    Afterwards the weights are those after the step. Rewards are the run's, or with `call_rewards` computed again;
    `gradients`: record that of each completion too. `cases`: compare the step with what other settings would make it.

    Raises:
        ConfigError: the run has no trail or not this step, is another run, or samples in a way of its own; or a case
            has a setting that decides more than the loss and the update.
    """
    require_whole("step", step)
    if view.rollout_func is not None:
        raise ConfigError(f"a run with a rollout_func {_CANNOT}: what it samples is not known here.")
    if view.use_vllm and (view.args.bf16 or view.args.fp16):
        raise ConfigError(f"a run of vLLM in half precision {_CANNOT}, because it samples different tokens each time.")
    if gradients and (view.sharded or view.args.sequence_parallel_size > 1):
        raise ConfigError(
            "the gradient of a completion is not on one process under FSDP, DeepSpeed and sequence_parallel_size."
        )
    for case in (cases := [*cases]):
        attributes_of(view, case)
    if twice := [title_of(case) for case in cases if cases.count(case) > 1]:
        raise ConfigError(f"cases: {twice[0]} is named twice; leave one of them out.")
    begun = from_main_process(view.accelerator, functools.partial(_beginning, view, step, call_rewards))
    # not the user's, whose `Console` measures, and no tracker's
    callbacks = view.callback_handler.callbacks
    needed = [c for c in callbacks if isinstance(c, _NEEDED) and getattr(c, "measure", None) is None]
    with view.assembled_for(begun.arguments(view.args), needed) as (rollouts, planner):
        compared = Cases(view, rollouts, planner, cases, begun.run.record.rollouts)
        return StepAgain(view, rollouts, planner, compared).run(begun, gradients)


def _beginning(view: TrainerView, step: int, call_rewards: bool) -> Beginning:
    source = Path(str(view.args.output_dir))
    run = read_run(source)
    record = run.record
    refuse_unknown(step, record, source)
    settings = settings_of(finite(fingerprint_of(view, view.geometry)))
    if changed := _refused(run.settings(step), settings):
        raise ConfigError(f"this is not the run of {source}, so its steps would be others: {listed(changed)}.")
    names = itertools.chain([f"step-{step}"], (f"step-{step}-{number}" for number in itertools.count(2)))
    folder = make_first(source / RERUNS / name for name in names)
    start, checkpoint = 0, None
    # rewards are computed where the completions are sampled
    latest = max(n for n in (1, *record.rollouts) if n <= step) if call_rewards else step
    for path in reversed(checkpoints(source)):
        number = int(path.name.rpartition("-")[2])
        if number < latest and _linked(path, folder / path.name):
            start, checkpoint = number, str(folder / path.name)
            break
    for number in range(start + 1, step):
        if changed := _refused(run.settings(number), settings):
            shutil.rmtree(folder, ignore_errors=True)
            raise ConfigError(
                f"step {step} of {source} {_CANNOT}: no checkpoint lies between it and step {number}, which the "
                f"run made with other settings before it was resumed ({listed(changed)})."
            )
    if checkpoint is None and view.state.global_step:
        folder.rmdir()
        raise ConfigError(
            f"{source} has no checkpoint before step {step}, and this trainer has trained already; build the "
            "trainer anew, or save checkpoints (save_strategy='steps')."
        )
    logged = record.entries[-1]["step"] if record.entries else 0
    time = f", about {max(record.seconds / logged * (step - start), 1.0):.0f} s at the run's pace" if logged else ""
    beginning = "the start" if checkpoint is None else Path(checkpoint).name
    steps = range(start + 1, step + 1)
    rewards = "rewards computed again" if call_rewards else "the record's rewards where it has each"
    logger.info(f"Running {_named(steps)} of {source} again from {beginning}{time}, in {folder}, with {rewards}.")
    return Beginning(run, folder, checkpoint, steps, call_rewards)


@dataclass
class StepAgain:
    """Runs steps again, on a trainer that is assembled for it."""

    view: TrainerView
    rollouts: Rollouts
    planner: StepPlanner
    cases: Cases

    def run(self, beginning: Beginning, gradients: bool) -> Rerun:
        """Train to the last of the steps and record it; compare with the run's record."""
        record, accelerator = StepRecord(gradients), self.view.accelerator
        if not beginning.call_rewards:
            self.rollouts.worker.known_rewards = self._known_rewards(beginning.run.record)
        self.view.add_callback(_Ending(beginning.steps[-1], self.planner, record, self.cases))
        try:
            self.view.train(resume_from_checkpoint=beginning.checkpoint)
            record.gather()
            return from_main_process(accelerator, lambda: self._end(beginning, record))
        finally:
            for path in checkpoints(beginning.folder) if accelerator.is_main_process else ():
                shutil.rmtree(path, ignore_errors=True)

    def _known_rewards(self, record: Record) -> Callable[..., torch.Tensor]:
        """Returns, as `_calculate_rewards`, the run's rewards of the same completions, and computes all others."""
        view, calculate, calls = self.view, self.view.calculate_rewards, Counter[int]()

        def rewards(inputs: Any, prompts: Any, completions: Any, ids: Any) -> torch.Tensor:
            local = self.rollouts.rewarding
            real = [] if local is not None and local.request.stands_in else ids
            found = gather_lists([(digest_of(row, 1), digest_of(row, 0)) for row in real])  # 0: it is masked out
            step = view.state.global_step + 1
            rounds = record.rollouts.get(step, {}).get("rounds", ())[calls[step] :][:1]
            calls[step] += 1
            for part in rounds:
                if part["count"] != len(part["completions"]):
                    logger.warning_once("The record has only sums of so many rewards: the functions are called again.")
                elif (known := _rewards_of(part, found, len(view.reward_funcs))) is not None:
                    return known.to(view.accelerator.device)
            return calculate(inputs, prompts, completions, ids)

        return rewards

    def _end(self, beginning: Beginning, record: StepRecord) -> Rerun:
        run, folder, steps = beginning.run, beginning.folder, beginning.steps
        again = read_run(folder)
        begun = [start for start in run.record.starts if start["step"] < steps[-1]]
        begun[-1:] = [{**begun[-1], "ended": "before"}]  # it may go on
        until = {number: line for number, line in run.record.steps.items() if number <= steps[-1]}
        before = dataclasses.replace(run.record, steps=until, starts=begun)
        comparison = compare_runs(dataclasses.replace(run, record=before), again)
        comparison.missing.clear()  # a rerun has no trail before its checkpoint
        values = again.record.steps[steps[-1]]["values"]
        file, size = LineFile(folder / STEP), self.view.geometry.global_batch_size
        part, batch = origins_of(run.record.rollouts | again.record.rollouts, steps[-1], size)
        if len(origins := batch[part]) != len(record.rollout):  # unknown, or an override has changed the rows
            origins = [{} for _ in record.rollout["completion_ids"]]
        lines = list(self._lines(record, origins))
        cases = [compared | {"text": case_text(compared, lines)} for compared in self.cases.compared]
        rerun = Rerun(folder, steps, comparison, cases)
        about = {name: values.get(name) for name in ("loss", "grad_norm", "learning_rate")}
        about |= {"verdict": comparison.verdict, "text": rerun.text, "layers": record.layers, "cases": cases}
        file.append({"step": steps[-1], **about})
        for line in lines:
            file.append(line)
        logger.info(f"{rerun.text}\nAll that the step computed: {folder / STEP}")
        return rerun

    def _lines(self, record: StepRecord, origins: Sequence[Line]) -> Iterator[Line]:
        """What is recorded of each completion."""
        decode, data = self.view.tokenizer.decode, self.view.train_dataset
        batch, text_of = record.rollout, functools.cache(lambda token: decode([token]))
        columns = (batch.prompts, batch.completions, batch["advantages"])
        for place, (origin, prompt, row, advantages) in enumerate(zip(origins, *columns, strict=True)):
            ids, advantage, length = row.tolist(), advantages.tolist(), len(row)
            of_tokens = record.tokens.get(place, {}).items()
            tokens = {name: None if values is None else values[:length] for name, values in of_tokens}
            data_row = {} if (number := origin.get("row")) is None else dict(data[number])
            yield {
                "place": place,
                **origin,
                "prompt": decode(prompt.tolist()),
                "answer": data_row.get("answer", data_row.get("solution")),
                "completion": decode(ids, skip_special_tokens=True),
                "advantage": advantage[:length] if isinstance(advantage, list) else advantage,
                "share": None if (shares := tokens.get("share")) is None else math.fsum(shares),
                "gradient": record.gradients.get(place),
                "tokens": {"ids": ids, "text": list(map(text_of, ids)), **tokens},
                "cases": {title: changes[:length] for title, changes in record.cases.get(place, {}).items()},
            }


@dataclass
class _Ending(TrainerCallback):
    """Records a step, and ends the training after it."""

    step: int
    planner: StepPlanner
    record: StepRecord
    cases: Cases

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 == self.step:
            self.planner.record, view = self.record, self.planner.view
            self.cases.start = {"entropy_coef": view.entropy_coef, "_last_world_entropy": view.last_entropy}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 == self.step and self.cases.cases:
            self.cases.run(self.record)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_log = True  # each step by itself
        if state.global_step == self.step:
            self.planner.record, self.record.moved = None, True
            self.record.forward_again()
            control.should_training_stop = True


def _refused(made: Identity, now: Identity) -> Changes:
    return [change for change in changes(made, now) if resumes(change[0]) != NOTED]


def _named(steps: range) -> str:
    return f"step {steps[-1]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


def _linked(checkpoint: Path, copy: Path) -> bool:
    """Whether a checkpoint is complete in `copy` now: hard links, because the run may delete its own."""
    with contextlib.suppress(OSError):  # it was deleted meanwhile
        link(checkpoint, copy)
        if why_not_resumable(copy) is None:
            return True
    shutil.rmtree(copy, ignore_errors=True)
    return False


def _rewards_of(part: Line, completions: Sequence[tuple[str, str]], functions: int) -> torch.Tensor | None:
    """The rewards (B, F) that a trail has of a round; None where it has other completions (either digest of each)."""
    known = len(part["completions"]) == len(completions) and len(part["rewards"]) == functions
    if not known or not all(one in pair for one, pair in zip(part["completions"], completions, strict=True)):
        return None
    return rewards_of(part["rewards"].values()).T
