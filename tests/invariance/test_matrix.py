"""The promise: the update and the log lines are the same for every micro-batch size and number of processes."""

from pathlib import Path

import pytest
import torch

from grpo_ext.tools.check.comparison import update_error
from grpo_ext.tools.check.runs import Run
from grpo_ext.tools.check.worker import build, train
from grpo_ext.tools.stock import OURS, STOCK
from tests.support.cases import CASES, FULL, SETTINGS, Bench
from tests.support.float64 import float64_throughout
from tests.support.launches import REFERENCE, SIZES, Launches, another_seed, describe_difference, metric_difference
from tests.support.selection import few_of
from tests.support.tiny import STOCK_SCORES, stock_scores
from tests.tolerances import DIFFERENT, METRIC, METRIC_BFLOAT16, UPDATE, UPDATE_BFLOAT16, UPDATE_FLOAT64

NAMES = list(CASES)
full = pytest.mark.full
PROCESSES = (2, 2, 2, 2, 2, 3, 2, 2, 2, 2, 2, 2, 2, 4)
NEEDS = {"images_apart": 4}


def splits_of(name: str) -> list[tuple[int, int]]:
    """Splits of a case: first that of `make test`, then one for each other number of processes.

    Over the cases, each number of processes meets each micro-batch size.
    """
    i = NAMES.index(name)
    first = NEEDS.get(name, PROCESSES[i % len(PROCESSES)])
    return [(first, SIZES[i % 4]), *((n, SIZES[(i + n) % 4]) for n in (1, 2, 3, 4) if n != first)]


STOCK_CONTROLS = [("grpo", 2, 8)]
FULL_CONTROLS = [("bnpo", 1, 4), ("moe", 1, 4), ("quantile", 1, 4), ("entropy", 1, 4), ("gpt2", 2, 8), ("cispo", 2, 8)]


@pytest.fixture(scope="module")
def launches(tmp_path_factory, request) -> Launches:
    """The runs of the tests that were selected, launched together."""
    together = Launches(Bench(tmp_path_factory.mktemp("matrix")))
    for item in request.session.items:
        params = item.callspec.params if item.module is request.module and hasattr(item, "callspec") else {}
        stock = item.originalname == test_stock_trl_learns_something_else.__name__
        if "name" not in params or (stock and not STOCK_SCORES):
            continue
        trainer = STOCK if stock else OURS
        together.plan(1, together.bench.run(params["name"], REFERENCE, trainer))
        if "size" in params:
            together.plan(params["processes"], together.bench.run(params["name"], params["size"], trainer))
        elif not stock:
            together.plan(1, another_seed(together.bench, params["name"]))
    return together


def splits() -> list:
    return [
        pytest.param(name, *split, id=f"{name}-{split[0]}x{split[1]}", marks=[full] if later or name in FULL else [])
        for name in NAMES
        for later, split in enumerate(splits_of(name))
    ]


@pytest.mark.parametrize(("name", "processes", "size"), splits())
def test_update_and_log_do_not_depend_on_the_split(launches, name, processes, size):
    reference = launches.result(1, launches.bench.run(name, REFERENCE))
    other = launches.result(processes, launches.bench.run(name, size))
    assert reference.error is None, reference.error
    assert other.error is None, other.error
    error = update_error(reference.delta, other.delta)
    # in half precision sizes cut groups, and so does the balance of work between processes
    cut = processes > 1 or size % SETTINGS["num_generations"]
    cut_in_half = cut and CASES[name].config.get("bf16", False)
    limit = UPDATE_BFLOAT16 if cut_in_half else UPDATE
    assert error <= limit, f"update error {error:.2e}: {describe_difference(reference.delta, other.delta)}"
    gap, metric = metric_difference(reference.log, other.log)
    assert gap <= (METRIC_BFLOAT16 if cut_in_half else METRIC), f"{metric} differs by {gap:.2e}"
    # an update of zero would be the same for every split
    assert sum(float(d.norm()) for d in reference.delta.values()) > 1e-4
    losses = [line["loss"] for line in reference.log if "loss" in line]
    assert len(losses) >= 2
    assert any(abs(loss) > 1e-9 for loss in losses)
    assert any("eval_reward" in line for line in reference.log) is CASES[name].evaluate


@stock_scores
@pytest.mark.parametrize(
    ("name", "processes", "size"), [*STOCK_CONTROLS, *(pytest.param(*control, marks=full) for control in FULL_CONTROLS)]
)
def test_stock_trl_learns_something_else(launches, name, processes, size):
    """Against itself in one process with one micro-batch."""
    reference = launches.result(1, launches.bench.run(name, REFERENCE, STOCK))
    other = launches.result(processes, launches.bench.run(name, size, STOCK))
    assert reference.error is None, reference.error
    assert other.error is None, other.error
    assert update_error(reference.delta, other.delta) > DIFFERENT


def update_in_float64(run: Run, folder: Path) -> dict[str, torch.Tensor]:
    trainer = build(run, folder, 1)
    with float64_throughout(trainer.model):
        return train(run, trainer).delta


@pytest.mark.parametrize("case", few_of(["kl", "quantile_bonus", "gpt2"], ["quantile_bonus", "gpt2"]))
def test_default_adam_agrees_to_rounding_in_float64(tmp_path, case):
    """Not of experts, whose grouped products have no float64."""
    bench, loaded = Bench(tmp_path), {"model_init_kwargs": {"dtype": torch.float64}}  # the reference model too
    runs = [bench.run(case, size, OURS, adam_epsilon=1e-8, max_steps=2, **loaded) for size in (REFERENCE, 3)]
    a, b = (update_in_float64(run, tmp_path) for run in runs)
    assert (error := update_error(a, b)) <= UPDATE_FLOAT64, f"{error:.2e}, {describe_difference(a, b)}"


@pytest.mark.parametrize(("name", "floor"), [("grpo", DIFFERENT), ("kl_bf16", 2 * UPDATE_BFLOAT16)])
def test_another_seed_learns_something_else(launches, name, floor):
    reference = launches.result(1, launches.bench.run(name, REFERENCE))
    other = launches.result(1, another_seed(launches.bench, name))
    assert update_error(reference.delta, other.delta) > floor
