"""The rollout batches of a run: where the completions of a step come from.

    step -> (new rollout batch?) -> local phase, here or ahead on a thread -> join -> log -> completions of the step

Differs from TRL, which keeps padded slices of its own process. Overrides of TRL's rollout methods are called with TRL's
arguments (`rollouts.rounds`, `rollouts.worker`); without one a rollout is not put into TRL's dictionary.
Called by the trainer.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from accelerate.logging import get_logger

from ..batching.prompt_order import ProcessSlices, StepRows
from ..batching.sizes import BatchGeometry
from ..forward.snapshot import Weights
from ..runtime.collectives import of_ours, wait_for_all
from ..runtime.out_of_memory import Halving, MicroBatchLimits
from ..view import TrainerView
from .ahead import PROGRESS, RolloutsAhead, build_ahead, settings_ahead
from .batch import Column, Ragged, RolloutBatch
from .images import ImageSource
from .join import RolloutLog, Round
from .local import RewardSettings, RolloutSettings
from .rounds import RoundMaker
from .settings import read_settings, template_of
from .worker import RolloutWorker

logger = get_logger(__name__)


@dataclass(frozen=True)
class ScoredRollout:
    """The rewards (B, F) of a rollout batch, with their settings; None where a user's override made them."""

    rewards_BF: torch.Tensor | None
    settings: RewardSettings


@dataclass(frozen=True)
class MadeRollout:
    """A rollout batch, with all that was sampled for it."""

    step: int  # the first optimizer step that trains on it, from 1
    sampled_by: int  # how many steps its weights have had
    rounds: Sequence[Round]
    functions: Sequence[str]  # the names of the reward functions
    batch: RolloutBatch
    chosen: Sequence[int] | None  # which completions of the rounds, one after the other, are the batch; None: all


