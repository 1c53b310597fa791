"""Two processes on one GPU against one process: the same update, whatever the split.

Gloo carries the sums over the host's memory; NCCL refuses two processes on a device in most versions, and is asked
whether this one does. All train in float32 with SGD, so updates differ by the rounding of sums and by kernels that
a GPU chooses by shapes. The processes are started without a launcher: torchrun puts them into sessions of their own,
where they would outlive the part and hold the GPU.
"""

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import torch

from tests.support.gpu import TOY
from tests.support.launch import ROOT, environment
from tests.support.trainers import change, error, make

from .results import TAIL, not_ended, of_failures, reason_in, write

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
RESERVE = 5.0  # seconds of the share that are left for the last figures
POLL = 0.1  # seconds between two looks at the processes


def train(folder: Path, processes: int, backend: str, size: int, seed: int) -> None:
    """What each process runs."""
    engine = {"ddp_backend": backend} if processes > 1 else {}
    trainer = make(folder / "run", per_device_train_batch_size=size, seed=seed, use_cpu=TOY, **engine, **SETTINGS)
    update = change(trainer).cpu()
    if trainer.accelerator.is_main_process:
        torch.save(update, folder / "update.pt")


def updated(split: str, seconds: float) -> tuple[torch.Tensor | str, str]:
    """The update of a split or why there is none, and the errors of its processes."""
    processes = SPLITS[split][0]
    with tempfile.TemporaryDirectory() as folder:
        if processes == 1:  # in this process, which saves the start of another
            train(Path(folder), *SPLITS[split])
            return torch.load(Path(folder, "update.pt")), ""
        failure = run_together([sys.executable, "-m", "tests.gpu.two_ranks", folder, split], processes, seconds)
        return (torch.load(Path(folder, "update.pt")), "") if failure is None else failure


def run_together(command: Sequence[str], processes: int, seconds: float) -> tuple[str, str] | None:
    """Run a command in each of several processes: why the first one failed and its errors, or None."""
    end = time.monotonic() + seconds
    with ExitStack() as stack:
        errors = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(processes)]
        started: list[subprocess.Popen[bytes]] = []
        try:
            for rank, names in enumerate(ranks(processes)):
                env = environment(PYTHONPATH=str(ROOT), **names)
                started.append(subprocess.Popen(command, env=env, cwd=ROOT, stdout=errors[rank], stderr=errors[rank]))
            first, late = _first_failure(started, end)
        finally:
            for process in started:
                process.kill()
                process.wait()
        if first is None and not late:
            return None
        texts = [_text(file) for file in errors]
        if first is None:
            return not_ended(seconds), "\n".join(text[-TAIL // processes :] for text in texts)
        return reason_in(texts[first]) or f"it ended with status {started[first].returncode}", texts[first]


def _first_failure(started: Sequence[subprocess.Popen[bytes]], end: float) -> tuple[int | None, bool]:
    """The process that failed first, and whether the time ended before all did."""
    while time.monotonic() < end:
        statuses = [process.poll() for process in started]
        failed = [rank for rank, status in enumerate(statuses) if status]
        if failed:
            return failed[0], False
        if None not in statuses:
            return None, False
        time.sleep(POLL)
    return None, True


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def ranks(processes: int) -> list[dict[str, str]]:
    """What a launcher says to each process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        {name: str(value) for name, value in {**shared, "RANK": rank, "LOCAL_RANK": rank}.items()}
        for rank in range(processes)
    ]


def main(file: Path, seconds: float) -> None:
    end = time.monotonic() + seconds - RESERVE
    found: dict[str, Any] = {}  # updates, and why there is none
    figures: dict[str, Any] = {}
    errors: dict[str, str] = {}
    for done, split in enumerate(SPLITS):
        if TOY and split == "nccl":
            figures[split] = "needs a GPU"
            continue
        found[split], text = updated(split, max(end - time.monotonic(), 1.0) / (len(SPLITS) - done))
        if text:
            errors[split] = text[-TAIL:]
        this, whole = found[split], found["one process"]
        figures[split] = this if isinstance(this, str) else error(whole, this)
        write(file, {"figures": figures, **({"errors": errors} if errors else {}), **verdict(figures)})


def verdict(figures: Mapping[str, Any]) -> dict[str, str]:
    """A status and a reason where splits do not agree; NCCL may refuse."""
    return of_failures({split: str(figure) for split, figure in figures.items() if not _as_expected(split, figure)})


def _as_expected(split: str, figure: float | str) -> bool:
    if isinstance(figure, str):
        return split == "nccl"
    return figure > DIFFERENT if split == "another seed" else figure <= AGREE


if __name__ == "__main__":
    if sys.argv[2] in SPLITS:
        train(Path(sys.argv[1]), *SPLITS[sys.argv[2]])
    else:
        main(Path(sys.argv[1]), float(sys.argv[2]))
