"""The order of the tests, and what each came to: a run that is cut short has tested what finds most.

measure.py reads a line of JSON for each test that ended.
"""

import json
import os

# parts of names: kernels of attention, the sampler, a step in each form, the same bits, adapters, TF32; the compiler of
# flex attention takes minutes
FIRST = ("kernels_give", "sampled", "half_a_billion", "same_bits", "adapter", "tf32")
LAST = "flex"


def pytest_collection_modifyitems(items):
    def place(item):
        named = (number for number, part in enumerate(FIRST) if part in item.name)
        return (LAST in item.name, next(named, len(FIRST)))

    items.sort(key=place)


def pytest_runtest_logreport(report):
    path = os.environ.get("GRPO_EXT_GPU_RESULTS")
    if path is None or (report.when != "call" and report.outcome == "passed"):
        return
    line = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2)}
    if report.outcome != "passed":
        line["reason"] = report.longrepr[2] if report.outcome == "skipped" else str(report.longrepr)[-2000:]
    with open(path, "a") as file:
        file.write(json.dumps(line | {"figures": dict(report.user_properties)}) + "\n")
