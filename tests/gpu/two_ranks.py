"""Two processes on one GPU against one process: the same update, whatever the split.

Gloo carries the sums over the host's memory; NCCL refuses two processes on a device in most versions, and is asked
whether this one does. All train in float32 with SGD, so updates differ by the rounding of sums and by kernels that
a GPU chooses by shapes.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.support.gpu import TOY
from tests.support.launch import ROOT, environment
from tests.support.trainers import change, error, make

from .results import FAILED, reason_in, write

SETTINGS: dict[str, Any] = {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "bf16": False, "max_steps": 2}
AGREE, DIFFERENT = 1e-3, 1e-2  # between splits, as between micro-batches on a GPU; another seed
# by name: processes, backend, completions of a micro-batch, seed
SPLITS = {
    "one process": (1, "gloo", 8, 42),
    "another seed": (1, "gloo", 8, 43),
    "gloo, micro-batches of 8": (2, "gloo", 8, 42),
    "gloo, micro-batches of 3": (2, "gloo", 3, 42),
    "nccl": (2, "nccl", 8, 42),
}


def train(folder: Path, processes: int, backend: str, size: int, seed: int) -> None:
    """What each process runs."""
    engine = {"ddp_backend": backend} if processes > 1 else {}
    trainer = make(folder / "run", per_device_train_batch_size=size, seed=seed, use_cpu=TOY, **engine, **SETTINGS)
    update = change(trainer).cpu()
    if trainer.accelerator.is_main_process:
        torch.save(update, folder / "update.pt")


def updated(split: str, seconds: float) -> torch.Tensor | str:
    """The update of a split, or the last line of its error."""
    processes = SPLITS[split][0]
    with tempfile.TemporaryDirectory() as folder:
        if processes == 1:  # in this process, which saves the start of another
            train(Path(folder), *SPLITS[split])
            return torch.load(Path(folder, "update.pt"))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
        command += ["-m", "tests.gpu.two_ranks", folder, split]
        try:
            env = environment(PYTHONPATH=str(ROOT))
            done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            return f"it did not end in {seconds:.0f} s"
        if done.returncode == 0:
            return torch.load(Path(folder, "update.pt"))
        return reason_in(done.stderr.partition("ChildFailedError")[0]) or f"it ended with status {done.returncode}"


def main(file: Path, seconds: float) -> None:
    found: dict[str, Any] = {}  # updates, and errors of launches
    figures: dict[str, Any] = {}
    for split in SPLITS:
        if TOY and split == "nccl":
            figures[split] = "needs a GPU"
            continue
        found[split] = updated(split, seconds)
        this = found[split]
        figures[split] = this if isinstance(this, str) else error(found["one process"], this)
        write(file, {"figures": figures})
    write(file, {"figures": figures, **verdict(figures)})


def verdict(figures: dict[str, Any]) -> dict[str, str]:
    """A status and a reason where splits do not agree; NCCL may refuse."""
    wrong = [f"{split}: {figure}" for split, figure in figures.items() if not _as_expected(split, figure)]
    return {"status": FAILED, "reason": "; ".join(wrong)} if wrong else {}


def _as_expected(split: str, figure: float | str) -> bool:
    if isinstance(figure, str):
        return split == "nccl"
    return figure > DIFFERENT if split == "another seed" else figure <= AGREE


if __name__ == "__main__":
    if sys.argv[2] in SPLITS:
        train(Path(sys.argv[1]), *SPLITS[sys.argv[2]])
    else:
        main(Path(sys.argv[1]), float(sys.argv[2]))
