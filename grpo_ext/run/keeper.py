"""Checkpoints, resume and interrupts: a run can stop anywhere and resume with the same result.

Differs from transformers: a checkpoint is whole or absent, is verified before it is read, and holds the rollout batch
in progress; signals end a run after its step. Called by the Trainer's events and the trainer's override points.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import trl
from accelerate import Accelerator
from accelerate.logging import get_logger
from filelock import FileLock
from transformers import TrainerCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..batching.plan_text import describe_plan
from ..batching.sizes import BatchGeometry
from ..config import GRPOConfig
from ..errors import CheckpointError, MemoryShortageError
from ..forward.reference import weight_sums
from ..rollouts.build import truncating_filters
from ..rollouts.build_ahead import described
from ..rollouts.keyed import most_kept
from ..runtime.attributes import assigned
from ..runtime.collectives import failing_together, from_main_process, shards_parameters, without_long_waits
from ..runtime.determinism import environment
from .checkpoint import (
    find_checkpoint,
    is_path,
    publish,
    read_listing,
    record_start,
    rotate,
    run_to_resume,
    runs_of,
    set_aside_later,
    take_folder,
    write_listing,
    writing_folder,
)
from .fingerprint import (
    FINGERPRINT,
    KEEPS_ROLLOUT,
    check_same_run,
    differences,
    fingerprint_of,
    saved_settings,
    state_hashes,
)
from .interrupts import InterruptWatch, TrainingInterrupted
from .loading import refuse_other_engine
from .log import RunLog
from .model_card import base_name
from .state import RunState, callback_states, restore_callbacks

logger = get_logger(__name__)


class RunKeeper(TrainerCallback):
    """Begins, logs and ends the runs of a trainer, and writes their checkpoints.

    Args:
        user_args: the user's configuration; its `output_dir` follows that of the loop's.
    """

    def __init__(self, trainer: Any, user_args: trl.GRPOConfig | None) -> None:
        self.trainer, self.user_args = trainer, user_args
        self.accelerator: Accelerator = trainer.accelerator
        self.args: GRPOConfig = trainer.args
        self.watch = InterruptWatch()
        self.checkpoint: str | None = None  # that the run resumes from; None for a new run
        self.output_dir: str | None = None  # that transformers' saving writes to; None: the run's
        self.resumed = TrainerState()  # the loop's state in the checkpoint
        # the weights of the reference, before callbacks move them; None where an engine shards them
        self.reference_start = None if shards_parameters(self.accelerator) else weight_sums(trainer.ref_model)
        self._stopped_early = False  # the run that is resumed
        self._geometry: BatchGeometry = trainer.geometry  # as it was configured
        self._run_state: RunState | None = None  # from the checkpoint, until the loop has begun
        self._log = RunLog()
        self._lock: FileLock | None = None  # on the run's folder, on the main process
        self._last_folder, self._user_output_dir = "", ""  # of this trainer's last run
        self._writer = ""  # unique to this training: processes of a killed one may still be writing

    @functools.cached_property
    def fingerprint(self) -> dict[str, Any]:
        """What is compared on resume."""
        return fingerprint_of(self.trainer)

    # ---- Events of the Trainer ------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore the sums of the loop from a checkpoint; the loop has set them to zero."""
        run_state, self._run_state = self._run_state, None  # its memory is freed
        if run_state is not None:
            run_state.restore(self.trainer)
            self.watch.evaluation_due = run_state.evaluation_due and self.trainer.eval_dataset is not None

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Write a line of the run's log."""
        if logs is not None:
            self._log.write(state.global_step, state.epoch, logs, self.accelerator.device)

    # ---- A run ----------------------------------------------------------------------------------------------------

    def begin(self, wanted: str | bool | None) -> str | None:
        """Lock a run's folder until `release_folder`; find, verify and read the checkpoint to resume, if there is one.

        Raises:
            CheckpointError: it is broken, it belongs to another run, there is none, or another run writes there.
        """
        vars(self).pop("fingerprint", None)
        self.resumed, self._run_state, self._stopped_early = TrainerState(), None, False
        self.trainer.callback_handler.callbacks.sort(key=lambda part: part is self.watch)  # it sees what others decide
        self._resize_chunks({})
        if self.args.output_dir != self._last_folder:  # the user's, and not where the last run of this trainer went
            self._user_output_dir = str(self.args.output_dir)
        output_dir = self._user_output_dir

        def take() -> tuple[str, str | None, bool, str]:
            checkpoint = find_checkpoint(wanted, output_dir) if is_path(wanted) else None
            run, runs = run_to_resume(wanted, output_dir), runs_of(output_dir)
            if not is_path(wanted) and run in runs[:-1]:
                later = ", ".join(map(str, runs[runs.index(run) + 1 :]))
                logger.warning(f"Going on in {run}. Without a checkpoint are runs that started later: {later}.")
            folder, self._lock = take_folder(output_dir if run is None else str(run), in_place=run is not None)
            if not is_path(wanted):  # the newest one once the folder is locked
                checkpoint = find_checkpoint(wanted, folder)
            return folder, checkpoint, run is not None, secrets.token_hex(4)

        checkpoint: str | None
        folder, checkpoint, in_place, self._writer = from_main_process(self.accelerator, take)
        if checkpoint is not None:
            logger.info(f"Resuming from {checkpoint}.")
            self._read(checkpoint)
        if self.accelerator.is_main_process:
            record_start(folder, output_dir)
        self._last_folder, self.checkpoint = folder, checkpoint
        for args in (self.args, self.user_args):  # a script saves to the `output_dir` of its arguments
            if args is not None and args.output_dir != folder:
                args.output_dir = folder
        if self.args.log_completions and self.accelerator.is_main_process:
            (Path(folder) / "completions").mkdir(parents=True, exist_ok=True)  # TRL makes it once, when it is built
        if checkpoint is not None and in_place and self.args.should_save and (later := set_aside_later(checkpoint)):
            names = ", ".join(path.name for path in later)
            logger.warning(f"Going on from {checkpoint}; the later checkpoints beside it are now {names}.")
        return checkpoint

    def release_folder(self) -> None:
        """Let other runs take the folder."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _read(self, checkpoint: str) -> None:
        """Compare a checkpoint with this run, and read its state; weights and optimizer are read by transformers."""
        if self.args.ignore_data_skip:
            raise CheckpointError(
                f"ignore_data_skip=True would train on the first prompts of the epoch again, not on those that follow "
                f"{checkpoint}; leave it out."
            )
        from_main_process(self.accelerator, lambda: refuse_other_engine(checkpoint, self.accelerator))
        listing, processes = read_listing(Path(checkpoint)), self.accelerator.num_processes
        if listing is None:
            logger.warning(f"{checkpoint} has no checksums (another trainer wrote it), so it is read unverified.")
        elif self.trainer.is_deepspeed_enabled and listing["processes"] != processes:
            raise CheckpointError(
                f"{checkpoint} was written by {listing['processes']} processes, and DeepSpeed's shards are read by as "
                f"many; this run has {processes}. Start {listing['processes']}, or export the model and begin a new "
                "run with it."
            )
        if self.args.sync_ref_model and shards_parameters(self.accelerator):
            raise CheckpointError(
                f"{checkpoint} lacks the reference that sync_ref_model=True has moved: it is not saved under FSDP and "
                f"DeepSpeed. Begin a new run with the weights (grpo-ext export {checkpoint} NEW_FOLDER)."
            )
        allowed = self.args.allow_changed_on_resume or ()
        if "rollout_chunk_size" not in allowed:
            self._resize_chunks(from_main_process(self.accelerator, lambda: saved_settings(checkpoint)))
        changes = from_main_process(self.accelerator, lambda: check_same_run(checkpoint, self.fingerprint, allowed))
        for part, old, new in differences(changes):
            logger.warning(f"{part} was {old} when {checkpoint} was written and is {new} now, as allowed.")
        if "global_batch_size" in changes:
            logger.warning("Steps are counted on, so some prompts of this epoch are skipped or repeated.")
        state = RunState.load(checkpoint, self.trainer.num_generations)
        if state is None:
            logger.warning(f"{checkpoint} holds no rollout batch, so completions are sampled again from here.")
        elif others := sorted(changes.keys() - KEEPS_ROLLOUT):
            ahead = " and what was being sampled ahead are" if state.waiting else " is"
            logger.warning(f"{', '.join(others)} changed, so the rollout batch of the checkpoint{ahead} not used.")
            state.rollout, state.rollout_name, state.waiting = None, None, []
        self._run_state = state
        self.resumed = TrainerState.load_from_json(str(Path(checkpoint) / TRAINER_STATE_NAME))
        if state is not None:
            state.restore_limits(self.trainer)
            self._stopped_early = state.stopped_early and "stopped_early" not in allowed
        saved: Any = self.resumed.stateful_callbacks
        if not self.args.restore_callback_states_from_checkpoint:  # or transformers restores them, its way
            restore_callbacks(self.trainer.callback_handler.callbacks, saved, checkpoint)

    def why_finished(self) -> str | None:
        """Why nothing is left to train, as sentences; None where something is."""
        if self.trainer.state.global_step >= self.trainer.state.max_steps:
            return "The run is finished: nothing is left to train, and the weights stay as they are."
        if not self._stopped_early:
            return None
        return (
            f"The run was stopped early, after step {self.resumed.global_step} of {self.resumed.max_steps}. "
            "To train on, set allow_changed_on_resume=['stopped_early'] (as an option: --allow_changed_on_resume "
            "stopped_early), and leave out or change the callback that stopped it."
        )

    def _resize_chunks(self, saved: Mapping[str, Any]) -> None:
        """Take the chunk size of a checkpoint's settings (none for a new run) where the configuration sets none."""
        trainer, geometry = self.trainer, self._geometry
        size = saved.get("rollout_chunk_size")
        if geometry.together and size is not None and size % geometry.num_generations == 0:
            geometry = dataclasses.replace(geometry, rollout_chunk_size=size)
        if geometry != trainer.geometry:
            trainer.geometry = geometry
            trainer._rollouts.resize_chunks(geometry)

    def announce(self) -> str:
        """Log the plan of the run; returns it."""
        trainer, args = self.trainer, self.args
        prompts = len(trainer.train_dataset) if hasattr(trainer.train_dataset, "__len__") else None
        slower = "; float32 is faster on a CPU: bf16=False" if self.accelerator.device.type == "cpu" else ""
        continuous = trainer.use_transformers_continuous_batching
        limits, halved = trainer._step_planner.limits, (trainer._rollouts.memory, trainer._forwards.memory)
        plan = describe_plan(
            dataclasses.replace(trainer.geometry, micro_batch_size=limits.rows),
            prompts,
            args.dataloader_drop_last,
            None if args.max_steps > 0 else args.num_train_epochs,
            micro_batch_tokens=limits.tokens,
            form=trainer._forwards.choice.described(trainer.model),
            precision=f"bfloat16 (TRL's default){slower}" if args.bf16 else None,
            ahead=described(trainer),
            longest=None if args.use_vllm or continuous else trainer.max_completion_length,
            half=(args.bf16 or args.fp16) and not args.bitwise_invariant,
            most_kept=most_kept(truncating_filters(trainer)) if args.replay.masks else None,
        )
        plan += "".join(f"\n  {work.what}: up to {work.limit} at a time" for work in halved if work.limit)
        logger.info(f"Plan (sizes over all processes unless they say otherwise)\n{plan}")
        return plan

    @contextlib.contextmanager
    def running(self, checkpoint: str | None) -> Iterator[None]:
        """Log the plan, record start and end of the run, and let signals stop it after a step."""
        plan = self.announce()
        end: dict[str, Any] = {"ended": "failed"}
        first = self.args.eval_on_start and checkpoint is None  # a resumed run made that evaluation when it began
        with self.watch.listening(), assigned(self.args, eval_on_start=first):
            if self.args.should_save:
                config = getattr(self.accelerator.unwrap_model(self.trainer.model), "config", None)
                about = {
                    "model_name": base_name(getattr(config, "_name_or_path", None)),
                    "environment": environment(),
                    "geometry": dataclasses.asdict(self.trainer.geometry),
                    "plan": plan,
                    **self.fingerprint,
                }
                self._log.begin(str(self.args.output_dir), checkpoint, self.resumed.global_step, about)
            try:
                yield
                end["ended"] = "interrupted" if self.watch.stopping else "finished"
                if not shards_parameters(self.accelerator):
                    model = self.accelerator.unwrap_model(self.trainer.model)
                    hashes = from_main_process(self.accelerator, lambda: state_hashes(model, optimizer=None))
                    lines = "\n".join(sorted(f"{name} {value}" for name, value in hashes.items()))
                    end["parameters_sha256"] = hashlib.sha256(lines.encode()).hexdigest()
            finally:
                self._log.end(self.trainer.state.global_step, end)

    def interrupted(self, path: Path, step: int) -> TrainingInterrupted:
        """The exception that ends the program after an interrupt; `path`: where the last checkpoint would be."""
        if not from_main_process(self.accelerator, path.is_dir):
            logger.info(f"Interrupted after step {step}; no checkpoint of it was written.")
            return TrainingInterrupted(None)
        logger.info(
            f"Interrupted after step {step}; {path} is written. To go on, run the same command with "
            f"--resume_from_checkpoint {path} (in a script: trainer.train(resume_from_checkpoint='{path}'))."
        )
        return TrainingInterrupted(str(path))

    # ---- Writing a checkpoint -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def saving_on_failure(self) -> Iterator[None]:
        """Write the checkpoint that is due where an evaluation fails on all processes; a resume evaluates first."""
        try:
            yield
        except Exception as error:
            together = self.accelerator.num_processes == 1 or isinstance(error, MemoryShortageError)
            if together and self.trainer.control.should_save:
                self.watch.evaluation_due = True
                self.trainer._save_checkpoint(self.trainer.model, None)
            raise

    @contextlib.contextmanager
    def writing(self, final: Path, state: TrainerState) -> Iterator[None]:
        """Let the Trainer write a checkpoint to `output_dir`; afterwards `final` is whole or absent."""
        run, folder, saves = final.parent, writing_folder(final.parent, self._writer), self.args.should_save
        written = folder / final.name
        run_state = None if self.args.save_only_model else RunState.of(self.trainer)
        # transformers lists states of a class after earlier ones, and knows no callbacks that came with a resume
        state.stateful_callbacks = callback_states([*self.trainer.callback_handler.callbacks, self.trainer.control])

        def explain(reason: str) -> str:
            if saves:
                shutil.rmtree(folder, ignore_errors=True)
            free = shutil.disk_usage(str(self.args.output_dir)).free / 2**20
            return (
                f"{final.name} could not be written to {run}, with {free:.0f} MiB free ({reason}). The older "
                "checkpoints are untouched. Where space is short, use save_total_limit, save_only_model or another "
                "output_dir."
            )

        # transformers looks for the best checkpoint in the folder it writes to, and this one does not hold it
        here, best = assigned(self, output_dir=str(folder)), assigned(state, best_global_step=None)
        with here, best, mock.patch.object(state, "save_to_json"), failing_together(explain):  # `_complete` saves it
            yield
        best_folder = run / f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}"
        if best_folder == final or best_folder.is_dir():
            state.best_model_checkpoint = str(best_folder)
        with failing_together(explain):
            complete = functools.partial(self._complete, written, state, run_state)
            without_long_waits(complete if saves else lambda: None)
            # on a local disk a node has a part of the checkpoint too; on a shared one the main process has all of it
            publishes = saves or (
                self.accelerator.is_local_main_process
                and written.is_dir()
                and not (written / TRAINER_STATE_NAME).exists()
            )
        with failing_together(explain):  # once all processes know whose folder it is, and that it is complete
            if publishes and (replaced := publish(written, final)) is not None:
                logger.warning(f"{final} was there already, from an earlier run of these steps; it is now {replaced}.")
        if publishes:
            shutil.rmtree(folder, ignore_errors=True)
        if saves:
            rotate(run, self.args.save_total_limit, final, state.best_model_checkpoint)

    def _complete(self, folder: Path, state: TrainerState, run_state: RunState | None) -> None:
        """Add the files that transformers does not write to a checkpoint, and list all of them."""
        # keys that a resume has read are texts, which cannot be sorted among numbers
        state.stateful_callbacks = json.loads(json.dumps(state.stateful_callbacks))
        state.save_to_json(str(folder / TRAINER_STATE_NAME))  # with the best checkpoint's final name
        (folder / FINGERPRINT).write_text(json.dumps(self.fingerprint, indent=1) + "\n")
        if not any((folder / name).exists() for name in ("config.json", "adapter_config.json")):
            # the engine wrote its shards of the weights alone
            model = self.accelerator.unwrap_model(self.trainer.model)
            adapter = getattr(model, "peft_config", None)
            configs: list[Any] = [model.config, getattr(model, "generation_config", None)]
            configs = configs if adapter is None else [adapter[model.active_adapter]]
            for part in filter(None, [*configs, self.trainer.processing_class]):
                part.save_pretrained(folder)
        if run_state is not None:
            run_state.save(folder)
        write_listing(folder, {"step": state.global_step, "processes": self.accelerator.num_processes})
