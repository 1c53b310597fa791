"""A part of tests/gpu's tests, in a process of its own: what they came to, also where it did not end in time."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from .results import DONE, FAILED, LATE


def run_tests(part: str, is_toy: bool, seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results")
        results.touch()
        names = {"GRPO_EXT_GPU_RESULTS": str(results), "GRPO_EXT_GPU_PART": part, "GRPO_EXT_TOY": str(int(is_toy))}
        command = [sys.executable, "-m", "pytest", "-q", "--durations=5", "-p", "no:cacheprovider", "tests/gpu"]
        try:
            status = subprocess.run(command, env=os.environ | names, stdout=sys.stderr, timeout=seconds).returncode
        except subprocess.TimeoutExpired:
            status = None
        tests = [json.loads(line) for line in results.read_text().splitlines()]
    named = {kind: {t["test"]: t["reason"] for t in tests if t["outcome"] == kind} for kind in ("failed", "skipped")}
    passed = [t for t in tests if t["outcome"] == "passed"]
    figures = {t["test"]: t["figures"] for t in passed if t["figures"]}
    result = {"passed": len(passed), **named, "figures": figures}
    if status is None:
        return result | {"status": LATE, "reason": "the tests did not end in time"}
    if named["failed"]:
        return result | {"status": FAILED, "reason": f"{len(named['failed'])} tests failed"}
    if status != 0:  # a crash, or a file that cannot be imported
        return result | {"status": FAILED, "reason": f"pytest ended with status {status}"}
    return result | {"status": DONE}
