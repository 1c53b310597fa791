"""Processes of a measurement: none outlives it, so that none holds the GPU while the next part runs."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

POLL = 1.0  # seconds between two looks at what a process has written


def exit_when_terminated() -> None:
    """Let SIGTERM raise SystemExit, so that what `finally` and `with` hold ends with this process."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def watched(
    command: Sequence[str], env: Mapping[str, str], seconds: float, output: Any, look: Callable[[], None]
) -> int | None:
    """The status of a command, or None where it did not end in time; `look` is called while it runs."""
    end = time.monotonic() + seconds
    # a group of its own, so that processes which it started end with it
    process = subprocess.Popen(command, env=env, stdout=output, stderr=output, start_new_session=True)
    try:
        while (left := end - time.monotonic()) > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(min(left, POLL))
            look()
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):  # all have ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
