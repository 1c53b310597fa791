"""Interrupts: SIGTERM and the first Ctrl-C end a run after the current step, with a complete checkpoint.

Differs from transformers, where they end the process at once, in the middle of its work. All processes stop after the
same step. A second Ctrl-C stops at once. Installed by the trainer for the duration of a run.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger
from transformers import TrainerCallback, TrainerControl
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..runtime.collectives import any_process, from_main_process
from ..view import TrainerView

logger = get_logger(__name__)

EXIT_STATUS = 75  # EX_TEMPFAIL of sysexits.h: not done, worth another start


class TrainingInterrupted(SystemExit):
    """Raised at the end of `train()` after an interrupt; the checkpoint is written. Exit status 75."""

    def __init__(self, checkpoint: str | None) -> None:
        super().__init__(EXIT_STATUS)
        self.checkpoint = checkpoint


def interruption(view: TrainerView) -> TrainingInterrupted:
    """The end of a run that an interrupt stopped, with the checkpoint of its last step if there is one."""
    step = view.state.global_step
    path = Path(str(view.args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{step}"
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
        self.requested = False  # this process was asked to stop
        self.stopping = False  # one of the processes was; the run ends after this step
        self.evaluation_due = False  # an evaluation of the last step is left to the run that resumes
        self.ends_anyway = False  # a callback stops the run at that step too
        self._ends_epoch = False  # the step at which the run stops is the last of its epoch

    def state_dict(self) -> dict[str, Any]:
        return {"evaluation_due": self.evaluation_due}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.evaluation_due = state["evaluation_due"]

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        if not any_process(self.requested):
            return
        self.stopping, self.ends_anyway = True, control.should_training_stop
        self._ends_epoch = control.should_training_stop or control.should_epoch_stop or float(state.epoch).is_integer()
        control.should_training_stop = True
        self._put_off_evaluation(control, saves=not self._ends_epoch)

    def on_epoch_end(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        """After a stop that ends an epoch, log what an epoch logs, and save. A stop in mid-epoch has saved already."""
        if self.stopping:
            control.should_log &= self._ends_epoch
            self._put_off_evaluation(control, saves=self._ends_epoch)

    def _put_off_evaluation(self, control: TrainerControl, saves: bool) -> None:
        """Save or not, and leave a due evaluation to the run that resumes: a launcher may kill this process first."""
        self.evaluation_due |= control.should_evaluate
        control.should_save, control.should_evaluate = saves, False

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
            logger.info("Stopping after this step, with a checkpoint. Ctrl-C again stops at once.")

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
