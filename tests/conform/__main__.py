"""Compares the update of GRPO trainers, from the same completions, with the exact one.

    python -m tests.conform [ADAPTER ...]

Without adapters all of tests/conform/adapters run, and docs/conform.md and its figure are written if none fails; with
adapters the table is printed. What the .txt file beside an adapter lists is installed into .conform/, no dependencies.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.bench.figures import write_conform_plot
from tests.conform.given import OBJECTIVES
from tests.conform.table import is_wrong, page, table
from tests.support.launch import environment

ROOT = Path(__file__).parents[2]
ADAPTERS = ROOT / "tests" / "conform" / "adapters"
INSTALLED, PAGE = ROOT / ".conform", ROOT / "docs" / "conform.md"
FIGURE = ROOT / "recipes" / "figures" / "conform.svg"
ALL = ("grpo_ext", "trl", "trl_rloo", "trl_async", "verl", "openrlhf", "slime", "unsloth")
NOT_RUN = (
    {"name": "TRL 1.15.0", "failed": "its log-probabilities are a Triton kernel without a CPU path"},
    {"name": "prime-rl", "failed": "`train` counts the tokens that its `compute_loss` divides by, and needs GPUs"},
)
PATIENCE_S = 900.0  # a launch that hangs ends then


def install(adapter: Path) -> str:
    """The path of what an adapter requires, by the .txt file beside it; empty without one."""
    requirements, folder = adapter.with_suffix(".txt"), INSTALLED / adapter.stem
    if not requirements.exists():
        return ""
    installed = folder / "requirements.txt"
    if not installed.exists() or installed.read_text() != requirements.read_text():
        print(f"Installing {requirements} ...", file=sys.stderr)
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--upgrade", "--target", str(folder)]
        subprocess.run([*command, "-r", str(requirements)], check=True)
        shutil.copy(requirements, installed)
    return str(folder)


def run(adapter: Path, processes: int, path: str, objectives: Sequence[str]) -> dict[str, Any]:
    """What a worker writes; its text if it ends with an error."""
    name = f"{adapter.stem}-{processes}"
    file, log = INSTALLED / f"{name}.json", INSTALLED / f"{name}.log"
    file.unlink(missing_ok=True)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command = [sys.executable, "-W", "ignore", *launch, "-m", "tests.conform.worker"]
    paths = os.pathsep.join(filter(None, [path, str(ROOT), os.environ.get("PYTHONPATH")]))
    env = environment(PYTHONPATH=paths, OMP_NUM_THREADS="1", TRL_EXPERIMENTAL_SILENCE="1")
    with log.open("w") as output:
        arguments = [*command, str(adapter), str(file), *objectives]
        process = subprocess.Popen(arguments, env=env, stdout=output, stderr=output, cwd=ROOT)
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.terminate()  # the launcher ends its workers
            process.wait()
            return {"name": adapter.stem, "failed": f"it did not end in {PATIENCE_S:.0f} s", "log": str(log)}
    if not file.exists():
        errors = re.findall(r"^(?:\[rank\d\]: )?(\w+Error: .*)", log.read_text(), re.MULTILINE)
        return {"name": adapter.stem, "failed": (errors or ["it ended without a result"])[0][:400], "log": str(log)}
    return dict(json.loads(file.read_text()))


def results(adapter: Path, objectives: Sequence[str] = ()) -> dict[str, Any]:
    """The cells of an adapter, of one process and of two."""
    INSTALLED.mkdir(exist_ok=True)
    try:
        path = install(adapter)
    except subprocess.CalledProcessError:
        return {"name": adapter.stem, "failed": f"{adapter.with_suffix('.txt')} could not be installed"}
    found = run(adapter, 1, path, objectives)
    if left := found.get("left"):
        more = run(adapter, 2, path, objectives)
        if not found["cells"] and "failed" in more:
            return more
        # the dtype of an objective's first cell is the adapter's own
        first = {cell["objective"]: cell["dtype"] for cell in reversed(found["cells"])}
        ended = {"failed": f"two processes: {more.get('failed')} ({more.get('log')})"}
        lost = [{"objective": name, "split": split, "dtype": first[name], **ended} for name in first for split in left]
        found["cells"] += more.get("cells", lost)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="make conform", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "adapters",
        nargs="*",
        type=lambda path: Path(path).resolve(),
        help="files of adapters; all that are known, if left out",
    )
    parser.add_argument(
        "--objective", action="append", default=[], choices=OBJECTIVES, help="one alone; may be repeated"
    )
    arguments = parser.parse_args()
    for adapter in arguments.adapters:
        if not adapter.is_file():
            parser.error(f"there is no file {adapter}")
    found = []
    for adapter in arguments.adapters or [ADAPTERS / f"{name}.py" for name in ALL]:
        print(f"{adapter.stem} ...", file=sys.stderr, flush=True)
        found.append(results(adapter, arguments.objective))
    failed = any("failed" in result or any(is_wrong(result, cell) for cell in result["cells"]) for result in found)
    if failed or arguments.adapters or arguments.objective:
        print(table(found))
        sys.exit(failed)
    else:
        found += NOT_RUN
        (INSTALLED / "results.json").write_text(json.dumps(found, indent=1))
        PAGE.write_text(page(PAGE.read_text(), found))
        write_conform_plot(found, FIGURE)
        print(f"Wrote {PAGE.relative_to(ROOT)} and {FIGURE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
