"""`routing_replay`: a token goes to the experts that it was sampled with, in every later forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from grpo_ext import GRPOTrainer
from grpo_ext.errors import ConfigError, ModelError
from tests.support.tiny import tiny_model
from tests.support.trainers import change, make
from tests.tolerances import DIFFERENT, METRIC, UPDATE

REPLAY = {"routing_replay": True}


def logged(folder: Any, **settings: Any) -> dict[str, Any]:
    trainer = make(folder, **{"model": tiny_model("moe"), "max_steps": 1, **settings})
    trainer.train()
    return trainer.state.log_history[0]


def test_nothing_changes_where_no_choice_does(tmp_path):
    logs = [logged(tmp_path / str(replay), routing_replay=replay) for replay in (True, False)]
    assert logs[0]["routing/changed_share"] == 0.0
    assert "routing/changed_share" not in logs[1]
    print(logs)
