"""`make test-gpu`: parts of tests and measurements on one GPU, without a network; one file of JSON.

    python -m tests.gpu.measure --parts tests,profile

A part has its share of the time, and what it leaves goes to those after it. The file is written whole after each run
and while tests and scripts run, so that a measurement that is cut short has said what it found. Differs from `make
bench`: bfloat16 autocast, one trainer on the device at a time. `--toy` rehearses all of it at toy size on the CPU.
"""

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from grpo_ext.run.log import versions
from tests.bench.measuring import machine

from .parts import MINUTES, SETS, Part, chosen
from .processes import exit_when_terminated
from .pytests import run_tests
from .results import DONE, FAILED, FORMAT, RUNNING, UNFINISHED, WAITING, compare, problems, write
from .scripts import run_script
from .steps import run_steps, say, toy


def one_device() -> None:
    """Leave the first of the visible devices: a trainer would use all of them."""
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]


def device_mib() -> float | None:
    """The memory of the GPU; None without one."""
    return torch.cuda.get_device_properties(0).total_memory / 2**20 if torch.cuda.is_available() else None


def run_part(part: Part, is_toy: bool, seconds: float, save: Callable[[dict[str, Any]], None]) -> None:
    """Run a part within these seconds; `save` takes what it has come to, also on the way."""
    if part.runs:
        runs = list(map(toy, part.runs)) if is_toy else list(part.runs)
        run_steps(runs, part.ratios, None if is_toy else device_mib(), seconds, save)
    elif part.script is not None:
        save(run_script(part.script, is_toy, seconds, save))
    else:
        save(run_tests(part.name, is_toy, seconds, save))


def started(part: Part) -> dict[str, Any]:
    """A part before it has measured anything."""
    if part.runs:
        return {"status": RUNNING, "runs": {run.name: {"status": WAITING} for run in part.runs}}
    return {"status": RUNNING, "figures": {}}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="toy sizes on the CPU")
    parser.add_argument("--seconds", type=float, default=60 * MINUTES, help="budget of all parts together")
    sets = "; ".join(f"{name}: {', '.join(part.name for part in parts)}" for name, parts in SETS.items())
    parser.add_argument("--parts", type=chosen, default="tests", metavar="A,B", help=f"parts, or sets of them ({sets})")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path(os.environ.get("OUT", "."), "gpu.json"),
        help="the file (default: gpu.json in $OUT)",
    )
    parser.add_argument("--compare", type=Path, metavar="JSON", help="an earlier result, to compare this one with")
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    if options.toy:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    else:
        one_device()
    if not options.toy and not torch.cuda.is_available():
        parser.error("there is no CUDA device; --toy rehearses on the CPU")
    return options


def main() -> int:
    options = arguments()
    exit_when_terminated()
    earlier = None if options.compare is None else json.loads(options.compare.read_text())
    start = time.monotonic()
    about = {"format": FORMAT, "toy": options.toy, "machine": machine() | {"gpu_mib": device_mib()}}
    parts: dict[str, dict[str, Any]] = {
        part.name: {"status": WAITING, "share": part.share, "seconds": 0.0} for part in options.parts
    }
    result: dict[str, Any] = {**about, "versions": versions(), "parts": parts}
    for number, part in enumerate(options.parts):
        left, begin = start + options.seconds - time.monotonic(), time.monotonic()
        seconds = max(left * part.share / sum(after.share for after in options.parts[number:]), 0.1)

        def save(outcome: dict[str, Any], name: str = part.name, share: float = seconds, begin: float = begin) -> None:
            parts[name] = outcome | {"share": share, "seconds": time.monotonic() - begin}
            write(options.output, result | {"seconds": time.monotonic() - start})

        save(started(part))
        say(f"{part.name}: up to {seconds:.0f} s")
        try:
            run_part(part, options.toy, seconds, save)
        except Exception as error:  # the parts after it do not depend on it
            traceback.print_exc()
            save({**parts[part.name], "status": FAILED, "reason": f"{type(error).__name__}: {error}"})
        say(f"{part.name}: {parts[part.name]['status']}")
    for line in compare(earlier, result) if earlier is not None else ():
        say(line)
    for problem in problems(json.loads(options.output.read_text())):
        say(f"warning: {problem}")
    others = [f"{name} ({part['status']})" for name, part in parts.items() if part["status"] != DONE]
    say(f"not done: {', '.join(others) or 'nothing'}; see {options.output}")
    return int(any(part["status"] in UNFINISHED for part in parts.values()))


if __name__ == "__main__":
    sys.exit(main())
