"""The worker of the tests' launches: that of `grpo-ext check`, for runs that also evaluate, or cut completions."""

import sys
from pathlib import Path
from typing import Any

from datasets import load_from_disk
from transformers import TrainerCallback

from grpo_ext.tools.check import worker
from grpo_ext.tools.check.runs import Run
from tests.support.cases import CaseRun
from tests.support.cuts import install


class _EvaluatingAtTheEnd(TrainerCallback):
    def __init__(self, trainer: Any, data_path: str) -> None:
        self.trainer, self.data_path = trainer, data_path

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self.trainer.evaluate(load_from_disk(self.data_path))


def build(run: Run, folder: Path, processes: int) -> Any:
    install(run.cuts if isinstance(run, CaseRun) else None)
    trainer = worker.build(run, folder, processes)
    if isinstance(run, CaseRun) and run.eval_path is not None:
        trainer.add_callback(_EvaluatingAtTheEnd(trainer, run.eval_path))
    return trainer


if __name__ == "__main__":
    worker.main(sys.argv[1:], build)
