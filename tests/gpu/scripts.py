"""A part that is a script of tests/gpu: it runs in a process of its own, and writes what it measures as it comes.

    python -m tests.gpu.NAME FILE SECONDS TOY

The script writes its part of the result to FILE, whole each time (`results.write`): figures, and a status with a reason
where it did not run.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from .results import DONE, FAILED, LATE, reason_in


def run_script(name: str, is_toy: bool, seconds: float) -> dict[str, Any]:
    """What the script wrote, also where it ended early or in an error."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as errors:
        file = Path(folder, "part.json")
        # a group of its own, so that processes which it started end with it
        names = os.environ | {"GRPO_EXT_TOY": str(int(is_toy))}
        called = command(name, file, seconds, is_toy)
        process = subprocess.Popen(called, env=names, stdout=errors, stderr=errors, start_new_session=True)
        try:
            status = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end_group(process)
        written = json.loads(file.read_text()) if file.exists() else {}
        errors.seek(0)
        reason = reason_in(errors.read())
    result = {"status": DONE, "figures": {}} | written
    if status is None:
        return result | {"status": LATE, "reason": f"the script {name} did not end in {seconds:.0f} s"}
    if status != 0:
        return result | {"status": FAILED, "reason": reason or f"it ended with status {status}"}
    return result


def command(name: str, file: Path, seconds: float, is_toy: bool) -> list[str]:
    return [sys.executable, "-m", f"tests.gpu.{name}", str(file), str(seconds), str(int(is_toy))]


def _end_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):  # all have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
