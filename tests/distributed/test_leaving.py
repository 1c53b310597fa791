"""A process that talks through gloo waits a moment before its interpreter is torn down."""

import atexit
import sys
import time

import pytest
import torch.distributed as dist

from grpo_ext import GRPOConfig, GRPOTrainer
from grpo_ext.runtime.leaving import leave_in_order
from tests.support.tiny import letter_reward, prompts, tiny_model, tiny_tokenizer


@pytest.fixture
def forgotten():
    """As in a process that has not asked to wait."""
    leave_in_order.cache_clear()
    yield
    leave_in_order.cache_clear()


@pytest.mark.parametrize(("backend", "waits"), [("gloo", 1), ("nccl", 0), (None, 0)])
def test_a_process_with_gloo_waits_once_at_the_end(forgotten, monkeypatch, backend, waits):
    registered = []
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(dist, "is_initialized", lambda: backend is not None)
    monkeypatch.setattr(atexit, "register", lambda *call: registered.append(call))
    for _ in range(2):
        leave_in_order()
    sleeps = [call for call in registered if call[0] is time.sleep]
    assert len(sleeps) == waits
    assert all(seconds > 0 for _, seconds in sleeps)


def test_every_trainer_asks_for_it(forgotten, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(sys.modules[GRPOTrainer.__module__], "leave_in_order", lambda: asked.append(True))
    config = GRPOConfig(str(tmp_path), global_batch_size=8, report_to="none")
    for count in (1, 2):
        GRPOTrainer(tiny_model(), letter_reward, config, prompts(), processing_class=tiny_tokenizer())
        assert len(asked) == count
