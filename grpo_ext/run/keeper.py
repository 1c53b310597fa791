"""Keeping a run: it can stop anywhere and go on as if it had not.

Differs from transformers: a checkpoint is whole or absent, is verified before it is read, holds the rollout batch in
progress, and is refused by a run that means something else; signals end a run after its step. A callback where the
Trainer has an event for it; what has none, the trainer's override points hand over.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import trl
from accelerate import Accelerator
from accelerate.logging import get_logger
from transformers import TrainerCallback, TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..batching.sizes import BatchGeometry, EpochLayout
from ..config import GRPOConfig
from ..errors import CheckpointError
from ..runtime.collectives import any_process, failing_together, from_main_process, shards_parameters
from .checkpoint import (
    check_space,
    checkpoints,
    is_verified,
    newest_whole,
    no_space,
    processes_of,
    publish,
    rotate,
    set_aside_later,
    why_not_resumable,
    write_listing,
    writing_folder,
)
from .fingerprint import KEEPS_ROLLOUT, batch_advice, check_same_run, differences, save_fingerprint
from .interrupts import InterruptWatch, RunCallback, TrainingInterrupted
from .live import LiveRun
from .log import RunLog
from .manifest import closing, opening, read_manifest, write_manifest
from .optimizer_settings import CHANGEABLE
from .output_folder import HeldFolder
from .state import RunState, load_reference, save_reference

logger = get_logger(__name__)


class RunKeeper(TrainerCallback):
    """See the module.

    Args:
        run: what is kept.
        user_args: the user's configuration, whose `output_dir` follows that of the loop's.

    Attributes:
        output_dir: where the Trainer's own saving has to write; None: to the folder of the run.
        changed: settings that differ from the checkpoint, as allowed.
        micro_batch_of_checkpoint: completions on one device, when it was written.
        push_due: the checkpoint that is `writing` is to be pushed, once it has its name.
    """

    def __init__(self, run: LiveRun, user_args: trl.GRPOConfig | None) -> None:
        self.run, self.user_args = run, user_args
        self.accelerator: Accelerator = run.trainer.accelerator
        self.args: GRPOConfig = run.trainer.args
        self.geometry: BatchGeometry = run.trainer.geometry
        self.sharded, device = shards_parameters(self.accelerator), self.accelerator.device
        self.watch = InterruptWatch(lambda asked: any_process(asked, device), self.say)
        self.output_dir: str | None = None
        self.changed: frozenset[str] = frozenset()
        self.micro_batch_of_checkpoint: int | None = None
        self.push_due = False
        self._resumed: RunState | None = None
        self._fingerprint: dict[str, Any] | None = None
        self._log = RunLog()
        self.folder = HeldFolder()

    def say(self, sentence: str) -> None:
        """Print a line, on the main process."""
        if self.accelerator.is_main_process:
            print(sentence, flush=True)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What is compared on resume; made once in a run."""
        if self._fingerprint is None:
            self._fingerprint = self.run.fingerprint(whole=not self.sharded)
        return self._fingerprint

    # ---- Events of the Trainer ------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The loop has set its sums to zero: what a checkpoint holds of them comes back."""
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            self.run.restore(resumed)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Completions of training are told from those of an evaluation that follows."""
        self._log.collect(self.run.logs, self.run.trainer.reward_weights.tolist())

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """A line of the run's log."""
        if logs is not None:
            weights, device = self.run.trainer.reward_weights.tolist(), self.accelerator.device
            self._log.write(state.global_step, state.epoch, logs, self.run.logs, weights, device)

    # ---- A run ----------------------------------------------------------------------------------------------------

    def begin(self, wanted: str | bool | None, num_generations: int) -> str | None:
        """Before a run: take its folder, and find, verify and read the checkpoint it goes on from.

        What other runs have saved stays as it is. The folder is `folder.release()`d by the caller.

        Returns:
            The checkpoint's folder; None for a new run.

        Raises:
            CheckpointError: it is broken, it belongs to another run, there is none, or another run writes there.
        """
        if wanted is None and (unread := self.args.resume_from_checkpoint) is not None:
            logger.warning(
                f"args.resume_from_checkpoint={unread!r} is not read by train(), as in transformers, and a new run "
                "begins; call trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)."
            )
        self._fingerprint, self._resumed, self.changed, self.micro_batch_of_checkpoint = None, None, frozenset(), None
        named = isinstance(wanted, str) and wanted not in ("latest", "auto")
        checkpoint = self.find(wanted) if named else None
        folder, in_place = self._take_folder(wanted, checkpoint)
        if not named:  # the newest one is that of the moment at which the folder is held
            checkpoint = self.find(wanted)
        if checkpoint is not None:
            self._resumed = self._read(checkpoint, num_generations)
        self._write_to(folder)
        if checkpoint is not None and in_place and self.args.should_save and (later := set_aside_later(checkpoint)):
            names = ", ".join(path.name for path in later)
            logger.warning(f"Going on from {checkpoint}; the later checkpoints beside it are now {names}.")
        return checkpoint

    def _take_folder(self, wanted: str | bool | None, checkpoint: str | None) -> tuple[str, bool]:
        """Hold the run's folder, or a free one beside it; which one, and whether a run of the folder goes on in it."""
        own = Path(str(self.args.output_dir))

        def take() -> tuple[str, str, bool]:
            if checkpoint is not None:
                in_place = Path(checkpoint).resolve().parent == own.resolve()
            else:
                in_place = bool(wanted) and bool(checkpoints(own))
            return *self.folder.take(str(own), in_place), in_place

        folder, self.folder.writer, in_place = from_main_process(self.accelerator, take)
        return folder, in_place

    def _write_to(self, folder: str) -> None:
        """Write to a folder from now on, also where the script saves to the `output_dir` of its own arguments."""
        for args in (self.args, self.user_args):
            if args is not None and args.output_dir != folder:
                args.output_dir = folder
        if self.args.log_completions and self.accelerator.is_main_process:
            (Path(folder) / "completions").mkdir(parents=True, exist_ok=True)  # TRL makes it once, when it is built

    def announce(self) -> None:
        """Print the plan of the run."""
        self.say(f"Plan (sizes over all processes unless they say otherwise)\n{self.run.plan()}")

    @contextlib.contextmanager
    def running(self, checkpoint: str | None) -> Iterator[None]:
        """Inside, a run: signals stop it after a step, its manifest and its callbacks are told how it ends."""
        with contextlib.ExitStack() as ending, self.watch.listening():
            ending.callback(self._tell_callbacks)
            if not self.args.should_save:
                yield
                return
            folder = str(self.args.output_dir)
            earlier = read_manifest(folder) if checkpoint is not None else []
            entry = opening(self.geometry, self.fingerprint, self.accelerator.device, checkpoint, self.run.model)
            write_manifest(folder, [*earlier, entry])
            self._log.begin(folder, checkpoint)
            try:
                yield
            except BaseException:
                self._close_manifest([*earlier, entry | closing(self.run.trainer.state.global_step, "failed", None)])
                raise
            ended = "interrupted" if self.watch.stopping else "finished"
            optimizer = self.run.trainer.optimizer if self.args.bitwise_invariant else None
            model, step = None if self.sharded else self.run.model, self.run.trainer.state.global_step
            end = closing(step, ended, model, optimizer)
            self._close_manifest([*earlier, entry | end])

    def _tell_callbacks(self) -> None:
        for callback in self.run.trainer.callback_handler.callbacks:
            if isinstance(callback, RunCallback):
                callback.on_run_end()

    def _close_manifest(self, entries: list[dict[str, Any]]) -> None:
        """The end of a run stands in its manifest where there is space: what was trained matters more."""
        try:
            write_manifest(str(self.args.output_dir), entries)
        except CheckpointError as error:
            logger.warning(str(error))

    def interrupted(self, path: Path, step: int) -> TrainingInterrupted:
        """What ends the program after an interrupt.

        Args:
            path: where the checkpoint of the last step would be.
        """
        if not from_main_process(self.accelerator, path.is_dir):
            self.say(f"Interrupted after step {step}; no checkpoint of it was written.")
            return TrainingInterrupted(None)
        self.say(
            f"Interrupted after step {step}; {path} is written. To go on, run the same command with "
            f"--resume_from_checkpoint {path} (in a script: trainer.train(resume_from_checkpoint='{path}'))."
        )
        return TrainingInterrupted(str(path))

    # ---- Reading a checkpoint -------------------------------------------------------------------------------------

    def find(self, wanted: str | bool | None) -> str | None:
        """The checkpoint to go on from, found and verified on the main process.

        Raises:
            CheckpointError: it is broken, or there is none.
        """
        if not wanted:
            return None
        folder = str(self.args.output_dir)

        def find() -> tuple[str | None, str | None, list[str]]:
            if wanted == "auto" and not checkpoints(folder):
                return None, None, []
            if isinstance(wanted, str) and wanted not in ("latest", "auto"):
                return wanted, why_not_resumable(wanted), []
            newest, skipped = newest_whole(folder, why_not_resumable)
            if newest is None:
                return None, f"{folder} holds no whole checkpoint: {'; '.join(skipped) or 'it has none'}", []
            return str(newest), None, skipped

        path, reason, skipped = from_main_process(self.accelerator, find)
        for sentence in skipped:
            logger.warning(f"Skipped a checkpoint: {sentence}.")
        if reason is not None:
            raise CheckpointError(
                f"{reason}, so nothing can be resumed from it; use resume_from_checkpoint='latest' for the newest "
                "whole checkpoint of output_dir, 'auto' for that or a new run where there is none, or leave it out to "
                "start anew."
            )
        if path is None:
            return None
        there = processes_of(path)
        if self._deepspeed and there not in (None, self.accelerator.num_processes):
            raise CheckpointError(
                f"{path} was written by {there} processes, and DeepSpeed's shards are read by as many; this run has "
                f"{self.accelerator.num_processes}. Start {there}, or export the model and begin a new run with it."
            )
        if not is_verified(path):
            logger.warning(f"{path} has no checksums (another trainer wrote it), so it is read unverified.")
        return str(path)

    @property
    def _deepspeed(self) -> bool:
        return getattr(self.accelerator.state, "deepspeed_plugin", None) is not None

    def _read(self, checkpoint: str, num_generations: int) -> RunState | None:
        def compare() -> dict[str, Any]:
            return check_same_run(checkpoint, self.fingerprint, self.args.allow_changed_on_resume or ())

        allowed = from_main_process(self.accelerator, compare)
        for part, old, new in (part for name, values in allowed.items() for part in differences(name, *values)):
            logger.warning(f"{part} was {old} when {checkpoint} was written and is {new} now, as allowed.")
        rate = allowed["learning_rate"][0] if "learning_rate" in allowed else self.args.learning_rate
        if advice := batch_advice(allowed, rate):
            logger.warning(f"{advice} {self._where_it_goes_on(checkpoint, allowed['global_batch_size'][0])}")
        size = json.loads((Path(checkpoint) / "trainer_state.json").read_text()).get("train_batch_size")
        self.micro_batch_of_checkpoint = None if size is None else size // max(1, self.args.n_gpu)
        self.changed = frozenset(allowed)
        self._refuse_changes_without_effect()
        state = RunState.load(checkpoint, num_generations)
        if state is None:
            logger.warning(f"{checkpoint} holds no rollout batch, so completions are sampled again from here.")
        elif others := sorted(allowed.keys() - KEEPS_ROLLOUT):
            ahead = " and what was being sampled ahead are" if state.waiting else " is"
            logger.warning(f"{', '.join(others)} changed, so the rollout batch of the checkpoint{ahead} not used.")
            state.rollout = state.rollout_name = None
            state.waiting = []
        if (reference := self.run.reference) is not None:
            load_reference(reference, checkpoint)
        return state

    def _where_it_goes_on(self, checkpoint: str, old_batch: int) -> str:
        """What becomes of the data order when a run goes on with another global batch; steps are what a run counts.

        Raises:
            CheckpointError: no steps are left.
        """
        step = int(json.loads((Path(checkpoint) / "trainer_state.json").read_text())["global_step"])
        g, total = self.geometry, self.args.max_steps
        if total <= 0:
            layout = EpochLayout(g, len(self.run.trainer.train_dataset), self.args.dataloader_drop_last)
            total = math.ceil(self.args.num_train_epochs * len(layout))
        if step >= total:
            raise CheckpointError(
                f"{checkpoint} was written after step {step}, and with global_batch_size={g.global_batch_size} the run "
                f"has {total} steps, so nothing is left to train; raise num_train_epochs or max_steps (and name it in "
                "allow_changed_on_resume), or export the model and begin a new run with it."
            )
        per_prompt = g.num_generations * g.num_iterations
        seen, next_one = step * old_batch // per_prompt, step * g.global_batch_size // per_prompt
        fate = f"{next_one - seen} are skipped" if next_one > seen else f"{seen - next_one} come again"
        return f"The run goes on with step {step + 1} of {total}: about {seen} prompts were trained, about {fate}."

    def _refuse_changes_without_effect(self) -> None:
        kept = sorted(self.changed & CHANGEABLE.keys())
        if kept and self._deepspeed:
            raise CheckpointError(
                f"DeepSpeed reads {', '.join(kept)} from the checkpoint, so the change would have no effect; put it "
                "back, or export the model and begin a new run with it."
            )
        if "learning_rate" in kept and self.args.lr_scheduler_type == "reduce_lr_on_plateau":
            raise CheckpointError(
                "lr_scheduler_type='reduce_lr_on_plateau' goes on with the checkpoint's learning rate, so another "
                "learning_rate would have no effect; put it back, or export the model and begin a new run with it."
            )

    # ---- Writing a checkpoint -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def writing(self, final: Path, state: TrainerState) -> Iterator[None]:
        """Inside, the Trainer writes a checkpoint to `output_dir`; afterwards it is whole or absent: run.checkpoint.

        Args:
            final: the checkpoint's folder.
            state: the Trainer's.
        """
        run, folder = final.parent, writing_folder(final.parent, self.folder.writer)
        saves, run_state = self.args.should_save, None if self.args.save_only_model else self.run.state()
        needed = self._bytes(run_state)

        def explain(reason: str) -> str:
            if saves:
                shutil.rmtree(folder, ignore_errors=True)
            free = shutil.disk_usage(run).free
            if free < needed:
                return no_space(run, needed, free)
            return f"{final.name} could not be written to {run} ({reason}). The older checkpoints are untouched."

        with failing_together(explain):
            if saves:
                run.mkdir(parents=True, exist_ok=True)
                shutil.rmtree(folder, ignore_errors=True)
                check_space(run, needed)
        recorded, best_step = self.run.record(), state.best_global_step
        # transformers looks for the best checkpoint in the folder it writes to, and this one does not hold it
        self.output_dir, self.push_due, state.best_global_step = str(folder), False, None
        try:
            with failing_together(explain):
                yield
        finally:
            self.output_dir, state.best_global_step = None, best_step
        if best_step:
            best = run / f"{PREFIX_CHECKPOINT_DIR}-{best_step}"
            if best == final or best.is_dir():
                state.best_model_checkpoint = str(best)
        with failing_together(explain):
            if saves:
                self._save_own(folder / final.name, state, run_state)
                if recorded is not None:
                    recorded.save(folder / final.name)
        with failing_together(explain):
            self._publish(folder / final.name, final, state.global_step)

    def rotate(self, final: Path, best: str | None) -> None:
        """Remove the oldest checkpoints beyond `save_total_limit`; never `final` or `best`."""
        if self.args.should_save:
            rotate(final.parent, self.args.save_total_limit, final, best)

    def _save_own(self, folder: Path, state: TrainerState, run_state: RunState | None) -> None:
        state.save_to_json(str(folder / "trainer_state.json"))  # with the best checkpoint's final name
        save_fingerprint(self.fingerprint, folder)
        model, reference = self.run.model, self.run.reference
        if not any((folder / name).exists() for name in ("config.json", "adapter_config.json")):
            # the engine wrote its shards of the weights alone
            adapter = getattr(model, "peft_config", None)
            own: list[Any] = [model.config, getattr(model, "generation_config", None)]
            own = own if adapter is None else [adapter[model.active_adapter]]
            for part in filter(None, [*own, self.run.trainer.processing_class]):
                part.save_pretrained(folder)
        if run_state is None:
            return
        run_state.save(folder)
        if reference is not None and self.args.sync_ref_model and not self.sharded:
            save_reference(reference, folder)

    def _publish(self, written: Path, final: Path, step: int) -> None:
        """List what all processes wrote into a folder, and give it its name."""
        if not self.args.should_save:
            if not self.accelerator.is_local_main_process:
                return
            # on a disk of its own a node has a part of the checkpoint too; on a shared one the folder is not its own
            if written.is_dir() and not (written / "trainer_state.json").exists():
                publish(written, final)
                shutil.rmtree(written.parent, ignore_errors=True)
            return
        write_listing(written, {"step": step, "processes": self.accelerator.num_processes})
        kept = publish(written, final)
        if kept is not None:
            logger.warning(f"{final} was there already, from an earlier run of these steps; it is now {kept}.")
        shutil.rmtree(written.parent, ignore_errors=True)

    def _bytes(self, run_state: RunState | None) -> int:
        """What a checkpoint takes, estimated: the saved weights, the optimizer's tensors, the rollout batch."""
        model, optimizer = self.run.model, self.run.trainer.optimizer
        adapter = hasattr(model, "peft_config")
        weights = sum(p.nbytes for p in model.parameters() if p.requires_grad or not adapter)
        if run_state is None:
            return weights
        states = optimizer.state.values() if optimizer is not None else ()
        state = sum(v.nbytes for values in states for v in values.values() if isinstance(v, torch.Tensor))
        rollout, ahead = run_state.rollout, {weights.step: weights.nbytes for _, weights in run_state.waiting}
        rows = 0 if rollout is None else rollout.nbytes
        return weights + state + rows + sum(ahead.values()) + 2**20
