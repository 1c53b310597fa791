"""Code of users that holds collectives runs equally often on two processes, on real rows; or it is refused by name.

Also errors on one process, which every process hears of wherever it is.
"""

from functools import partial
from pathlib import Path

import pytest

from tests.distributed import collectives, tasks
from tests.support.launch import two_processes
from tests.support.selection import named
from tests.support.trainers import error
from tests.tolerances import DIFFERENT, UPDATE

FAULT = "KeyError: 'a fault'"
BESIDE = f"ProcessError: process 1 failed: {FAULT}"
OF_MAIN = f"ProcessError: process 0 failed: {FAULT}"
OF_REWARD = f"RewardError: reward function 'reward' raised {FAULT}"


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """What each of two processes learned, and its errors; one launch, since every process goes on after an error."""
    folder = tmp_path_factory.mktemp("both")
    status, output = two_processes(Path(collectives.__file__), str(folder))
    assert status == 0, output[-3000:]
    return tasks.results(folder)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return collectives.learned(tmp_path_factory.mktemp("alone"))


marked = partial(named, full=collectives.FULL)


@pytest.mark.parametrize("name", map(marked, collectives.LEARNING))
def test_code_of_users_that_holds_collectives_learns_the_same_on_two_processes(both, alone, name):
    for learned, _ in both:
        if name == "control":
            assert error(alone[name][0], learned[name][0]) > DIFFERENT
        elif name == "bitwise":
            assert learned[name][0].equal(alone[name][0])
        else:
            assert error(alone[name][0], learned[name][0]) <= UPDATE


def test_what_is_gathered_in_the_loss_are_the_rows_of_micro_batches_that_count(both):
    (first, _), (second, _) = both
    for name, rows in (("loss", 7), ("bitwise", 12)):
        counted = first[name][1]
        assert counted == second[name][1]
        assert sum(count for count, _ in counted) == 2 * rows  # two steps; a filler adds none
        assert {share for _, share in counted} == {1.0}
    # or no process would have run more micro-batches than the other
    assert len({count for count, _ in first["loss"][1]}) > 1


@pytest.mark.parametrize(
    ("place", "errors"),
    [
        *(marked(place, (BESIDE, FAULT)) for place in ("loss", "rollout", "comparison", "evaluation")),
        *(marked(place, (BESIDE, FAULT)) for place in ("sum", "wait", "copy")),
        *(marked(place, (FAULT, OF_MAIN)) for place in ("send", "send ahead", "rollout function")),
        ("reward", (f"ProcessError: process 1 failed: {OF_REWARD}", OF_REWARD)),
    ],
)
def test_an_error_of_one_process_is_raised_on_every_process(both, place, errors):
    for (_, failed), begins in zip(both, errors, strict=True):
        assert failed[place].startswith(begins)


def test_a_loss_that_skips_super_on_one_process_logs_what_the_other_added(both):
    assert both[0][1]["no super"] == both[1][1]["no super"]
    assert "entropy" in both[0][1]["no super"]


OTHERS = "ConfigError: your code ran a collective of accelerate.utils"
OFTEN = "ProcessError: processes run different collectives: process 0 is at"


@pytest.mark.parametrize(
    ("name", "begins", "why"),
    [
        marked("evaluation, memory", "MemoryShortageError: an evaluation ran out of memory", ""),
        marked("gathers", OFTEN, ""),  # on one process more often than on the other
        ("reward with a lag", "", "a collective on the thread that samples ahead"),
        # needs equal shares
        marked("turns", "RolloutError: ", "_generate_single_turn gathers, and"),
        marked("field of one", "RolloutError: ", "extra came with some completions"),
        marked("without super", "RolloutError: ", "does not call super(): it would sample 4 to 8 completions"),
        # no collectives of the accelerator, where rows may not count
        ("objects", OTHERS, "leaves a process without prompts"),
        marked("objects of the loss", OTHERS, "may repeat micro-batches with weight zero"),
    ],
)
def test_what_cannot_run_alike_ends_on_both_processes_and_is_named(both, name, begins, why):
    for _, failed in both:
        assert failed[name].startswith(begins)
        assert why in failed[name]
        assert name != "gathers" or "memory" not in failed[name]
