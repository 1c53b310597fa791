"""What each test came to, a line of JSON when it ends: a run that is cut short tells what it has (measure.py)."""

import json
import os


def pytest_runtest_logreport(report):
    path = os.environ.get("GRPO_EXT_GPU_RESULTS")
    if path is None or (report.when != "call" and report.outcome == "passed"):
        return
    line = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2)}
    if report.outcome != "passed":
        line["reason"] = report.longrepr[2] if report.outcome == "skipped" else str(report.longrepr)[-2000:]
    with open(path, "a") as file:
        file.write(json.dumps(line | {"figures": dict(report.user_properties)}) + "\n")
