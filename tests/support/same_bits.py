"""Compares the bits of small runs between two commits, for a change of structure that may change no result.

python -m tests.support.same_bits write bits.json      on the commit before (about two minutes)
python -m tests.support.same_bits compare bits.json    on the commit after; exit status 1 where a run differs

The runs are the cases of the matrix (losses, forms, lag, LoRA, masks, experts, images, evaluation, half precision) in
one process, some of them on two processes, and some in bitwise mode. Of each run the trained parameters and the log
lines are hashed, without times and rates. The control is a run with another seed.
"""

import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from grpo_ext.tools.check.runs import Run
from tests.support.cases import CASES, Bench
from tests.support.launches import Trained, train

ON_TWO = ("grpo", "kl", "moe", "padded", "prefix", "cut_dynamic", "ahead_gspo", "images", "kl_bf16", "replayed")
BITWISE = ("grpo", "kl_lora", "dapo", "evaluation", "ahead_gspo")
UNSTEADY = ("time/", "per_second", "runtime", "step_time", "wait_")


def runs(bench: Bench) -> dict[int, list[Run]]:
    """The runs by their number of processes."""
    one = [bench.run(name, 5) for name in CASES]
    one += [bench.run(name, 3, name=f"bitwise-{name}", bitwise_invariant=True) for name in BITWISE]
    one += [bench.run("grpo", 5, name="another seed", seed=4)]
    return {1: one, 2: [bench.run(name, 5, name=f"2x{name}") for name in ON_TWO]}


def digest(result: Trained) -> str:
    """A hash of what a run learned and logged; the message of a run that ended with an error."""
    if result.error is not None:
        return result.error
    steady: list[dict[str, Any]] = [
        {key: value for key, value in line.items() if not any(part in key for part in UNSTEADY)} for line in result.log
    ]
    whole = hashlib.sha256(json.dumps(steady, sort_keys=True).encode())
    for name, change in sorted(result.delta.items()):
        whole.update(name.encode() + change.contiguous().numpy().tobytes())
    return whole.hexdigest()


def measured() -> dict[str, str]:
    """The digest of every run, by its name."""
    with tempfile.TemporaryDirectory() as folder:
        parts = runs(Bench(Path(folder)))
        return {result.name: digest(result) for n, some in parts.items() for result in train(some, n)}


def main() -> None:
    action, path = sys.argv[1], Path(sys.argv[2])
    now = measured()
    assert now["another seed"] != now["grpo-grpo_ext-5"], "two seeds have the same bits: the hash sees nothing"
    if action == "write":
        path.write_text(json.dumps(now, indent=1) + "\n")
        return
    before = json.loads(path.read_text())
    different = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    for name in different:
        print(f"{name}: {before.get(name)} before, {now.get(name)} now")
    print(f"{len(now) - len(different)} of {len(now)} runs have the same bits.")
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
