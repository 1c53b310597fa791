"""The matrix in one process on a GPU: each case under two micro-batch sizes, and the bits of both in bitwise mode.

Some cases also train completions that are cut into rows, with a budget of tokens that cuts completions.
"""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from grpo_ext.errors import LaunchError
from grpo_ext.tools.check.comparison import update_error
from grpo_ext.tools.check.runs import Run
from tests.support.cases import CASES, Bench
from tests.support.cuts import Cuts
from tests.support.gpu import TOY, needs_gpu
from tests.support.launches import REFERENCE, Trained, describe_difference, metric_difference, train
from tests.tolerances import DIFFERENT, METRIC, METRIC_BFLOAT16, UPDATE, UPDATE_BFLOAT16

pytestmark = [pytest.mark.gpu, needs_gpu]
CUT = 3  # completions in a forward, fewer than a group
LAUNCHES = 1 if TOY else max(1, min(12, 3 * (os.cpu_count() or 1) // 4))
NAMES = ["dapo", "kl_bf16"] if TOY else list(CASES)
# what bitwise mode takes
BITWISE = [name for name in NAMES if "micro_batch_tokens" not in CASES[name].config and not CASES[name].rollout_func]
SIZES = (REFERENCE, CUT)
# completions of several rows: losses of tokens and of sequences, statistics of the step, replay, dropout, padding
ROWS = (
    *("dapo", "kl_bf16", "gspo", "vespo", "luspo", "kl", "quantile_bonus", "cut_moe", "routed", "replayed", "teacher"),
    *("own_loss", "sequence_mask", "trust_tv", "dynamic_reused", "prompt_mean", "lora_dropout", "dropout", "hybrid"),
    *("prefix", "padded"),
)
ROWS = tuple(name for name in NAMES if name in ROWS)


def trained(runs: list[Run]) -> list[Trained]:
    results: list[Trained] = []
    try:
        for result in train(runs, 1):
            results.append(result)
    except LaunchError as error:
        results += [Trained(run.name, error=str(error)) for run in runs[len(results) :]]
    return results


def launch(runs: list[Run]) -> dict[str, Trained]:
    with ThreadPoolExecutor(LAUNCHES) as pool:
        shares = pool.map(trained, (runs[first::LAUNCHES] for first in range(LAUNCHES)))
        return {result.name: result for share in shares for result in share}


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("matrix"))


@pytest.fixture(scope="module")
def plain(bench) -> dict[str, Trained]:
    return launch([bench.run(name, size, name=f"{name}-{size}") for name in NAMES for size in SIZES])


@pytest.fixture(scope="module")
def bitwise(bench) -> dict[str, Trained]:
    """In launches of their own: bitwise mode is refused where CUDA began without its setting of cuBLAS."""
    exact = {"bitwise_invariant": True, "trace": True}
    return launch([bench.run(name, size, name=f"{name}-{size}", **exact) for name in BITWISE for size in SIZES])


@pytest.fixture(scope="module")
def rows(bench) -> dict[str, Trained]:
    several = {"cuts": Cuts(), "micro_batch_tokens": 24}
    return launch([bench.run(name, CUT, name=name, **several) for name in ROWS])


def two_splits(results: dict[str, Trained], name: str) -> list[Trained]:
    both = [results[f"{name}-{size}"] for size in SIZES]
    for one in both:
        assert one.error is None, one.error
    return both


@pytest.mark.parametrize("name", NAMES)
def test_update_and_log_do_not_depend_on_the_split(record_property, plain, name):
    one, other = two_splits(plain, name)
    half = CASES[name].config.get("bf16", False)
    error, (gap, metric) = update_error(one.delta, other.delta), metric_difference(one.log, other.log)
    record_property("update, log", (error, gap, metric))
    assert error <= (UPDATE_BFLOAT16 if half else UPDATE), describe_difference(one.delta, other.delta)
    assert gap <= (METRIC_BFLOAT16 if half else METRIC), metric


@pytest.mark.parametrize("name", ROWS)
def test_completions_cut_into_rows_are_trained_as_whole_ones(record_property, plain, rows, name):
    one, other = two_splits(plain, name)[0], rows[name]
    assert other.error is None, other.error
    half = CASES[name].config.get("bf16", False)
    error, (gap, metric) = update_error(one.delta, other.delta), metric_difference(one.log, other.log)
    record_property("update, log", (error, gap, metric))
    assert 0 < error <= (UPDATE_BFLOAT16 if half else UPDATE), describe_difference(one.delta, other.delta)
    assert gap <= (METRIC_BFLOAT16 if half else METRIC), metric


@pytest.mark.parametrize("name", BITWISE)
def test_the_same_bits_for_two_splits(bitwise, name):
    one, other = two_splits(bitwise, name)
    assert one.trace == other.trace
    assert one.trace[0] != one.trace[-1]
    assert metric_difference(one.log, other.log) == (0.0, "")


def test_another_seed_learns_something_else(bench, plain):
    [other] = trained([bench.run("dapo", REFERENCE, seed=4)])
    assert update_error(two_splits(plain, "dapo")[0].delta, other.delta) > DIFFERENT


def test_without_bitwise_mode_the_bits_differ(plain):
    one, other = two_splits(plain, "dapo")
    assert any(not one.delta[name].equal(other.delta[name]) for name in one.delta)
