"""Plants the faults of faults.py one at a time in a copy of this repository, and runs the tests that have to fail then.

python -m tests.support.faults         all of them; half a minute each
python -m tests.support.faults 3 7     some, by their numbers

Prints "caught" or "MISSED" for each. Exit status 1 where one was missed, or where its text does not occur once.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.support.faults import FAULTS, Fault
from tests.support.run_faults import RUN_FAULTS

ROOT = Path(__file__).parents[2]
ALL = [*FAULTS, *RUN_FAULTS]
FAILED = 1  # pytest's exit status where tests ran and failed


def copy_of_repository(folder: Path) -> None:
    """Copy the files that git knows, and new ones that it does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    )
    for name in listed.stdout.decode().splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def verdict(fault: Fault, folder: Path) -> str:
    """What comes of the fault's tests in a copy of the repository, which is left as it was."""
    path = folder / "grpo_ext" / fault.path
    text = path.read_text()
    if text.count(fault.before) != 1:
        return f"MISSED: the text occurs {text.count(fault.before)} times"
    path.write_text(text.replace(fault.before, fault.after))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "--show-capture=no", *shlex.split(fault.tests)]
    env = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    path.write_text(text)
    if done.returncode == FAILED:
        return "caught"
    last = (done.stdout.strip().splitlines() or [done.stderr.strip()[-200:]])[-1]
    return f"MISSED: pytest ended with status {done.returncode} ({last})"


def main(arguments: Sequence[str]) -> int:
    """Plant faults by their numbers, or all of them; returns the exit status."""
    numbers = [int(argument) for argument in arguments] or range(len(ALL))
    missed = 0
    with tempfile.TemporaryDirectory() as name:
        copy_of_repository(Path(name))
        for number in numbers:
            fault = ALL[number]
            found = verdict(fault, Path(name))
            missed += found != "caught"
            print(f"{number:3} {fault.path}: {fault.before.strip()[:60]!r}: {found}", flush=True)
    print(f"{len(numbers) - missed} of {len(numbers)} faults were caught.")
    return int(bool(missed))
