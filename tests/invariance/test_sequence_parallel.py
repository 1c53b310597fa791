"""Not even one completion belongs to one process: the update is the same where processes share its tokens."""

from pathlib import Path

import pytest

from grpo_ext.errors import LaunchError
from grpo_ext.run.record import read_record
from grpo_ext.tools.check.comparison import update_error
from grpo_ext.tools.check.runs import Run
from tests.support.cases import CASES, Bench
from tests.support.kills import dying, failing_on, out_of_memory, sampling_fails_on
from tests.support.launches import REFERENCE, Launches, another_seed, describe_difference, metric_difference, run_all
from tests.tolerances import DIFFERENT, METRIC, UPDATE

full = pytest.mark.full
# what runs no packs, or runs beside training
REFUSED = [name for name, case in CASES.items() if {*case.config} & {"rollout_lag"} or name in ("prefix", "padded")]
KINDS = ("qwen2", "llama", "gpt2", "dropout", "moe", "4bit", "8bit")
REFUSED += [name for name, case in CASES.items() if case.model not in KINDS]
NAMES = [name for name in CASES if name not in REFUSED]
# processes, of which so many share a micro-batch, and its completions
TWO_GROUPS, ONE_GROUP = (4, 2, 5), (2, 2, 3)
SPLITS = [TWO_GROUPS, ONE_GROUP, (4, 4, 16)]
# what `make test` takes: statistics of the step where groups add theirs
FEW = {"cut_moe": TWO_GROUPS, "replayed": ONE_GROUP}


def shared_run(bench: Bench, name: str, members: int, size: int) -> Run:
    # in half precision micro-batches that cut groups round
    size = 8 if CASES[name].config.get("bf16") else size
    return bench.run(name, size, name=f"{name}-{members}-{size}", sequence_parallel_size=members)


def splits() -> list:
    return [
        pytest.param(name, *split, id=f"{name}-{split}", marks=() if FEW.get(name) == split else full)
        for name in NAMES
        for split in SPLITS
    ]


@pytest.fixture(scope="module")
def launches(tmp_path_factory, request) -> Launches:
    together = Launches(Bench(tmp_path_factory.mktemp("shared")))
    for item in request.session.items:
        params = item.callspec.params if item.module is request.module and hasattr(item, "callspec") else {}
        if "name" not in params:
            continue
        together.plan(1, together.bench.run(params["name"], REFERENCE))
        if "members" in params:
            shared = shared_run(together.bench, params["name"], params["members"], params["size"])
            together.plan(params["processes"], shared)
        else:
            together.plan(1, another_seed(together.bench, params["name"]))
    return together


@pytest.mark.parametrize(("name", "processes", "members", "size"), splits())
def test_the_update_is_the_same_where_processes_share_completions(launches, name, processes, members, size):
    reference = launches.result(1, launches.bench.run(name, REFERENCE))
    shared = launches.result(processes, shared_run(launches.bench, name, members, size))
    assert reference.error is None, reference.error
    assert shared.error is None, shared.error
    error = update_error(reference.delta, shared.delta)
    assert error <= UPDATE, f"update error {error:.2e}: {describe_difference(reference.delta, shared.delta)}"
    gap, metric = metric_difference(reference.log, shared.log)
    assert gap <= METRIC, f"{metric} differs by {gap:.2e}"
    assert sum(float(d.norm()) for d in reference.delta.values()) > 1e-4


@pytest.mark.parametrize("name", ["cut_moe"])  # of kl_bf16 and float32 without experts: test_matrix.py
def test_another_seed_learns_something_else(launches, name):
    reference = launches.result(1, launches.bench.run(name, REFERENCE))
    other = launches.result(1, another_seed(launches.bench, name))
    assert update_error(reference.delta, other.delta) > DIFFERENT


def test_a_member_without_memory_ends_the_run_and_says_what_helps(tmp_path: Path):
    bench = Bench(tmp_path)
    short = bench.run("grpo", 2, name="short", sequence_parallel_size=2, rewards=(out_of_memory(2, rank=1),))
    with pytest.raises(LaunchError, match=r"gradient_checkpointing=True.*sequence_parallel_size|by peer"):
        run_all([short], 2)


@pytest.mark.parametrize(
    "fault",
    [pytest.param(failing_on(1, 2), id="rewards"), pytest.param(sampling_fails_on(1), id="sampling", marks=full)],
)
def test_an_error_of_one_member_ends_the_run(tmp_path: Path, fault):
    bench = Bench(tmp_path)
    run = bench.run("kl", 2, name="failing", sequence_parallel_size=2, rewards=(fault,))
    # whichever process is heard first; one that waited would take too long
    with pytest.raises(LaunchError, match=r"is out|shares this one's micro-batches has failed"):
        run_all([run], 2, timeout_s=60)


@full
def test_a_killed_run_goes_on_where_more_or_fewer_processes_share_a_completion(tmp_path: Path):
    # rollouts of two steps: killed inside the first, and inside the second, whose rewards arm it
    bench, settings = Bench(tmp_path), {"save_strategy": "steps", "save_steps": 1, "max_steps": 4, "num_iterations": 1}

    def run(folder: str, name: str, members: int, **changes) -> Run:
        own = {"output_dir": str(tmp_path / folder), "sequence_parallel_size": members, **settings, **changes}
        return bench.run("kl", 5, name=f"{folder}-{name}", **own)

    (whole,) = run_all([run("whole", "alone", 1)], 1)
    with pytest.raises(LaunchError, match=r"status -9|by peer"):
        run_all([run("killed", "first", 2, rewards=(dying("optimizer", 3),))], 2)
    with pytest.raises(LaunchError, match="status -9"):
        run_all([run("killed", "second", 1, rewards=(dying("optimizer", 2),), resume_from="latest")], 1)
    (last,) = run_all([run("killed", "last", 2, resume_from="latest")], 2)
    assert last.error is None, last.error
    assert update_error(whole.delta, last.delta) <= UPDATE
    first, second = read_record(tmp_path / "killed").resumed_from
    assert 0 < first < second < 4
