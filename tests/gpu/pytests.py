"""A part of tests/gpu's tests, in a process of its own: what they came to, also where it did not end in time."""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .processes import watched
from .results import DONE, FAILED, LATE, RUNNING


def run_tests(part: str, is_toy: bool, seconds: float, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """What the tests of a part came to; `save` takes those that have ended while the others run."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results")
        results.touch()
        names = {"GRPO_EXT_GPU_RESULTS": str(results), "GRPO_EXT_GPU_PART": part, "GRPO_EXT_TOY": str(int(is_toy))}
        command = [sys.executable, "-m", "pytest", "-q", "--durations=5", "-p", "no:cacheprovider", "tests/gpu"]

        def save_ended() -> None:
            save(ended(results.read_text()) | {"status": RUNNING})

        status = watched(command, os.environ | names, seconds, sys.stderr, save_ended)
        result = ended(results.read_text())
    if status is None:
        return result | {"status": LATE, "reason": "the tests did not end in time"}
    if result["failed"]:
        return result | {"status": FAILED, "reason": f"{len(result['failed'])} tests failed"}
    if status != 0:  # a crash, or a file that cannot be imported
        return result | {"status": FAILED, "reason": f"pytest ended with status {status}"}
    return result | {"status": DONE}


def ended(text: str) -> dict[str, Any]:
    """The tests that ended, from a line of JSON for each; a process that was killed may leave half a line."""
    whole = text[: text.rfind("\n") + 1]
    tests = [json.loads(line) for line in whole.splitlines()]
    named = {kind: {t["test"]: t["reason"] for t in tests if t["outcome"] == kind} for kind in ("failed", "skipped")}
    passed = [t for t in tests if t["outcome"] == "passed"]
    figures = {t["test"]: t["figures"] for t in passed if t["figures"]}
    return {"passed": len(passed), **named, "figures": figures}
