"""`ResumableTrainer`: TRL's GRPO trainer with runs that can stop anywhere and go on as if they had not.

Differs from TRL: a checkpoint is whole or absent, is verified before it is read, holds the rollout in progress, and is
refused by a run that means something else; signals end a run after its step. `GRPOTrainer` builds on it.
"""

from __future__ import annotations

import abc
import contextlib
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import trl
from accelerate.logging import get_logger
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from .batching.sizes import EpochLayout
from .errors import CheckpointError
from .run.checkpoint import (
    check_space,
    checkpoints,
    is_verified,
    newest_whole,
    no_space,
    processes_of,
    publish,
    remove_unfinished,
    rotate,
    set_aside_later,
    why_broken,
    write_listing,
    writing_folder,
)
from .run.fingerprint import (
    KEEPS_ROLLOUT,
    batch_advice,
    check_identity,
    identity_of,
    model_fingerprint,
    save_identity,
    tokenizer_fingerprint,
)
from .run.interrupts import InterruptWatch, TrainingInterrupted
from .run.log import RunLog
from .run.manifest import closing, opening, read_manifest, write_manifest
from .run.optimizer_settings import CHANGEABLE, settings_kept
from .run.output_folder import free_output_dir
from .run.recorded_completions import Samples
from .run.state import RestoreAtBegin, RunState, load_reference, save_reference
from .runtime.collectives import any_process, failing_together, from_main_process
from .runtime.determinism import pinned
from .runtime.out_of_memory import Halving, WindowLimits
from .sampling_trainer import SamplingTrainer

logger = get_logger(__name__)


