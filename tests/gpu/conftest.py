"""Which tests a part of measure.py runs, and a line of JSON for each that ended: none is lost with the process."""

import json
import os

from tests.support.gpu import part_of


def pytest_collection_modifyitems(items):
    part = os.environ.get("GRPO_EXT_GPU_PART")
    if part is not None:
        items[:] = [item for item in items if part_of(item.nodeid) == part]


def pytest_runtest_logreport(report):
    path = os.environ.get("GRPO_EXT_GPU_RESULTS")
    if path is None or (report.when != "call" and report.outcome == "passed"):
        return
    line = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2)}
    if report.outcome != "passed":
        line["reason"] = report.longrepr[2] if report.outcome == "skipped" else str(report.longrepr)[-2000:]
    with open(path, "a") as file:
        file.write(json.dumps(line | {"figures": dict(report.user_properties)}) + "\n")
