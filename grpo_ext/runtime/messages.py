"""The console of the logger "grpo_ext": what the package logs is shown without any logging configuration.

Differs from a bare logger, which shows only warnings. `logging.getLogger("grpo_ext").setLevel(logging.WARNING)`
silences the plan of a run and its other messages.
"""

import logging
import sys
from contextlib import suppress

from accelerate.logging import get_logger
from tqdm.auto import tqdm

logger = get_logger("grpo_ext")  # on the main process


class ConsoleHandler(logging.Handler):
    """Writes plain lines above a progress bar: warnings to standard error, other messages to standard output."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write nothing if the program has configured handlers of its own, which get the message too."""
        stream = sys.stderr if record.levelno >= logging.WARNING else sys.stdout
        if logging.root.handlers or stream is None:  # a program without a console
            return
        with suppress(OSError, ValueError, RuntimeError):  # it is gone or closed, or a signal came in mid-line
            # Accelerate's loggers name the process, even the one that usually logs
            tqdm.write(self.format(record).removeprefix("[RANK 0] "), file=stream)
            stream.flush()


def show_messages() -> None:
    """Show messages of this package from INFO on; a level or a handler that "grpo_ext" has is left as it is."""
    package = logger.logger
    if package.level == logging.NOTSET:
        package.setLevel(logging.INFO)
    if not package.handlers:
        package.addHandler(ConsoleHandler())
