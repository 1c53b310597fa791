"""Run by test_newer_trl.py beside a copy of TRL with additions: `newer_trl.py FOLDER` writes what each leads to."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from grpo_ext import GRPOTrainer, compat
from tests.support.drop_in import conversations, tool_tokenizer
from tests.support.launch import leave
from tests.support.tool_runs import Game
from tests.support.trainers import change, make

ROWS = {"processing_class": tool_tokenizer(), "train_dataset": conversations()}


class PassesMask(GRPOTrainer):
    """A user's log-probabilities with TRL's new argument."""

    def _get_per_token_logps_and_entropies(self, model: Any, ids: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        return super()._get_per_token_logps_and_entropies(model, ids, mask, *args, **kwargs, added_mask=mask)


class HasColumn(GRPOTrainer):
    """A user's column of the name of TRL's new argument."""

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        scored = super()._generate_and_score_completions(inputs)
        return {**scored, "added_mask": scored["completion_mask"].clone()}

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        assert inputs["added_mask"].shape == inputs["completion_mask"].shape
        return super().compute_loss(model, inputs, *args, **kwargs)


def outcome(act: Callable[[], Any]) -> str:
    try:
        return str(act())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def trains(name: str, **settings: Any) -> bool:
    return bool(change(make(folder / name, max_steps=1, **settings)).any())


def head() -> Any:
    with mock.patch("importlib.util.find_spec"):  # Triton's, which this machine may lack
        return compat.triton_head()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    cases: dict[str, Callable[[], Any]] = {
        "argument": lambda: vars(make(folder / "argument", added="kept"))["added"],
        "default": lambda: trains("default", added="kept"),
        "setting": lambda: trains("setting", added_setting=2),
        "attribute": lambda: trains("attribute", reward=None, environment_factory=Game, **ROWS),
        "mask": lambda: trains("mask", cls=PassesMask),
        "column": lambda: trains("column", cls=HasColumn),
        "head": head,
    }
    outcomes = {name: outcome(act) for name, act in cases.items()}
    (folder / f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(outcomes))
    leave(folder)
