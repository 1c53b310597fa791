"""A process that talks through gloo waits a moment before its interpreter is torn down."""

import atexit
import time

import pytest
import torch.distributed as dist

from grpo_ext.runtime.collectives import leave_in_order


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
