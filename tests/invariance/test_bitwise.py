"""`bitwise_invariant=True`: every parameter, optimizer tensor and logged value has the same bits for every split."""

import pytest
import torch

from grpo_ext.forward import choice
from grpo_ext.tools.check.runs import Run
from grpo_ext.tools.stock import OURS
from tests.support.cases import CASES, Bench
from tests.support.launches import REFERENCE, SIZES, Launches, metric_difference
from tests.support.tiny import tiny_model
from tests.support.trainers import change, error, make
from tests.tolerances import UPDATE

NAMES = [  # what bitwise mode takes
    name for name, case in CASES.items() if "micro_batch_tokens" not in case.config and case.rollout_func is None
]
# what `make test` takes, and on how many processes; long runs have the same bits in test_ahead.py (two processes) and
# test_resume.py
ALWAYS = {
    "moe": 4,  # a statistic of the step
    "few_groups": 3,  # a process without a group
    "truncated": 3,  # units of a single row, where kernels round by alignment
}
EXACT = {"bitwise_invariant": True, "adam_epsilon": 1e-8, "weight_decay": 0.1, "max_grad_norm": 0.5}


def splits_of(name: str) -> list[tuple[int, int]]:
    """Splits of a case, one for each number of processes."""
    i = NAMES.index(name)
    first = (2, 3, 2, 4)[i % 4]
    return [(first, SIZES[(i + i // 4) % 4]), *((n, SIZES[(i + n) % 4]) for n in (1, 2, 3, 4) if n != first)]


def exact_run(bench: Bench, case: str, size: int, **changes) -> Run:
    return bench.run(case, size, OURS, **{"name": f"{case}-{size}-bits", "trace": True, **EXACT, **changes})


@pytest.fixture(scope="module")
def launches(tmp_path_factory, request) -> Launches:
    together = Launches(Bench(tmp_path_factory.mktemp("bitwise")))
    full = request.config.getoption("--full")
    for name in NAMES if full else ALWAYS:
        together.plan(1, exact_run(together.bench, name, REFERENCE))
        for processes, size in splits_of(name):
            if full or processes == ALWAYS[name]:
                together.plan(processes, exact_run(together.bench, name, size))
    for size in (REFERENCE, 5):
        together.plan(1, plain_run(together.bench, size))
        together.plan(1, half_run(together.bench, size))
    together.plan(2, half_run(together.bench, 5))
    return together


def plain_run(bench: Bench, size: int) -> Run:
    return bench.run("dapo", size, OURS, name=f"dapo-{size}-plain", trace=True, max_steps=2)


def half_run(bench: Bench, size: int) -> Run:
    return exact_run(bench, "dapo", size, name=f"dapo-{size}-half", bf16=True, canonical_unit_size=3, max_steps=2)


def assert_same_bits(launches: Launches, reference: Run, processes: int, run: Run) -> None:
    one, other = launches.result(1, reference), launches.result(processes, run)
    assert one.error is None, one.error
    assert other.error is None, other.error
    assert len(one.trace) == len(other.trace) >= 2
    assert one.trace[0] != one.trace[1]  # hashes of something that never changes would be the same for every split
    for step, (a, b) in enumerate(zip(one.trace, other.trace), start=1):
        assert a.keys() == b.keys()
        assert any(key.startswith("optimizer/") for key in a)
        different = sorted(key for key in a if a[key] != b[key])
        assert not different, f"step {step}: {different[:4]}"
    assert metric_difference(one.log, other.log) == (0.0, "")


def splits() -> list:
    return [
        pytest.param(name, n, m, id=f"{name}-{n}x{m}", marks=() if ALWAYS.get(name) == n else pytest.mark.full)
        for name in NAMES
        for n, m in splits_of(name)
    ]


@pytest.mark.parametrize(("name", "processes", "size"), splits())
def test_the_same_bits_for_every_split(launches, name, processes, size):
    reference = exact_run(launches.bench, name, REFERENCE)
    assert_same_bits(launches, reference, processes, exact_run(launches.bench, name, size))


@pytest.mark.parametrize("processes", [1, 2])
def test_the_same_bits_in_bfloat16_with_smaller_units(launches, processes):
    assert_same_bits(launches, half_run(launches.bench, REFERENCE), processes, half_run(launches.bench, 5))


def test_without_it_the_bits_differ(launches):
    one, other = (launches.result(1, plain_run(launches.bench, size)) for size in (REFERENCE, 5))
    assert one.error is None
    assert one.trace[-1] != other.trace[-1]


def test_forms_are_compared_with_the_kernels_of_the_run(monkeypatch, tmp_path):
    """TRL's Triton head, which torch does not know to repeat its bits, had been used on GPUs before the first step."""
    seen, compare = [], choice.why_form_fails

    def recorded(form, *given):
        if form != "padded":
            seen.append((torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()))
        return compare(form, *given)

    monkeypatch.setattr(choice, "why_form_fails", recorded)
    for bitwise in (True, False):
        make(tmp_path / str(bitwise), bitwise_invariant=bitwise, max_steps=1, report_to="none").train()
    assert seen == [(True, 1), (False, torch.get_num_threads())]


def with_muon(folder, size: int, **settings) -> torch.Tensor:
    """The update of a run with Muon, which takes matrices only; other parameters are frozen."""
    model = tiny_model().requires_grad_(False)
    matrices = [parameter.requires_grad_() for parameter in model.parameters() if parameter.dim() == 2]
    muon = torch.optim.Muon(matrices, lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(muon, lambda step: 1.0)
    options = {"per_device_train_batch_size": size, "max_steps": 1, "gradient_checkpointing": False, **settings}
    return change(make(folder, model, optimizers=(muon, schedule), **options))


def test_muon_enlarges_rounding_and_has_the_same_bits(tmp_path):
    """Its iterations are in bfloat16, so that gradients which agree to 1e-7 give updates that differ by thousandths."""
    one, other = (with_muon(tmp_path / f"plain{size}", size) for size in (16, 3))
    assert UPDATE < error(one, other) < 0.1
    one, other = (with_muon(tmp_path / f"bits{size}", size, bitwise_invariant=True) for size in (16, 3))
    assert torch.equal(one, other)