class ResumableTrainer(SamplingTrainer):
    """See the module; the attributes are set by `GRPOTrainer` while it is built."""

    optimizer: Any
    train_dataset: Any
    _given_args: trl.GRPOConfig | None
    _limits: WindowLimits
    _scoring_memory: Halving

    def _begin_records(self) -> None:
        """What the rest of the class needs before TRL's constructor."""
        self._begin_sampling()
        self._losses: list[float] = []
        self._resumed: RunState | None = None
        self._identity_of_run: dict[str, Any] | None = None
        self._to_push = False
        self._changed: frozenset[str] = frozenset()  # settings that differ from the checkpoint, as allowed
        self._run_log = RunLog()

    def _watch_run(self) -> None:
        device = self.accelerator.device
        self._watch = InterruptWatch(lambda asked: any_process(asked, device), self._say)
        if not self._stock:
            self.add_callback(RestoreAtBegin(self._restore))
            self.add_callback(self._watch)

    def _say(self, sentence: str) -> None:
        if self.accelerator.is_main_process:
            print(sentence, flush=True)

    @property
    def _threads(self) -> int | None:
        return self.args.bitwise_threads if self.args.bitwise_invariant else None

    @abc.abstractmethod
    def _announce(self) -> None:
        """Say what is about to run."""

    @abc.abstractmethod
    def _record_samples(self) -> Samples | None:
        """What a checkpoint keeps to check an exported model with."""

    # ---- A run ----------------------------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Train; prints the plan once. Arguments and result are those of `transformers.Trainer.train`.

        `resume_from_checkpoint` may also be "latest", as True: the newest whole checkpoint of `output_dir`; or "auto":
        the same where there is one, and else a new run, so that one job script both begins and goes on. An
        `output_dir` that already holds checkpoints of another run is left alone: with a warning, this run writes
        beside it. `args.resume_from_checkpoint` is for scripts and not read here, as in transformers (a
        warning says so).

        Raises:
            CheckpointError: there is no whole checkpoint to resume from, or it belongs to another run.
            TrainingInterrupted: a `SystemExit` with status 75, after SIGTERM or Ctrl-C, with the checkpoint written.
        """
        if resume_from_checkpoint is None and (unread := self.args.resume_from_checkpoint) is not None:
            logger.warning(
                f"args.resume_from_checkpoint={unread!r} is not read by train(), as in transformers, and a new run "
                "begins; call trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)."
            )
        if self._stock:
            if not resume_from_checkpoint:
                self._write_beside_earlier_runs()
            self._announce()
            if self.args.should_save:
                folder = str(self.args.output_dir)
                start = get_last_checkpoint(folder) if resume_from_checkpoint is True else resume_from_checkpoint
                self._run_log.begin(folder, start or None)
            return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)
        checkpoint = self._checkpoint_to_resume(resume_from_checkpoint)
        self._rollout = self._rollout_name = self._identity_of_run = None
        self._losses = []
        self._changed = frozenset()
        self._resumed = None if checkpoint is None else self._read_state(checkpoint)
        self._prepare_output(checkpoint)
        self._announce()
        with pinned(self._threads), self._watch.listening(), self._recorded(checkpoint):
            result = super().train(checkpoint, trial, ignore_keys_for_eval)
        self._say_what_fits()
        if self._watch.stopping:
            raise self._interrupted()
        return result

    def _prepare_output(self, checkpoint: str | None) -> None:
        """Keep what other runs, and what later steps of this one, have saved."""
        if checkpoint is None or Path(checkpoint).resolve().parent != Path(str(self.args.output_dir)).resolve():
            self._write_beside_earlier_runs()
        elif self.args.should_save:
            later = set_aside_later(checkpoint)
            if later:
                names = ", ".join(path.name for path in later)
                logger.warning(f"Going on from {checkpoint}; the later checkpoints beside it are now {names}.")

    def _write_beside_earlier_runs(self) -> None:
        """Write to a free folder from now on, also where the script saves to the `output_dir` of its own arguments."""
        folder = free_output_dir(str(self.args.output_dir), self.accelerator.process_index)
        for args in (self.args, self._given_args):
            if args is not None and args.output_dir != folder:
                args.output_dir = folder
        if self.log_completions and self.accelerator.is_main_process:
            (Path(folder) / "completions").mkdir(parents=True, exist_ok=True)  # TRL makes it once, when it is built

    @contextlib.contextmanager
    def _recorded(self, checkpoint: str | None) -> Iterator[None]:
        """Keep the run's manifest."""
        if not self.args.should_save:
            yield
            return
        identity = self._current_identity()
        folder, device = str(self.args.output_dir), self.accelerator.device
        earlier = read_manifest(folder) if checkpoint is not None else []
        entry = opening(self.geometry, identity, device, checkpoint)
        write_manifest(folder, [*earlier, entry])
        self._run_log.begin(folder, checkpoint)
        try:
            yield
        except BaseException:
            with contextlib.suppress(OSError):  # the error is what matters; a full disk may be its reason
                write_manifest(folder, [*earlier, entry | closing(self.state.global_step, "failed", None)])
            raise
        whole = None if self._sharded else self.accelerator.unwrap_model(self.model)
        ended = "interrupted" if self._watch.stopping else "finished"
        optimizer = self.optimizer if self.args.bitwise_invariant else None
        write_manifest(folder, [*earlier, entry | closing(self.state.global_step, ended, whole, optimizer)])

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL's, and a line of the run's `log.jsonl`."""
        super().log(logs, start_time)
        state, weights = self.state, self.reward_weights.tolist()
        self._run_log.write(state.global_step, state.epoch, logs, self._logs, weights, self.accelerator.device)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """TRL's; the completions of training are told from those of the evaluation."""
        self._run_log.collect(self._logs, self.reward_weights.tolist())
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def _finalize_training(self, trial: Any, num_train_samples: int, start_time: float) -> Any:
        # at the end of an interrupted run the checkpoint to go on from is no leftover beside the best one
        limit = None if self._watch.stopping else self.args.save_total_limit
        with mock.patch.object(self.args, "save_total_limit", limit):
            return super()._finalize_training(trial, num_train_samples, start_time)

    def _say_what_fits(self) -> None:
        if self._limits.failures:
            tokens = "" if self._limits.tokens is None else f", micro_batch_tokens={self._limits.tokens}"
            self._say(
                f"Memory ran out {self._limits.failures} time(s). What fits here: per_device_train_batch_size="
                f"{self._limits.rows}{tokens}"
            )

    def _interrupted(self) -> TrainingInterrupted:
        path = self._final_folder(None)
        step = self.state.global_step
        if not from_main_process(self.accelerator, path.is_dir):
            self._say(f"Interrupted after step {step}; no checkpoint of it was written.")
            return TrainingInterrupted(None)
        self._say(
            f"Interrupted after step {step}; {path} is written. To go on, run the same command with "
            f"--resume_from_checkpoint {path} (in a script: trainer.train(resume_from_checkpoint='{path}'))."
        )
        return TrainingInterrupted(str(path))

    # ---- Reading a checkpoint -------------------------------------------------------------------------------------

    def _checkpoint_to_resume(self, wanted: str | bool | None) -> str | None:
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
                return wanted, why_broken(wanted), []
            newest, skipped = newest_whole(folder)
            if newest is None:
                return None, f"{folder} holds no whole checkpoint", skipped
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
        if self.is_deepspeed_enabled and there not in (None, self.accelerator.num_processes):
            raise CheckpointError(
                f"{path} was written by {there} processes, and DeepSpeed's shards are read by as many; this run has "
                f"{self.accelerator.num_processes}. Start {there}, or export the model and begin a new run with it."
            )
        if not is_verified(path):
            logger.warning(f"{path} has no checksums (another trainer wrote it), so it is read unverified.")
        return str(path)

    def _current_identity(self) -> dict[str, Any]:
        if self._identity_of_run is None:
            fingerprint = model_fingerprint(
                self.accelerator.unwrap_model(self.model),
                self.ref_model if self.ref_model is None else self.accelerator.unwrap_model(self.ref_model),
                whole=not self._sharded,
            )
            self._identity_of_run = identity_of(
                self.args,
                self.geometry,
                self.train_dataset,
                fingerprint,
                tokenizer_fingerprint(self._tokenizer),
                list(self.reward_func_names),
            )
        return self._identity_of_run

    def _read_state(self, checkpoint: str) -> RunState | None:
        def compare() -> tuple[dict[str, Any], str | None]:
            try:
                return check_identity(
                    checkpoint, self._current_identity(), self.args.allow_changed_on_resume or ()
                ), None
            except CheckpointError as error:
                return {}, str(error)

        allowed, refusal = from_main_process(self.accelerator, compare)  # one answer for all
        if refusal is not None:
            raise CheckpointError(refusal)
        for name, (old, new) in allowed.items():
            logger.warning(f"{name} was {old} when {checkpoint} was written and is {new} now, as allowed.")
        rate = allowed["learning_rate"][0] if "learning_rate" in allowed else self.args.learning_rate
        if advice := batch_advice(allowed, rate):
            logger.warning(f"{advice} {self._where_it_goes_on(checkpoint, allowed['global_batch_size'][0])}")
        self._changed = frozenset(allowed)
        self._refuse_changes_without_effect()
        state = RunState.load(checkpoint, self.num_generations)
        if state is None:
            logger.warning(f"{checkpoint} holds no rollout batch, so completions are sampled again from here.")
        elif others := sorted(allowed.keys() - KEEPS_ROLLOUT):
            logger.warning(f"{', '.join(others)} changed, so the rollout batch of the checkpoint is not used.")
            state.rollout = state.rollout_name = None
        if self.ref_model is not None:
            load_reference(self.accelerator.unwrap_model(self.ref_model), checkpoint)
        return state

    def _where_it_goes_on(self, checkpoint: str, old_batch: int) -> str:
        """What becomes of the data order when a run goes on with another global batch; steps are what a run counts.

        Raises:
            CheckpointError: no steps are left.
        """
        step = int(json.loads((Path(checkpoint) / "trainer_state.json").read_text())["global_step"])
        g, total = self.geometry, self.args.max_steps
        if total <= 0:
            layout = EpochLayout(g, len(self.train_dataset), self.args.dataloader_drop_last)
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
        kept = sorted(self._changed & CHANGEABLE.keys())
        if kept and self.is_deepspeed_enabled:
            raise CheckpointError(
                f"DeepSpeed reads {', '.join(kept)} from the checkpoint, so the change would have no effect; put it "
                "back, or export the model and begin a new run with it."
            )
        if "learning_rate" in kept and self.args.lr_scheduler_type == "reduce_lr_on_plateau":
            raise CheckpointError(
                "lr_scheduler_type='reduce_lr_on_plateau' goes on with the checkpoint's learning rate, so another "
                "learning_rate would have no effect; put it back, or export the model and begin a new run with it."
            )

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """transformers', which says where a resumed run goes on, and not which layout settings differ."""
        if self._stock:
            return super()._init_training_state(*args, **kwargs)
        with mock.patch("transformers.trainer.compare_trainer_and_checkpoint_args"):  # `_read_state` has compared
            place = super()._init_training_state(*args, **kwargs)
        if self.state.global_step:
            self._say(f"Going on after step {self.state.global_step} of {self.state.max_steps}.")
        return place

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """transformers', which would train one step more than `max_steps` where a run that is finished is resumed."""
        if not self._stock and self.state.global_step >= self.state.max_steps:
            self._say("The run is finished: nothing is left to train, and the weights stay as they are.")
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """transformers', after which settings of the optimizer that were changed on purpose hold again."""
        if self._stock or not self._changed & CHANGEABLE.keys():
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        with settings_kept(self.optimizer, self.lr_scheduler, self._changed):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _restore(self) -> None:
        state, self._resumed = self._resumed, None
        if state is None:
            return
        self._rollout, self._rollout_name, self._step = state.rollout, state.rollout_name, state.step
        self._metrics["train"].clear()
        self._metrics["train"].update(state.metrics)
        if state.loss:
            self._tr_loss = self._tr_loss + state.loss["since_log"]
            self._total_loss_scalar = state.loss["total"]
            self._initial_global_step, self._globalstep_last_logged = 0, int(state.loss["last_logged"])
            self._losses = list(state.losses)
        if state.entropy:
            self.entropy_coef = state.entropy["coefficient"]
            self._last_world_entropy = state.entropy["last"]
        if state.limits:
            self._limits.restore(state.limits["window"])
            self._scoring_memory.limit = state.limits["scoring"]
            self._sampling_memory.limit = state.limits["generation"]

    # ---- Writing a checkpoint -------------------------------------------------------------------------------------

    def _run_state(self) -> RunState:
        entropy = (
            {"coefficient": self.entropy_coef, "last": self._last_world_entropy} if self.use_adaptive_entropy else {}
        )
        return RunState(
            self._rollout,
            self._rollout_name,
            self._step,
            {name: [float(v) for v in values] for name, values in self._metrics["train"].items()},
            {
                "since_log": float(self._tr_loss),
                "total": float(self._total_loss_scalar),
                "last_logged": float(self._globalstep_last_logged),
            },
            self._losses,
            entropy,
            {
                "window": self._limits.state(),
                "scoring": self._scoring_memory.limit,
                "generation": self._sampling_memory.limit,
            },
        )

    def _final_folder(self, trial: Any) -> Path:
        return Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """A checkpoint that is whole or absent: see engine.checkpoint."""
        if self._stock:
            super()._save_checkpoint(model, trial)
            return
        final = self._final_folder(trial)
        run = final.parent
        writing = writing_folder(run)
        saves = self.args.should_save
        needed = self._checkpoint_bytes()

        def explain(reason: str) -> str:
            if saves:
                remove_unfinished(run)
            free = shutil.disk_usage(run).free
            if free < needed:
                return no_space(run, needed, free)
            return f"{final.name} could not be written to {run} ({reason}). The older checkpoints are untouched."

        with failing_together(explain):
            if saves:
                run.mkdir(parents=True, exist_ok=True)
                remove_unfinished(run)
                check_space(run, needed)
        self._to_push = False
        samples = self._record_samples()
        best = self.state.best_global_step
        with (
            failing_together(explain),
            mock.patch.object(self, "_get_output_dir", return_value=str(writing)),
            mock.patch.object(self.state, "best_global_step", None),  # or it looks for the best one where it writes
        ):
            super()._save_checkpoint(model, trial)
        if best:
            folder = run / f"{PREFIX_CHECKPOINT_DIR}-{best}"
            if folder == final or folder.is_dir():
                self.state.best_model_checkpoint = str(folder)
        with failing_together(explain):
            if saves:
                self._save_own_state(writing / final.name)
                if samples is not None:
                    samples.save(writing / final.name)
        with failing_together(explain):
            self._publish(writing / final.name, final)
        if self._to_push:
            super()._push_from_checkpoint(str(final))
        if saves:
            rotate(run, self.args.save_total_limit, final, self.state.best_model_checkpoint)

    def _save_own_state(self, folder: Path) -> None:
        self.state.save_to_json(str(folder / "trainer_state.json"))  # with the best checkpoint's final name
        save_identity(self._current_identity(), folder)
        model = self.accelerator.unwrap_model(self.model)
        if not any((folder / name).exists() for name in ("config.json", "adapter_config.json")):
            adapter = getattr(model, "peft_config", None)
            parts: list[Any] = [model.config, getattr(model, "generation_config", None)]
            parts = parts if adapter is None else [adapter[model.active_adapter]]
            for part in filter(
                None, [*parts, self.processing_class]
            ):  # the engine wrote its shards of the weights alone
                part.save_pretrained(folder)
        if self.args.save_only_model:
            return
        self._run_state().save(folder)
        if self.ref_model is not None and self.args.sync_ref_model and not self._sharded:
            save_reference(self.accelerator.unwrap_model(self.ref_model), folder)

    def _publish(self, written: Path, final: Path) -> None:
        """List what all processes wrote into a folder, and give it its name."""
        if not self.args.should_save:
            if not self.accelerator.is_local_main_process:
                return
            # on a disk of its own a node has a part of the checkpoint too; on a shared one the folder is not its own
            if written.is_dir() and not (written / "trainer_state.json").exists():
                publish(written, final)
                remove_unfinished(final.parent)
            return
        write_listing(written, {"step": self.state.global_step, "processes": self.accelerator.num_processes})
        kept = publish(written, final)
        if kept is not None:
            logger.warning(f"{final} was there already, from an earlier run of these steps; it is now {kept}.")
        remove_unfinished(final.parent)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._stock:
            super()._push_from_checkpoint(checkpoint_folder)
        self._to_push = True  # under the name it will have

    def _checkpoint_bytes(self) -> int:
        """What a checkpoint takes, estimated: the saved weights, the optimizer's tensors, the rollout batch."""
        model = self.accelerator.unwrap_model(self.model)
        adapter = hasattr(model, "peft_config")
        weights = sum(p.nbytes for p in model.parameters() if p.requires_grad or not adapter)
        if self.args.save_only_model:
            return weights
        states = self.optimizer.state.values() if self.optimizer is not None else ()
        state = sum(v.nbytes for values in states for v in values.values() if isinstance(v, torch.Tensor))
        rollout = sum(row.nbytes for rows in (self._rollout.fields if self._rollout else {}).values() for row in rows)
        return weights + state + rollout + 2**20
