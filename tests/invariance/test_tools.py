"""Tools and environments: transcripts, masks, rewards, update and log are the same for every split."""

import json
import math
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import tool_runs
from tests.support.launch import on_processes
from tests.support.launches import metric_difference
from tests.support.selection import named
from tests.support.tool_runs import CASES, SETTINGS
from tests.support.trainers import error
from tests.tolerances import DIFFERENT, METRIC, UPDATE

NAMES = [name for name in CASES if name not in ("leak", "partial")]  # which depend on the split
SIZES = dict.fromkeys(CASES, 5) | {"async": 3}
FULL = ("tools", "company", "environments", "hanging", "few", "rewarding", "ahead", "partial")


def launched(folder: Path, processes: int, *runs: tuple[str, int, dict[str, Any]]) -> str:
    """What the processes printed; empty where all of them ended well."""
    status, output = on_processes(processes, Path(tool_runs.__file__), str(folder), json.dumps(runs), timeout=500)
    return "" if status == 0 else output[-3000:] or "nothing"


@pytest.fixture(scope="module")
def runs(tmp_path_factory, request) -> Any:
    """From a case, a number of processes, and a micro-batch size to what each process saw; launched together."""
    full = request.config.getoption("--full")
    names = [name for name in CASES if full or name not in FULL]
    folders = {n: tmp_path_factory.mktemp(f"on_{n}") for n in (1, 2, 3)}
    wanted = {1: [(name, 24, {}) for name in names], 2: [(name, SIZES[name], {}) for name in names], 3: []}
    if full:
        wanted[3] += [(name, 2, {}) for name in NAMES]
    done = set()

    def result(name: str, processes: int, size: int) -> list[dict[str, Any]]:
        if processes not in done and wanted[processes]:
            done.add(processes)
            assert not (output := launched(folders[processes], processes, *wanted[processes])), output
        files = sorted(folders[processes].glob(f"{name}-{size}-*.pt"))  # by rank
        return [torch.load(path, weights_only=False) for path in files]

    return result


def assert_same(one: dict[str, Any], other: dict[str, Any], rank: int = 0) -> None:
    for column, values in one["table"].items():
        if rank and column in ("prompt", "completion"):  # the main process alone has the texts
            values = [None] * len(values)
        numbers = all(value is None or isinstance(value, float) for value in values)
        same = pytest.approx(values, abs=1e-5, nan_ok=True) if numbers else values
        assert other["table"][column] == same, column
    for name, expected in one["rollout"].items():
        assert all(torch.equal(a, b) for a, b in zip(expected, other["rollout"][name], strict=True)), name
    gap, metric = metric_difference(one["log"], other["log"])
    assert gap <= METRIC, f"{metric} differs by {gap:.2e}"
    assert error(one["update"], other["update"]) <= UPDATE


@pytest.mark.parametrize(
    ("name", "processes", "size"),
    [named(name, 2, SIZES[name], full=FULL) for name in NAMES] + [named(name, 3, 2, full=NAMES) for name in NAMES],
)
def test_what_tools_answer_and_what_is_learned_do_not_depend_on_the_split(runs, name, processes, size):
    (alone,) = runs(name, 1, 24)
    seen = runs(name, processes, size)
    assert len(seen) == processes
    for rank, other in enumerate(seen):
        assert_same(alone, other, rank)


@pytest.mark.parametrize("name", [named(name, full=FULL) for name in NAMES if name != "ahead"])
def test_what_was_sampled_is_what_is_trained_on_token_for_token(runs, name):
    (alone,) = runs(name, 1, 24)
    by_key: dict[int, list[tuple[int, list[int], list[int]]]] = defaultdict(list)
    for key, offset, before, new in alone["turns"]:
        by_key[key].append((offset, before, new))
    transcripts = {tuple(turns[0][1]): [] for turns in by_key.values()}
    for turns in by_key.values():
        assert turns[0][0] == 0
        prompt, ids, mask = turns[0][1], list[int](), list[int]()
        for offset, before, new in turns:
            assert before[: len(prompt) + len(ids)] == prompt + ids  # a turn begins with what there was, as it was
            answer = before[len(prompt) + len(ids) :]
            assert offset == len(ids) + len(answer)
            ids, mask = ids + answer + new, mask + [0] * len(answer) + [1] * len(new)
        most = CASES[name].config.get("max_completion_length", SETTINGS["max_completion_length"])
        transcripts[tuple(prompt)].append((ids[:most], mask[:most]))
    fields, turned = alone["rollout"], 0
    for prompt, ids, mask in zip(fields["prompt_ids"], fields["completion_ids"], fields["tool_mask"], strict=True):
        assert (ids.tolist(), mask.tolist()) in transcripts[tuple(prompt.tolist())]
        turned += bool((mask == 0).any())
    assert turned  # tools have answered


