"""Checkpoints, resume and interrupts: a run can stop anywhere and resume with the same result.

Differs from transformers: a checkpoint is complete or absent, is verified before it is read, and holds the rollout
batch in progress; signals end a run after its step. Called by the Trainer's events and the trainer's override points.
"""

import contextlib
import dataclasses
import functools
import math
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import trl
from filelock import FileLock
from torch.distributed.checkpoint.stateful import Stateful
from transformers import TrainerCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from ..algorithms.losses import StepCounts
from ..batching.plan_text import describe_plan
from ..batching.sizes import BatchGeometry
from ..errors import CheckpointError, MemoryShortageError
from ..forward.architecture import count
from ..precision.loss_scaler import LossScaler
from ..precision.non_finite import bad_weights, refuse_bad_weights
from ..rollouts.ahead import describe_lag
from ..rollouts.source import Rollouts
from ..runtime.attributes import temporarily_set
from ..runtime.collectives import from_main_process, raise_on_all
from ..runtime.determinism import environment
from ..runtime.messages import logger
from ..runtime.out_of_memory import device_kind
from ..settings import most_kept, named
from ..step.evaluation import PassAtK
from ..upstream.loading import refuse_other_engine
from ..upstream.model_card import base_name
from ..upstream.reference import MovedReference
from ..view import TrainerView
from . import checkpoint as folders
from .fingerprint import check_same_run, fingerprint_of, saved_identity
from .interrupts import InterruptWatch, interruption
from .log import RunLog
from .optimizer import RunOptimizer
from .record import Identity, differences
from .state import load_state, restore_callbacks, writing_checkpoint
from .trail import digests_of


