"""Run by test_interrupts.py: the last process is sent SIGTERM in the middle of the second step."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from tests.support.trainers import make, on


def stop_last(state: Any) -> None:
    if os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
        os.kill(os.getpid(), signal.SIGTERM)


def main(folder: Path) -> None:
    trainer = make(folder / "out", max_steps=4, callbacks=[on("on_pre_optimizer_step", stop_last, at=1)])
    try:
        trainer.train()
    except SystemExit as stopped:
        (folder / f"status_{trainer.accelerator.process_index}").write_text(str(stopped.code))
        raise
    print("after training")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
