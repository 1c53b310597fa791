"""A part that is a script of tests/gpu: it runs in a process of its own, and writes what it measures as it comes.

    python -m tests.gpu.NAME FILE SECONDS TOY

The script writes its part of the result to FILE, whole each time (`results.write`): figures, and a status with a reason
where it did not run.
"""

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .processes import watched
from .results import DONE, FAILED, LATE, RUNNING, TAIL, read_part, reason_in


def run_script(name: str, is_toy: bool, seconds: float, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """What the script wrote, also where it ended early or in an error; `save` takes it while the script runs."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as errors:
        file = Path(folder, "part.json")

        def save_written() -> None:
            # a failure has its reason by now, and the script may go on
            save({"figures": {}, "status": RUNNING} | read_part(file))

        names = os.environ | {"GRPO_EXT_TOY": str(int(is_toy))}
        status = watched(command(name, file, seconds, is_toy), names, seconds, errors, save_written)
        written = read_part(file)
        errors.seek(0)
        text = errors.read()
    result: dict[str, Any] = {"status": DONE, "figures": {}} | written
    if status == 0:
        return result
    if status is None:
        reason = f"the script {name} did not end in {seconds:.0f} s"
    else:
        reason = reason_in(text) or f"it ended with status {status}"
        result["errors"] = result.get("errors", {}) | {name: text[-TAIL:]}
    # a failure that the script wrote says more than the time
    failed = status is not None or result["status"] == FAILED
    reasons = [result["reason"], reason] if "reason" in result else [reason]
    return result | {"status": FAILED if failed else LATE, "reason": "; ".join(reasons)}


def command(name: str, file: Path, seconds: float, is_toy: bool) -> list[str]:
    return [sys.executable, "-m", f"tests.gpu.{name}", str(file), str(seconds), str(int(is_toy))]
