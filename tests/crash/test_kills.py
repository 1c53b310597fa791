"""Runs that are killed at random, again and again, and end with the bits of the run that was left alone.

`make test` kills a run at a chosen moment (tests/invariance/test_resume.py), `make test-full` three of these,
`make test-crash` 50. The seed is in the output, and repeats it all.
"""

import dataclasses
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from grpo_ext.errors import LaunchError
from grpo_ext.run.checkpoint import checkpoints, why_broken, why_not_resumable
from tests.support.cases import Bench
from tests.support.kills import MOMENTS, dying, dying_after
from tests.support.launches import Trained, long_run, run_all
from tests.support.tiny import letter_reward

STEPS = 24  # of `long_run`: two epochs of 22 prompts, in rollouts of 8, 8 and 6
SEED = int(os.environ.get("CRASH_SEED", "20"))
LONGEST = {1: 2.5, 2: 4.0}  # seconds from the first rewards to the end of such a run, about
MAIN_ONLY = ("writing", "listing", "syncing", "publishing")
BOUND_S = 100.0  # for a launch of which one process died, start included; gloo's own limit is 30 minutes


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("kills"))


def one_kill(rng: random.Random, processes: int) -> tuple[str, Any]:
    rank = rng.randrange(processes)
    if rng.random() < 0.5:
        seconds = rng.uniform(0, LONGEST[processes])
        return f"process {rank} after {seconds:.2f} s", dying_after(seconds, rank)
    moment = rng.choice(sorted(MOMENTS))
    rank = 0 if moment in MAIN_ONLY else rank
    at = rng.randint(2 if moment == "rewards" else 1, max(2, MOMENTS[moment][2] // 2))
    return f"process {rank} in {moment}, time {at}", dying(moment, at, rank)


SYNCHRONOUS: dict[str, Any] = {}
# rollout batches are sampled ahead when the process dies, and the run may resume on another number of processes
AHEAD = {"rollout_lag": 2, "bitwise_invariant": True, "beta": 0.0}


def step_of(checkpoint: Path | None) -> int:
    return 0 if checkpoint is None else int(checkpoint.name.split("-")[1])


def newest_of(folder: Path, before: set[Path], context: Any) -> Path | None:
    """The checkpoint to go on from: of those that were there after the last kill, whole, and none besides."""
    existing = checkpoints(folder)
    newest = existing[-1] if existing else None
    assert not any(map(why_not_resumable, existing)), context  # nothing half-written carries a checkpoint's name
    assert newest is None or newest == max(before, key=step_of), context
    return newest


def assert_none_lost(folder: Path, before: set[Path], context: Any) -> set[Path]:
    """The checkpoints after a kill: those from before and newer ones, none broken."""
    after = set(checkpoints(folder))
    assert before <= after, context
    assert [why_broken(path) for path in after] == [None] * len(after), context
    return after


@pytest.mark.full
@pytest.mark.parametrize("settings", [SYNCHRONOUS, AHEAD], ids=["synchronous", "ahead"])
def test_killed_runs_end_with_the_same_bits(bench, request, capsys, settings):
    wanted, rng = request.config.getoption("--kills") or 3, random.Random(SEED)
    whole: dict[int, Trained] = {}
    kills: list[str] = []  # a line for each kill
    chains = 0
    while len(kills) < wanted:
        chains += 1
        processes, name = 1 + chains % 2, f"chain-{chains}-{len(settings)}"
        folder, before = bench.folder / name, set()
        if not whole or (processes not in whole and not settings):  # ahead: bitwise, one run for all
            run = long_run(bench, bench.folder, f"whole-{processes}-{len(settings)}", 3, **settings)
            (whole[processes],) = run_all([run], processes)
            assert whole[processes].error is None
        expected = next(iter(whole.values())) if settings else whole[processes]
        result = None
        while result is None:
            processes = rng.choice([1, 2]) if settings else processes
            what, reward = one_kill(rng, processes) if len(kills) < wanted else ("left alone", letter_reward)
            newest = newest_of(folder, before, (SEED, kills))
            run = long_run(bench, bench.folder, name, 3, **settings)
            run = dataclasses.replace(run, rewards=(reward,), resume_from=None if newest is None else "latest")
            start, died = time.perf_counter(), ""
            try:
                (result,) = run_all([run], processes)
            except LaunchError as error:
                died = str(error)
            if result is None:
                assert time.perf_counter() - start < BOUND_S, (SEED, what)
                assert processes > 1 or "status -9" in died, (SEED, what, died)
                kills.append(f"{name} on {processes}, from step {step_of(newest)}: {what}")
                before = assert_none_lost(folder, before, (SEED, kills))
        assert result.error is None, (SEED, kills, result.error)
        assert result.trace == expected.trace[step_of(newest) :], (SEED, kills)
        assert len(checkpoints(folder)) == STEPS
        shutil.rmtree(folder)
    with capsys.disabled():
        print(f"\n{len(kills)} kills in {chains} runs, seed {SEED}: the same bits in all, no checkpoint lost")
        if wanted > 10:
            print("\n".join(kills))
