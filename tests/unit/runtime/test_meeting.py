"""An exchange begins with a meeting, at which every process hears of the failures of the others."""

from __future__ import annotations

import zlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_ext.errors import MemoryShortageError, PrecisionError, ProcessError, RewardError, RolloutError
from grpo_ext.runtime import collectives as module
from grpo_ext.runtime.collectives import max_over_processes, on_all_processes, together, uneven_collectives
from grpo_ext.runtime.out_of_memory import StepOutOfMemory, is_out_of_memory


def beside(monkeypatch: Any, place: str, failure: Exception | None = None, magic: int = module._MAGIC) -> None:
    """This process is the first of two; the second is at a place, with the value 7, or has failed."""
    here = 0 if failure else zlib.crc32(place.encode())
    other = torch.tensor([[magic, here, 7]])
    report = (place, None if failure is None else (type(failure).__name__, str(failure)))
    monkeypatch.setattr(module, "_processes", lambda: 2)
    monkeypatch.setattr(module, "gather", lambda header: torch.cat([header, other]))
    monkeypatch.setattr(module, "gather_object", lambda reports: [*reports, report])


def test_processes_at_one_place_exchange_their_values(monkeypatch):
    beside(monkeypatch, "an exchange of numbers")
    assert max_over_processes(3) == 7
    with together("an exchange of numbers"):
        pass


@pytest.mark.parametrize(
    ("failure", "kind", "says"),
    [
        (RolloutError("rollout_func raised KeyError: 'x'"), RolloutError, "on process 1, rollout_func raised KeyError"),
        (PrecisionError("scores were not finite"), PrecisionError, "on process 1, scores were not finite"),
        (MemoryShortageError("set forward='padded'"), MemoryShortageError, "on process 1, set forward='padded'"),
        (StepOutOfMemory("CUDA out of memory."), StepOutOfMemory, "on process 1, CUDA out of memory"),
        (ConnectionError("no sandbox"), ProcessError, "process 1 failed: ConnectionError: no sandbox"),
    ],
)
def test_a_failure_of_another_process_is_an_error_here(monkeypatch, failure, kind, says):
    beside(monkeypatch, "elsewhere", failure)
    with pytest.raises(kind, match=says) as caught, together("outside"):  # which lets it pass
        max_over_processes(3)
    assert on_all_processes(caught.value)


@pytest.mark.parametrize("other", [None, RewardError("no score")])
def test_a_failure_here_is_raised_as_it_is(monkeypatch, other):
    beside(monkeypatch, "an exchange of numbers", other)
    failure = KeyError("a fault")
    with pytest.raises(KeyError) as caught, together("a step"):
        raise failure
    assert caught.value is failure


def test_memory_that_ran_out_here_is_no_step_to_run_again_where_another_process_failed(monkeypatch):
    shortage = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    for other, kind in ((None, StepOutOfMemory), (RewardError("no score"), ProcessError)):
        beside(monkeypatch, "a step", other)
        with pytest.raises(kind), together("a step", again=True):
            raise shortage
    beside(monkeypatch, "elsewhere")
    with pytest.raises(torch.OutOfMemoryError), together("a rollout"):
        raise shortage


def test_processes_at_different_places_are_named(monkeypatch):
    beside(monkeypatch, "the end of the micro-batches")
    with pytest.raises(ProcessError, match=r"process 0 is at an exchange of numbers; process 1 is at the end of the"):
        max_over_processes(3)
    beside(monkeypatch, "anywhere", magic=0)
    with pytest.raises(ProcessError, match=r"a collective of torch.distributed or accelerate.utils met"):
        max_over_processes(3)


def test_where_a_forward_is_a_collective_an_error_is_raised_at_once():
    with pytest.raises(KeyError) as caught, together("a step", sharded=True):
        raise KeyError("a fault")
    assert not on_all_processes(caught.value)


@pytest.mark.parametrize("reduction", ["sum", "mean", "max"])
def test_what_no_process_has_rows_of_is_reduced_to_zero(reduction):
    names = ("gather", "reduce", "gather_for_metrics", "pad_across_processes", "wait_for_everyone")
    accelerator: Any = SimpleNamespace(num_processes=2, **dict.fromkeys(names))
    value = torch.tensor([-3.0, 5.0])
    for empty, expected in ((True, torch.zeros(2)), (False, value)):
        with uneven_collectives(accelerator, empty=lambda empty=empty: empty):
            assert torch.equal(accelerator.reduce(value, reduction=reduction), expected)


@pytest.mark.parametrize(
    ("text", "memory"),
    [
        ("CUDA out of memory. Tried to allocate 2 GiB", True),
        ("DefaultCPUAllocator: can't allocate memory", True),
        ("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if a tensor is not contiguous", False),
        ("[enforce fail at allgather.cc:27] op.preamble.length <= op.nbytes. 48 vs 16", False),
    ],
)
def test_nothing_else_than_memory_is_out_of_memory(text, memory):
    assert is_out_of_memory(RuntimeError(text)) == memory