@dataclass
class Rollouts:
    """Makes rollout batches and holds the one that is trained on."""

    view: TrainerView
    rounds: RoundMaker
    log: RolloutLog
    memory: Halving  # the number of completions that fit into one `generate`, of the thread that samples ahead too
    limits: MicroBatchLimits  # of training, which also bound the forwards of a rollout
    note: Callable[[MadeRollout], None]  # is told of every rollout batch that is trained on
    # raises for what was changed since the trainer was built, and cannot be followed
    recheck: Callable[[], None] = field(default=lambda: None, init=False)
    batch: RolloutBatch | None = field(default=None, init=False)  # the one that is trained on
    batch_name: tuple[int, int] | None = field(default=None, init=False)  # its `RolloutRequest.name`
    # the rollout batch that was made last, of training or of an evaluation; None before
    scored: ScoredRollout | None = field(default=None, init=False)
    ahead: RolloutsAhead | None = field(default=None, init=False)  # None without `rollout_lag`, and outside of training
    sampled_at: int = field(default=0, init=False)  # the optimizer step whose weights sampled the rollout batch
    # rollout batches that a checkpoint names: their first steps, and the weights that sample them
    waiting: Sequence[tuple[int, Weights]] = field(default=(), init=False)
    threads: int | None = field(default=None, init=False)  # CPU threads of sampling ahead; None: as many as torch has
    geometry: BatchGeometry = field(init=False)  # the batch sizes of the run

    def __post_init__(self) -> None:
        self.begin(self.view.args.geometry, threads=None)

    @property
    def worker(self) -> RolloutWorker:
        return self.rounds.worker

    @property
    def images(self) -> ImageSource:
        return self.worker.images

    def begin(self, geometry: BatchGeometry, threads: int | None) -> None:
        """Begin a run with these batch sizes: its first step samples, and nothing waits to be sampled ahead."""
        self.batch, self.batch_name, self.waiting = None, None, ()
        self.geometry, self.threads = geometry, threads
        if not self.view.args.use_vllm:
            self.worker.settings.resize_chunks(geometry)

    def state_dict(self) -> dict[str, Any]:
        batch = batch_state(self.batch)
        waiting = self.waiting if self.ahead is None else [(job.step, job.weights) for job in self.ahead.jobs]
        return {
            "batch": batch,
            "batch_name": None if batch is None else self.batch_name,
            "sampled_at": self.sampled_at,
            "waiting": waiting_state(waiting),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        name = state["batch_name"]
        self.batch, self.batch_name = saved_batch(state["batch"]), None if name is None else tuple(name)
        self.waiting, self.sampled_at = saved_waiting(state["waiting"]), state["sampled_at"]

    def slices(self, num_generations: int) -> ProcessSlices:
        accelerator = self.view.accelerator
        # vLLM batches by itself, and tensor parallel engines need as many rows from every process: a chunk is one group
        chunk = num_generations if self.view.args.use_vllm else self.geometry.rollout_chunk_size
        return ProcessSlices(num_generations, chunk, accelerator.num_processes, accelerator.process_index)

    def close(self) -> None:
        if self.ahead is not None:
            self.ahead.close()
            self.ahead = None

    def settings_now(self) -> RolloutSettings:
        """The settings of a rollout batch that begins now; a ConfigError for a change that cannot be followed."""
        prepare, sampled = self.images.prepare, self.scored is not None or self.ahead is not None
        if prepare is not None and not sampled:  # images by the processor and template as they are now
            prepare.processor, prepare.template = self.view.processing_class, template_of(self.view)
        self.recheck()
        return read_settings(self.view, self.worker, self.rounds.check, self.limits.tokens)

    def send_weights(self) -> None:
        """Send the current weights to vLLM, by TRL's rule once for each step that samples; a collective."""
        view = self.view
        if not view.use_vllm:
            return
        with of_ours():
            if self.ahead is not None:  # the server may still sample with other weights
                self.ahead.drain()
                wait_for_all(view.accelerator)
            if (step := view.state.global_step) != view.weights_sent_at:
                with view.profile("sync_weights"):
                    view.vllm_generation.sync_weights()
                wait_for_all(view.accelerator)  # the main process sends to a server, which every process asks
                view.note_weights_sent(step)

    # ---- A step's completions -------------------------------------------------------------------------------------

    def completions_of(self, rows: StepRows) -> RolloutBatch:
        """The completions of an optimizer step, or of an evaluation; the same on every process.

        `rows` are this process's; empty in a map-style data set's step that continues a rollout batch, and with a lag.
        """
        if not self.view.model.training:
            return self.make(rows)
        request, args = rows.request, self.view.args
        if args.rollout_lag:
            # further prompts of dynamic sampling have to enter the queue before the rollout batches after this one
            self._submit_ahead(0 if args.dynamic_sampling else args.rollout_lag)
        if self.batch is None or self.batch_name != request.name:
            if not rows and self.ahead is None:  # a run that was resumed without its rollout batch
                rows = self.rounds.steps.rows(request)
            self.batch, self.batch_name = self.make(rows), request.name
        if args.rollout_lag:
            if args.dynamic_sampling:
                self._submit_ahead(args.rollout_lag)
            staleness = self.view.state.global_step - self.sampled_at
            self.view.metrics["train"]["sampling/staleness"].append(staleness)
        assert self.batch is not None
        return self.batch.select(request.layout.step_rows)

    def _submit_ahead(self, lag: int) -> None:
        """Submit the rollout batches that the current weights sample: this step's, and at most `lag` after it."""
        if self.ahead is None:
            self.ahead, self.waiting = build_ahead(self), ()
        step = self.view.state.global_step
        if due := self.ahead.steps_to_submit(step, self.batch_name, lag):
            weights = self.ahead.snapshot.take({name: getattr(self.view.state, name) for name in PROGRESS})
            for start in due:
                self.ahead.submit(start, weights, settings_ahead(self, self.ahead, weights))

    def make(self, rows: StepRows) -> RolloutBatch:
        """Sample and score these rows of every process, and log what TRL logs of them; a collective."""
        ahead = self.ahead if self.view.model.training else None
        # what was sampled ahead is joined by the settings with which it began
        settings = self.settings_now() if ahead is None else ahead.jobs[0].settings
        rewards_BF: torch.Tensor | None
        chosen: list[int] | None
        make_round = functools.partial(self._round, settings=settings, ahead=ahead)
        if self.view.args.dynamic_sampling and self.view.model.training:
            filled = self.rounds.fill(rows, settings.rewards, make_round)
            self.log.add(filled.rounds, settings)
            for name, value in filled.metrics.items():
                self.view.metrics["train"][f"dynamic_sampling/{name}"].append(value)
            batch, rewards_BF, parts, chosen = filled.batch, filled.rewards_BF, filled.rounds, filled.chosen
        else:
            part = make_round(rows)
            if settings.sampling.hooks.score is None:  # else TRL's method has logged what it made
                self.log.add([part], settings)
            batch, rewards_BF = part.batch, part.rewards_BF if part.entries else None
            parts, chosen = [part], None
        self.scored = ScoredRollout(rewards_BF, settings.rewards)
        if rewards_BF is not None and torch.isnan(rewards_BF).all():
            names = ", ".join(settings.rewards.functions.names)
            logger.warning(
                f"No completion of this rollout was scored: {names} returned None for all of them, "
                "so there is nothing to learn from; check that the reward functions fit the data."
            )
        if self.view.model.training:
            step = self.view.state.global_step
            functions, sampled_by = settings.rewards.functions.names, step if ahead is None else self.sampled_at
            self.note(MadeRollout(step + 1, sampled_by, parts, functions, batch, chosen))
        if ahead is not None:
            ahead.jobs.popleft()
        return batch

    def _round(self, rows: StepRows, *, settings: RolloutSettings, ahead: RolloutsAhead | None) -> Round:
        if (score := settings.sampling.hooks.score) is not None:
            return self.rounds.by_user(rows, settings, score)
        if ahead is not None:
            local = ahead.part_of(rows)
            self.sampled_at = ahead.jobs[0].weights.step
            self.worker.show_environments(local.transcripts)
        else:
            if self.worker.settings.sharded:
                self.images.refuse_mixed(rows)
            self.send_weights()
            local = self.rounds.sample(rows, settings)
        return self.rounds.join(local)


# ---- In a checkpoint: nested dictionaries, lists and tensors, as `run.state` writes them -----------------------------


def batch_state(batch: RolloutBatch | None) -> dict[str, Any] | None:
    """A rollout batch for a checkpoint; None, with a warning, for one with objects that no file can hold."""
    if batch is None:
        return None
    lists = {name: column for name, column in batch.columns.items() if isinstance(column, list)}
    values = {name: value for name, value in batch.constants.items() if not isinstance(value, torch.Tensor)}
    others = {name: value for name, value in (lists | values).items() if not _are_files(value)}
    if unstorable := [name for name, value in others.items() if not _survives_json(value)]:
        logger.warning(
            f"A checkpoint cannot hold {', '.join(unstorable)} of this rollout batch (Python objects other than "
            "numbers, texts, lists and dictionaries of them), so it is left out: a run that resumes here samples "
            "it again, with the weights as they are then. Return tensors from _generate_and_score_completions."
        )
        return None
    return {
        "columns": {name: _column_state(column) for name, column in batch.columns.items()},
        "groups": list(batch.groups),
        "constants": batch.constants,
        "widths": batch.widths,
        "items_per_token": batch.items_per_token,
    }


def saved_batch(state: dict[str, Any] | None) -> RolloutBatch | None:
    if state is None:
        return None
    widths, columns = state["widths"], {name: _column(part) for name, part in state["columns"].items()}
    return RolloutBatch(**{**state, "columns": columns, "widths": None if widths is None else tuple(widths)})


def _column_state(column: Column) -> Any:
    if _are_files(column):  # rows share them
        different = list(dict.fromkeys(column))
        files = [torch.from_numpy(np.frombuffer(bytearray(file), np.uint8)) for file in different]
        return _column_state(Ragged.of(files, torch.uint8)) | {"rows": [different.index(file) for file in column]}
    return {"values": column.values, "lengths": column.lengths} if isinstance(column, Ragged) else column


def _column(state: Any) -> Column:
    if not isinstance(state, dict):
        return state
    parts = Ragged(state["values"], state["lengths"])
    if "rows" not in state:
        return parts
    files = [part.numpy().tobytes() for part in parts]
    return [files[number] for number in state["rows"]]


def _are_files(column: Any) -> bool:
    return isinstance(column, list) and bool(column) and all(isinstance(value, bytes) for value in column)


def _survives_json(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False


def waiting_state(waiting: Sequence[tuple[int, Weights]]) -> dict[str, Any]:
    """First steps of rollout batches and the weights that sample them, of which each is stored once."""
    weights = {part.step: vars(part) for _, part in waiting}
    return {"steps": [[step, part.step] for step, part in waiting], "weights": list(weights.values())}


def saved_waiting(state: dict[str, Any]) -> list[tuple[int, Weights]]:
    """The pairs of `waiting_state`; those with the same weights share one object."""
    weights = {part.step: part for part in (Weights(**fields) for fields in state["weights"])}
    return [(step, weights[sampled_by]) for step, sampled_by in state["steps"]]
