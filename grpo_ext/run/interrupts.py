"""Interrupts: SIGTERM and the first Ctrl-C end a run after the current step, with a complete checkpoint.

Differs from transformers, where they end the process at once, in the middle of its work. All processes stop after the
same step, once what is due after it is logged, evaluated and saved. A second Ctrl-C stops at once. Installed by the
trainer for the duration of a run.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from transformers import TrainerCallback, TrainerControl
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy

from ..runtime.collectives import any_process, from_main_process
from ..runtime.messages import logger
from ..view import TrainerView

EXIT_STATUS = 75  # EX_TEMPFAIL of sysexits.h: not done, worth another start


class TrainingInterrupted(SystemExit):
    """Raised at the end of `train()` after an interrupt; the checkpoint is written. Exit status 75."""

    def __init__(self, checkpoint: str | None) -> None:
        super().__init__(EXIT_STATUS)
        self.checkpoint = checkpoint


def interruption(view: TrainerView) -> TrainingInterrupted:
    """The end of a run that an interrupt stopped, with the checkpoint of its last step if there is one."""
    step = view.state.global_step
    path = view.output_dir / f"{PREFIX_CHECKPOINT_DIR}-{step}"
    if not from_main_process(view.accelerator, path.is_dir):
        logger.info(f"Interrupted after step {step}; no checkpoint was written.")
        return TrainingInterrupted(None)
    logger.info(
        f"Interrupted after step {step}; the checkpoint is {path}. To continue, run the same command with "
        f"--resume_from_checkpoint {path} (in a script: trainer.train(resume_from_checkpoint='{path}'))."
    )
    return TrainingInterrupted(str(path))


class InterruptWatch(TrainerCallback):
    """Listens for signals, and lets all processes stop together at the end of a step."""

    def __init__(self) -> None:
        self.saves = True  # a run goes on from the checkpoint; a rerun does not
        self.requested = False  # this process was asked to stop
        self.stopping = False  # one of the processes was; the run ends after this step
        self.evaluation_due = False  # an evaluation of the last step failed, and is left to the run that resumes
        self._ends_epoch = False  # the step after which the run stops is the last of its epoch

    def state_dict(self) -> dict[str, Any]:
        return {"evaluation_due": self.evaluation_due}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.evaluation_due = state["evaluation_due"]

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        if not any_process(self.requested):
            return
        self.stopping = True
        self._ends_epoch = control.should_training_stop or control.should_epoch_stop or float(state.epoch).is_integer()
        if args.save_strategy == SaveStrategy.BEST:  # an evaluation that is not the best would cancel the checkpoint
            args.save_strategy = SaveStrategy.STEPS
        control.should_save = self.saves and not self._ends_epoch
        control.should_training_stop |= not self.saves

    def on_epoch_end(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        """After a stop that ends an epoch, log and evaluate what is due there, and save."""
        if self.stopping:
            control.should_log &= self._ends_epoch
            control.should_evaluate &= self._ends_epoch
            control.should_save = self.saves and self._ends_epoch

    def on_save(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        """Stop once the checkpoint is complete, which therefore tells whether a callback has stopped the run."""
        control.should_training_stop |= self.stopping

    def _on_signal(self, number: int, frame: Any) -> None:
        if os.getpid() != self._process:  # a child that a reward function or a tool has forked
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if self.requested and number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            raise KeyboardInterrupt
        if self.requested:
            return
        self.requested = True
        with suppress(OSError, RuntimeError):  # the console may be gone, or in the middle of a line
            saved = ", with a checkpoint" if self.saves else ""
            logger.info(f"Stopping after this step{saved}. Ctrl-C again stops at once.")

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Only the main thread of a program can listen to signals."""
        self.requested = self.stopping = self.evaluation_due = False
        self._process = os.getpid()
        numbers = (signal.SIGTERM, signal.SIGINT) if threading.current_thread() is threading.main_thread() else ()
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
