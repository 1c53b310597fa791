"""Run by test_failures.py on two processes: a run in which one of them fails, or both, and what each of them raises."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from grpo_ext import GRPOConfig, GRPOTrainer
from tests.support.tiny import config_kwargs, letter_reward, prompts, tiny_model, tiny_tokenizer

RANK = os.environ.get("RANK", "0")


def main(folder: Path, place: str, ranks: list[str]) -> None:
    """Fail in the second step, at a place, on the processes named; in the first rollout where that is the place."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of the launcher, when the first process has ended

    def fail(where: str, state: Any) -> None:
        if where == place and RANK in ranks and state.global_step == 1:
            raise KeyError("no score today")

    def reward(**kwargs: Any) -> list[float]:
        fail("reward", kwargs["trainer_state"])
        return letter_reward(**kwargs)

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:  # before the first forward is compared
        if RANK in ranks:
            raise KeyError("no score today")
        ids = trainer.processing_class(text=prompts)["input_ids"]
        return {"prompt_ids": ids, "completion_ids": [[5, 6, 7, 1]] * len(ids), "logprobs": None}

    class Trainer(GRPOTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            fail("loss", self.state)
            return super().compute_loss(*args, **kwargs)

    trainer = Trainer(
        tiny_model(),
        reward,
        GRPOConfig(**config_kwargs(folder / "run", max_steps=4, beta=0.1 if place == "rollout" else 0.0)),
        prompts(),
        processing_class=tiny_tokenizer(),
        rollout_func=rollout if place == "rollout" else None,
    )
    try:
        trainer.train()
    except Exception as error:
        (folder / f"{RANK}.json").write_text(json.dumps([type(error).__name__, str(error)]))
        raise


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3].split(","))