class RunKeeper(TrainerCallback):
    """Begins, logs and ends the runs of a trainer, and writes their checkpoints."""

    def __init__(
        self, view: TrainerView, user_args: trl.GRPOConfig | None, rollouts: Rollouts, pass_at_k: PassAtK, log: RunLog
    ) -> None:
        self.view, self.user_args, self.rollouts, self.forwards = view, user_args, rollouts, rollouts.worker.forwards
        self.accelerator, self.args, self.limits = view.accelerator, view.args, rollouts.limits
        self.geometry: BatchGeometry = view.args.geometry
        self._losses: list[float] = []
        self.watch, self.optimizer = InterruptWatch(), RunOptimizer(view)
        self.checkpoint: str | None = None  # the one that the run resumes from; None for a new run
        self.resumed = TrainerState()  # the loop's state in the checkpoint
        self._stopped_early = False  # the run that is resumed
        self._components: dict[str, Stateful] = {
            "run": self,
            "rollouts": rollouts,
            "loop": view,
            "pass_at_k": pass_at_k,
            "reference": MovedReference(view),
            "interrupts": self.watch,
        }
        self._sizes: dict[str, Stateful] = {  # batch sizes that are known to fit into memory
            "micro_batches": self.limits,
            "scoring": self.forwards.memory,
            "generation": rollouts.memory,
        }
        self._states: dict[str, Any] = {}  # of components, read from a checkpoint, until the loop has begun
        self._owner = ""  # unique to a run: processes of a killed run may still be writing
        self.writing_to: str | None = None  # the folder in which a checkpoint is being written
        self._log = log
        self._noted: dict[str, float] = {}  # values of the step in progress
        self._bad_at_start: list[str] = []  # weights that are not finite on purpose: a bias of -inf bans a token
        self._lock: FileLock | None = None  # on the run's folder, on the main process

    @functools.cached_property
    def fingerprint(self) -> Identity:
        return fingerprint_of(self.view, self.geometry)

    def state_dict(self) -> dict[str, Any]:
        loop = self.view.state
        early = self.view.control.should_training_stop and loop.global_step < loop.max_steps
        return {"losses": list(self._losses), "stopped_early": early}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._losses = state["losses"]
        self._stopped_early = state["stopped_early"] and "stopped_early" not in self.args.may_change

    # ---- Events of the Trainer ------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Load the states of a checkpoint into the components, after the loop has set its sums to zero."""
        if state.global_step:
            logger.info(f"Resuming after step {state.global_step} of {state.max_steps}.")
        self._bad_at_start = bad_weights(self.view.policy)
        states, self._states = self._states, {}
        with folders.explaining_format(str(self.checkpoint)):
            for name in list(states):
                self._components[name].load_state_dict(states.pop(name))  # its memory is freed
        # the loop evaluates at once; `running` restores the setting
        self.args.eval_on_start |= self.watch.evaluation_due and self.view.eval_dataset is not None
        self.watch.evaluation_due = False
        if self.args.trail and not state.global_step:
            self._log.step(0, {}, self._weights())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.args.trail:
            every = state.logging_steps
            due = state.global_step >= state.max_steps or (every > 0 and state.global_step % every == 0)
            values, self._noted = self._noted, {}
            weights = self._weights() if due or self.args.bitwise_invariant else None
            self._log.step(state.global_step, values, weights)

    def _weights(self) -> dict[str, Any]:
        return digests_of(self.view.policy, self._log.writes_trail)

    def note_step(self, loss: float, values: Mapping[str, float], counts: StepCounts, run: int) -> None:
        """Note the loss of an optimizer step, its values, what they are divided by, and how many completions run."""
        self._losses.append(loss)
        totals = {name: getattr(counts, name) for name in ("completions", "tokens", "entropy_tokens", "items")}
        counted = {f"counts/{name}": total for name, total in totals.items() if total is not None}
        self._noted = {"loss": loss, **counted, "counts/run": run, **values}

    def note_norm(self, norm: Any, learning_rate: float) -> float | None:
        """Note the norm of a step's gradient before clipping for the trail, and return it; the host waits for it."""
        number = None if norm is None else float(norm)
        if self.args.trail:
            self._noted |= {"learning_rate": learning_rate} | ({} if number is None else {"grad_norm": number})
        return number

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs is not None:
            self._log.write(state.global_step, state.epoch, logs, self.accelerator.device)

    # ---- A run ----------------------------------------------------------------------------------------------------

    def begin(self, wanted: str | bool | None) -> str | None:
        """Lock a run's folder until `release_folder`; find, verify and read the checkpoint to resume, if any."""
        vars(self).pop("fingerprint", None)
        self.resumed, self._stopped_early = TrainerState(), False
        self.geometry, self._losses, self._states = self.args.geometry, [], {}
        self.view.callback_handler.callbacks.sort(key=lambda part: part is self.watch)  # it sees what the others decide
        output_dir = str(self.args.output_dir)

        def find() -> tuple[str | None, str | None]:
            run = folders.run_to_resume(wanted, output_dir)
            if run is not None:
                self._lock = folders.lock_to_resume(run)
            checkpoint = folders.find_checkpoint(wanted, run or output_dir)
            newest = run is not None and folders.checkpoints(run)[-1].samefile(checkpoint or run)
            return (str(run) if newest else None), checkpoint

        def take_new() -> str:
            self.release_folder()
            run, self._lock = folders.lock_new(output_dir)
            return str(run)

        continued, checkpoint = from_main_process(self.accelerator, find)
        if checkpoint is not None:
            logger.info(f"Resuming from {checkpoint}.")
            with folders.explaining_format(checkpoint):
                self._read(checkpoint)
        folder, self._owner = from_main_process(
            self.accelerator, lambda: (continued or take_new(), secrets.token_hex(4))
        )
        self.checkpoint = checkpoint
        for args in (self.args, self.user_args):  # a script saves to the `output_dir` of its arguments
            if args is not None and args.output_dir != folder:
                args.output_dir = folder
        if self.args.log_completions:  # TRL makes it in its constructor only
            make = functools.partial((Path(folder) / "completions").mkdir, parents=True, exist_ok=True)
            from_main_process(self.accelerator, make)
        return checkpoint

    def values_for(self, logs: Mapping[str, Any]) -> dict[str, float]:
        """Values to log too: the loss scale, and at the end of a run the mean of all its losses, summed exactly."""
        values: dict[str, float] = {}
        if "loss" in logs and isinstance(scaler := self.accelerator.scaler, LossScaler):
            values |= scaler.report()
        if self._losses and "train_loss" in logs:
            values["train_loss"] = math.fsum(self._losses) / len(self._losses)
        return values

    def release_folder(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _read(self, checkpoint: str) -> None:
        if self.args.ignore_data_skip:
            raise CheckpointError(
                f"ignore_data_skip=True would train again on prompts from before {checkpoint}; leave it out."
            )
        from_main_process(self.accelerator, lambda: refuse_other_engine(checkpoint, self.accelerator))
        listing, processes = folders.read_listing(Path(checkpoint)), self.accelerator.num_processes
        if listing is None:
            logger.warning(f"{checkpoint} has no checksums (another trainer's), so it is read without verification.")
        elif self.view.is_deepspeed_enabled and listing["processes"] != processes:
            raise CheckpointError(
                f"{checkpoint} was written by {listing['processes']} processes, and DeepSpeed needs as many to read "
                f"it; this run has {processes}. Start {listing['processes']}, or export the model and begin a new run."
            )
        if self.args.sync_ref_model and self.view.sharded:
            raise CheckpointError(
                f"{checkpoint} lacks the reference that sync_ref_model=True has moved: it is not saved under FSDP and "
                f"DeepSpeed. Begin a new run with the weights (grpo-ext export {checkpoint} NEW_FOLDER)."
            )
        allowed = self.args.may_change
        identity = from_main_process(self.accelerator, lambda: saved_identity(checkpoint))
        if "optimizer.class" not in identity:
            logger.warning(
                f"{checkpoint} does not name its optimizer (an earlier version, or another trainer, wrote it), so its "
                "state is loaded into this one without a comparison."
            )
        if "rollout_chunk_size" not in allowed and self.geometry.together:  # the configuration sets none
            size = identity["settings"].get("rollout_chunk_size")
            if size is not None and size % self.geometry.num_generations == 0:
                self.geometry = dataclasses.replace(self.geometry, rollout_chunk_size=size)
        self._same_run = functools.partial(check_same_run, checkpoint, identity, allowed=allowed)
        changes = self.compare()
        for part, old, new in differences(changes):
            logger.warning(f"{part} was {old} in {checkpoint} and is {new} now, as allowed.")
        if "global_batch_size" in changes:
            logger.warning("The count of steps continues, so some prompts of this epoch are skipped or repeated.")
        others = sorted(changes.keys() - {*named("keeps")})
        if (states := load_state(checkpoint)) is None:
            logger.warning(f"{checkpoint} holds no rollout batch, so completions are sampled again from here.")
        else:
            if states["conditions"] == self._conditions():
                for name, component in self._sizes.items():
                    component.load_state_dict(states["sizes"][name])
            if others:
                logger.warning(f"{', '.join(others)} changed, so the rollout batches of the checkpoint are not used.")
            self._states = {n: states[n] for n in self._components if n != "rollouts" or not others}
        self.resumed = TrainerState.load_from_json(str(Path(checkpoint) / TRAINER_STATE_NAME))
        saved: Any = self.resumed.stateful_callbacks
        restore_callbacks(self.view.callback_handler.callbacks, saved, checkpoint)

    def compare(self) -> Any:
        """The allowed changes since the checkpoint's run, as `changed` returns them; a CheckpointError for others."""
        return from_main_process(self.accelerator, lambda: self._same_run(self.fingerprint | self.optimizer.identity()))

    def has_steps_left(self) -> bool:
        """Whether an epoch is trained; says why none is."""
        if (reason := self._why_finished()) is not None:
            logger.info(reason)
            self.view.control.should_training_stop = True
        return not self.view.control.should_training_stop  # also where a callback stops the run in its first evaluation

    def refuse_bad_weights(self) -> None:
        refuse_bad_weights(self.view.policy, self._bad_at_start, self.view.state.global_step)

    def _why_finished(self) -> str | None:
        if self.view.state.global_step >= self.view.state.max_steps:
            return "The run is finished: nothing is left to train, and the weights are unchanged."
        if not self._stopped_early:
            return None
        return (
            f"The run was stopped early, after step {self.resumed.global_step} of {self.resumed.max_steps}. "
            "To continue, set allow_changed_on_resume=['stopped_early'] (as an option: --allow_changed_on_resume "
            "stopped_early), and remove or change the callback that stopped it."
        )

    def _conditions(self) -> str:
        """The device and the settings that decide, beside the model, which sizes fit into memory."""
        args = self.args
        sizes = (args.per_device_train_batch_size, args.micro_batch_tokens, args.gradient_checkpointing)
        return f"{device_kind(self.accelerator.device)}, {sizes}"

    def announce(self) -> str:
        view, args, limits = self.view, self.args, self.limits
        slower = "; float32 is faster on a CPU: bf16=False" if self.accelerator.device.type == "cpu" else ""
        sampler = self.rollouts.sampler
        plan = describe_plan(
            dataclasses.replace(self.geometry, micro_batch_size=limits.rows),
            view.num_prompts,
            args.dataloader_drop_last,
            None if args.max_steps > 0 else args.num_train_epochs,
            micro_batch_tokens=limits.tokens,
            form=self.forwards.choice.described(view.model),
            precision=f"bfloat16 (TRL's default){slower}" if args.bf16 else None,
            ahead=describe_lag(view),
            longest=view.max_completion_length if sampler.steps else None,
            half=(args.bf16 or args.fp16) and not args.bitwise_invariant,
            most_kept=most_kept(sampler.filters) if args.replay.masks else None,
        )
        for work in (self.rollouts.memory, self.forwards.memory):
            if work.limit:
                plan += f"\n  {work.what}: up to {work.limit} at a time"
        logger.info(f"Plan (sizes over all processes unless they say otherwise)\n{plan}")
        return plan

    @contextlib.contextmanager
    def running(self, checkpoint: str | None) -> Iterator[None]:
        """Log the plan, record start and end of the run, and let signals stop it after a step."""
        plan = self.announce()
        end = {"ended": "failed"}
        evaluates = self.args.eval_on_start and checkpoint is None  # a resumed run made that evaluation when it began
        restored = {"eval_on_start": evaluates, "save_strategy": self.args.save_strategy}  # the watch changes the last
        with self.watch.listening(), temporarily_set(self.args, **restored):
            with raise_on_all("the start of the record"):
                if self.args.should_save:
                    self._begin_record(checkpoint, plan)
            try:
                yield
                end["ended"] = "interrupted" if self.watch.stopping else "finished"
            finally:
                self._log.end(self.view.state.global_step, end)
        if self.limits.failures:
            logger.info(self.limits.what_fits())
        if self.watch.stopping:
            raise interruption(self.view)

    def _begin_record(self, checkpoint: str | None, plan: str) -> None:
        about = {
            "model_name": base_name(getattr(getattr(self.view.policy, "config", None), "_name_or_path", None)),
            "environment": environment(),
            "geometry": dataclasses.asdict(self.geometry),
            "trained_parameters": sum(count(p) for p in self.view.policy.parameters() if p.requires_grad),
            "plan": plan,
            "trail": self.args.trail,
            **self.fingerprint,
        }
        self._log.begin(self.view.output_dir, checkpoint, self.resumed.global_step, about)
        if checkpoint is not None:
            folders.take_along(Path(checkpoint), self.view.output_dir, self.resumed)

    # ---- Writing a checkpoint -------------------------------------------------------------------------------------

    def has_saved(self, final: Path) -> bool:
        return bool(from_main_process(self.accelerator, (final / folders.LISTING).is_file))

    @contextlib.contextmanager
    def saving(self, final: Path) -> Iterator[None]:
        """The Trainer writes a checkpoint to `writing_to`; afterwards `final` is complete or absent."""
        self.refuse_bad_weights()
        states: dict[str, Any] | None = None
        if not self.args.save_only_model:
            states = {name: part.state_dict() for name, part in self._components.items()}
            states["sizes"] = {name: part.state_dict() for name, part in self._sizes.items()}
            states["conditions"] = self._conditions()
        fingerprint = self.fingerprint | self.optimizer.identity() if self.args.should_save else {}
        folder = folders.writing_folder(final.parent, self._owner)
        with (
            writing_checkpoint(self.view, folder, final, states, fingerprint),
            temporarily_set(self, writing_to=str(folder)),
        ):
            yield

    @contextlib.contextmanager
    def saving_on_failure(self, save: Callable[[], None]) -> Iterator[None]:
        """If an evaluation fails on all processes, `save` the checkpoint that is due; a resumed run evaluates first.

        Not where the evaluation decides on the best checkpoint, on an early stop, or on the learning rate.
        """
        try:
            yield
        except Exception as error:
            shortage = isinstance(error, MemoryShortageError) and not self.forwards.collective_forward
            together = self.accelerator.num_processes == 1 or shortage
            if together and self.view.control.should_save:
                self.refuse_bad_weights()  # which may be why
                if self.args.metric_for_best_model is None:
                    self.watch.evaluation_due = True
                    save()
            raise
