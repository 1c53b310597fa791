"""A process that talks through gloo waits a moment before its interpreter is torn down."""

import atexit
import time

import pytest
import torch.distributed as dist

from grpo_ext import GRPOConfig, GRPOTrainer
from grpo_ext.runtime.collectives import leave_in_order
from tests.support.tiny import letter_reward, prompts, tiny_model, tiny_tokenizer


@pytest.mark.parametrize(("backend", "waits"), [("gloo", 1), ("nccl", 0), (None, 0)])
def test_every_trainer_with_gloo_waits_once_at_the_end(tmp_path, monkeypatch, backend, waits):
    registered = []
    leave_in_order.cache_clear()
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    config = GRPOConfig(str(tmp_path), global_batch_size=8, report_to="none")
    with monkeypatch.context() as patch:
        patch.setattr(atexit, "register", lambda *call: registered.append(call))
        patch.setattr(dist, "is_initialized", lambda: backend is not None)
        leave_in_order()
    for _ in range(2):
        GRPOTrainer(tiny_model(), letter_reward, config, prompts(), processing_class=tiny_tokenizer())
    found = [call for call in registered if call[0] is time.sleep]
    assert len(found) == waits
    assert all(seconds > 0 for _, seconds in found)