@pytest.mark.parametrize("name", [named(name, full=FULL) for name in NAMES])
def test_every_case_calls_tools_and_learns(runs, name):
    (alone,) = runs(name, 1, 24)
    first = alone["log"][0]
    assert first["tools/call_frequency"] > 0.2
    assert float(alone["update"].norm()) > 1e-4
    lines = [json.loads(line) for line in alone["table"]["transcript"]]
    assert {len([m for m in messages if m["role"] == "assistant"]) for messages in lines} >= {1, 2}
    if name in ("tools", "async", "hanging"):
        assert 0 < first["tools/failure_frequency"] < 1
        answers = {str(m["content"]) for messages in lines for m in messages if m["role"] == "tool"}
        failures = {"tools": "{'error': 'Tool unknown not found.'}", "async": "{'error': 'busy'}"}
        failures["hanging"] = "{'error': 'no answer within tool_timeout=0.15 seconds'}"
        assert failures[name] in answers


@pytest.mark.parametrize(
    ("name", "column"), [named("leak", "transcript", full=FULL), named("partial", "Partial", full=FULL)]
)
def test_a_tool_or_a_reward_that_knows_its_process_is_seen(runs, name, column):
    (alone,) = runs(name, 1, 24)
    one, other = runs(name, 2, SIZES[name])
    assert one["table"][column] == other["table"][column] != alone["table"][column]
    assert error(alone["update"], one["update"]) > DIFFERENT


@pytest.mark.full
def test_environments_give_rewards_on_every_process_and_hang_and_fail_on_one(runs):
    (alone,), seen = runs("rewarding", 1, 24), runs("rewarding", 2, SIZES["rewarding"])
    here = [Counter(one["happened"]) for one in seen]
    assert sum(here, Counter()) == Counter(alone["happened"])
    assert all(counts["Game"] and counts["Broken"] for counts in here)
    assert [(counts["hung"] > 0, counts["failed"] > 0) for counts in here] == [(False, False), (True, True)]
    table = alone["table"]
    asked = [not math.isnan(reward) for reward in table["Broken"]]  # NaN: does not apply
    hung = [row for row, line in enumerate(table["transcript"]) if "tool_timeout=0.7" in line]
    assert 0 < len(hung) <= here[1]["hung"]  # an answer for which there is no room is left out
    assert not any(asked[row] or math.isnan(table["transcript_reward"][row]) for row in hung)
    assert sum(asked) == sum(counts["Broken"] for counts in here)


@pytest.mark.full
def test_a_run_that_dies_while_a_tool_answers_goes_on_as_if_it_had_not(tmp_path):
    settings = {"global_batch_size": 8, "rollout_batch_size": 16, "max_steps": 4, "save_strategy": "steps"}
    case = ("environments", 3, {**settings, "save_steps": 1})
    folders = [tmp_path / name for name in ("whole", "killed")]
    for folder in folders:
        folder.mkdir()
    whole, killed = folders
    assert not (output := launched(whole, 1, case)), output
    calls = torch.load(whole / "environments-3-0.pt", weights_only=False)["calls"]
    case[2]["dies_at"] = {"0": calls - 1}  # in the second rollout batch, between its turns
    assert launched(killed, 1, case)
    saved = sorted(path.name for path in (killed / "environments").glob("checkpoint-*"))
    assert saved == ["checkpoint-1", "checkpoint-2"]
    assert not list(killed.glob("*.pt"))
    case[2].pop("dies_at")
    assert not (output := launched(killed, 1, ("environments", 3, {**case[2], "resume": "latest"}))), output
    one, other = (torch.load(folder / "environments-3-0.pt", weights_only=False) for folder in folders)
    assert torch.equal(one["weights"], other["weights"])
    assert one["table"]["transcript"][-8:] == other["table"]["transcript"][-8:]
    assert metric_difference(one["log"][2:4], other["log"][-3:-1])[0] == 0.0
