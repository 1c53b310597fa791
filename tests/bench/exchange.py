"""What a rollout batch takes between processes: seconds, memory and bytes of join, selection and collation.

    torchrun --standalone --nproc_per_node 2 -m tests.bench.exchange [completions] [tokens] [kept ids of a token]

Completions (256 of 2,048 tokens, 8 for each prompt, without replay) are given, with log-probabilities, and no forward
runs. Prints the medians of ROUNDS rollout batches after a first one, on the main process.
"""

import functools
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState

from grpo_ext.forward.columns import KEPT_COUNTS, KEPT_IDS, SAMPLER_LOGPS
from grpo_ext.forward.runner import ForwardRunner
from grpo_ext.rollouts.batch import RolloutBatch
from grpo_ext.step import optimizer_step
from tests.support.rollouts import give_completions
from tests.support.tiny import prompts, tiny_model
from tests.support.trainers import make

ROUNDS = 5
_MIB = 2**20


class Watch:
    """Seconds, the highest growth of the resident memory, and the bytes that collectives are given, inside calls."""

    def __init__(self) -> None:
        self.rounds: list[dict[str, float]] = []
        self._inside = False

    def begin(self) -> None:
        self.rounds.append({})

    def around(self, owner: Any, name: str, label: str) -> None:
        inner = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            before, peak, done = _resident(), [0], threading.Event()

            def look() -> None:
                while not done.wait(0.001):
                    peak[0] = max(peak[0], _resident() - before)

            looking = threading.Thread(target=look)
            looking.start()
            start, self._inside = time.perf_counter(), True
            try:
                return inner(*args, **kwargs)
            finally:
                seconds, self._inside = time.perf_counter() - start, False
                done.set()
                looking.join()
                self.add(f"{label} s", seconds)
                known = self.rounds[-1].get(f"{label} MiB", 0.0) if self.rounds else 0.0
                if self.rounds:
                    self.rounds[-1][f"{label} MiB"] = max(known, peak[0] / _MIB)

        setattr(owner, name, watched)

    def count_bytes(self, name: str) -> None:
        module: Any = dist.distributed_c10d
        inner: Callable[..., Any] = getattr(module, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            tensors = [value for value in args if isinstance(value, torch.Tensor)]
            if self._inside and tensors:
                self.add("sent MiB", tensors[-1].nbytes / _MIB)
            return inner(*args, **kwargs)

        for owner in (module, dist):
            setattr(owner, name, counted)

    def add(self, label: str, value: float) -> None:
        if self.rounds:
            self.rounds[-1][label] = self.rounds[-1].get(label, 0.0) + value


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def scored(self: Any, model: Any, rows: Any, *args: Any) -> tuple[torch.Tensor, None]:
    return torch.rand(sum(rows.completions_B)), None


def recorded(place: int, tokens: int, kept: int) -> dict[str, torch.Tensor]:
    """Columns of a completion whose tokens were sampled from so many ids each, on average."""
    if not kept:
        return {}
    counts = torch.randint(1, 2 * kept, (tokens,), dtype=torch.int32, generator=torch.Generator().manual_seed(place))
    return {
        SAMPLER_LOGPS: -torch.rand(tokens),
        KEPT_COUNTS: counts,
        KEPT_IDS: torch.arange(int(counts.sum())).int() % 20,
    }


def main(completions: int = 256, tokens: int = 2048, kept: int = 0) -> None:
    PartialState()
    watch, generator = Watch(), torch.Generator().manual_seed(0)
    for name in ("all_gather", "all_gather_into_tensor", "gather"):
        watch.count_bytes(name)
    settings = {"global_batch_size": completions, "num_generations": 8, "per_device_train_batch_size": 8}
    settings |= {"max_steps": ROUNDS + 1, "num_iterations": 1, "rollout_lag": 0, "max_completion_length": tokens}
    settings |= {"beta": 0.1, "learning_rate": 1e-9, "save_strategy": "no", "trail": False}
    settings |= {"sampling_mask": "replay", "top_k": 2 * kept} if kept else {}
    with tempfile.TemporaryDirectory() as folder:
        settings["train_dataset"] = prompts(completions // 8 * (ROUNDS + 1))
        trainer = make(
            folder,
            tiny_model(max_position_embeddings=2 * tokens),
            lambda completions, **_: [float(hash(c) % 7) for c in completions],
            **settings,
        )
        rows = torch.randint(5, 24, (completions, tokens), generator=generator).tolist()
        give_completions(trainer, rows, functools.partial(recorded, tokens=tokens, kept=kept))
        ForwardRunner.rollout_log_probs = scored  # type: ignore[method-assign,assignment]
        trainer._loss_of = lambda model, micro_batch: micro_batch.add_loss(
            0.0 * sum(p.sum() for p in model.parameters())
        )
        make_batch = trainer._rollouts.make

        def begun(*args: Any, **kwargs: Any) -> Any:
            watch.begin()
            return make_batch(*args, **kwargs)

        trainer._rollouts.make = begun
        watch.around(trainer._rollouts, "join", "join")
        watch.around(RolloutBatch, "select", "select")
        watch.around(RolloutBatch, "token_rows", "token rows")
        watch.around(optimizer_step, "loss_columns", "loss columns")
        trainer.train()
    if PartialState().is_main_process:
        labels = {label: None for part in watch.rounds[1:] for label in part}
        print(
            json.dumps(
                {label: round(statistics.median(part[label] for part in watch.rounds[1:]), 4) for label in labels}
            )
        )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
