"""A parameter takes part in a step if a completion that contributes uses it, not if a filler does."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import unused
from tests.support.launch import on_processes
from tests.support.selection import few_of
from tests.support.trainers import error
from tests.tolerances import DIFFERENT, UPDATE


@pytest.fixture(scope="module")
def apart(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("apart")
    status, output = on_processes(3, Path(unused.__file__), str(folder))
    assert status == 0, output[-3000:]
    return folder


def of(folder: Path, name: str, rank: int) -> tuple[torch.Tensor, list[Any]]:
    return torch.load(folder / f"{name}_{rank}.pt"), json.loads((folder / f"{name}_{rank}.json").read_text())


@pytest.mark.parametrize("name", few_of(["sgd", "adamw", "bitwise", "clamp"], ["sgd", "bitwise"]))
def test_experts_that_only_fillers_choose_do_not_move(apart, tmp_path, name):
    alone, used = unused.run(tmp_path, name)
    assert all(0 < len(step) < 24 for step in used)
    for rank in range(3):
        update, on_process = of(apart, name, rank)
        assert on_process == used
        assert torch.equal(alone, update) if name in ("bitwise", "clamp") else error(alone, update) < UPDATE


def test_completions_that_add_nothing_count_as_use_where_they_run(tmp_path):
    skipped, few = unused.run(tmp_path / "skipped", "sgd")
    unskipped, more = unused.run(tmp_path / "unskipped", "sgd", skip_zero_contribution=False)
    assert all({*one} < {*other} for one, other in zip(few, more, strict=True))
    assert error(skipped, unskipped) > DIFFERENT  # the weight decay of the others


def test_a_hook_may_be_on_one_process_alone(apart):
    plain = of(apart, "sgd", 0)[0]
    assert all(error(plain, of(apart, "watched", rank)[0]) < UPDATE for rank in range(3))


@pytest.mark.full
def test_all_processes_learn_the_same_from_a_hook_that_draws_noise(apart):
    updates = [of(apart, "noise", rank)[0] for rank in range(3)]
    assert torch.equal(updates[0], updates[1])
    assert torch.equal(updates[0], updates[2])
    assert error(of(apart, "sgd", 0)[0], updates[0]) > DIFFERENT
