"""The run log: strict lines, the right completions, and what a reader makes of kills and resumes."""

from __future__ import annotations

import json
import math
from collections import defaultdict, deque

import torch

from grpo_ext.run.log import LOG, RunLog, as_text, cut, peak_memory_mib, read_log, strict

CPU = torch.device("cpu")


def record(maxlen=8):
    """TRL's record of a rollout batch, empty."""
    return {
        "prompt": deque(maxlen=maxlen),
        "completion": deque(maxlen=maxlen),
        "rewards": defaultdict(lambda: deque(maxlen=maxlen)),
        "advantages": deque(maxlen=maxlen),
    }


def sample(rows, rewards, mark="t", name="r"):
    """One rollout batch into the record; completions are named by mark and reward."""
    rows["prompt"].extend(f"{mark}>" for _ in rewards)
    rows["completion"].extend(f"{mark}{reward}" for reward in rewards)
    rows["rewards"][name].extend(rewards)
    rows["advantages"].extend(torch.zeros(len(rewards)).tolist())


def begun(folder, checkpoint=None):
    log = RunLog()
    log.begin(folder, checkpoint)
    return log


def checkpoint(folder, step):
    (path := folder / f"checkpoint-{step}").mkdir()
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return str(path)


def write(log, step, rows=None, weights=(1.0,), **values):
    log.write(step, step / 10, values or {"reward": float(step)}, rows or record(), list(weights), CPU)


def lines(folder):
    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in (folder / LOG).read_text().splitlines()]


def test_lines_are_strict_json_with_step_time_and_memory(tmp_path):
    log = begun(tmp_path)
    write(log, 3, reward=math.nan, kl=-math.inf, loss=0.5, epoch=0.3)
    (line,) = lines(tmp_path)
    assert line["values"] == {"reward": None, "kl": None, "loss": 0.5}
    assert (line["step"], line["epoch"]) == (3, 0.3)
    assert 0 <= line["time"] < 60
    assert line["peak_memory_mib"] > 50
    assert line["memory_of"] == "process"


def test_peak_memory_grows_with_what_is_allocated():
    before = peak_memory_mib(CPU)
    held = torch.ones(int(before) * 2**18 + 2**24)  # the peak so far, and 64 MiB
    assert peak_memory_mib(CPU) > before + 32
    del held


def test_the_two_best_and_worst_are_kept_by_total_reward_each_text_once(tmp_path):
    rows = record(16)
    sample(rows, [1.0, 5.0, 5.0, 3.0, -2.0, math.nan, 0.0, 4.0])
    log = begun(tmp_path)
    write(log, 1, rows)
    (line,) = lines(tmp_path)
    assert [row["reward"] for row in line["best"]] == [5.0, 4.0]
    assert [row["reward"] for row in line["worst"]] == [-2.0, 0.0]
    assert line["best"][0] == {"prompt": "t>", "completion": "t5.0", "reward": 5.0, "rewards": {"r": 5.0}}


def test_a_gold_answer_stands_beside_its_completion_and_never_beside_another(tmp_path):
    rows, log = record(4), begun(tmp_path)
    rows["gold"] = deque(maxlen=4)
    for mark, golds in (("a", ["1", ["2", "3"]]), ("b", [4, None, "6"])):
        sample(rows, [float(i) for i in range(len(golds))], mark=mark)
        rows["gold"].extend(golds)
        write(log, 1, rows)
    sample(rows, [1.0], mark="c")
    rows["gold"].clear()  # the caller's rows have none
    write(log, 1, rows)
    shown = [{row["completion"]: row.get("gold") for row in line["best"] + line["worst"]} for line in lines(tmp_path)]
    assert shown == [{"a1.0": "2\n3", "a0.0": "1"}, {"b2.0": "6", "b1.0": None, "b0.0": "4"}, {"c1.0": None}]


def test_the_total_is_weighted_and_leaves_out_what_does_not_apply(tmp_path):
    rows = record()
    rows["rewards"]["a"].extend([1.0, 2.0, math.nan])
    rows["rewards"]["b"].extend([1.0, math.nan, math.nan])
    rows["prompt"].extend("pqr")
    rows["completion"].extend("xyz")
    rows["advantages"].extend(torch.zeros(3).tolist())
    write(begun(tmp_path), 1, rows, weights=(1.0, 3.0))
    (line,) = lines(tmp_path)
    shown = {row["completion"]: (row["reward"], row["rewards"]) for row in line["best"] + line["worst"]}
    assert shown == {"x": (4.0, {"a": 1.0, "b": 1.0}), "y": (2.0, {"a": 2.0, "b": None})}


def test_a_batch_is_shown_once_and_a_smaller_one_without_what_is_left_of_the_last(tmp_path):
    rows, log = record(4), begun(tmp_path)
    sample(rows, [1.0, 2.0, 3.0, 4.0])
    write(log, 1, rows)
    write(log, 2, rows)  # the same rollout batch is trained on again
    sample(rows, [7.0], mark="new")
    write(log, 3, rows)
    first, second, third = lines(tmp_path)
    assert len(first["best"] + first["worst"]) == 4
    assert second["best"] == second["worst"] == []
    assert [row["completion"] for row in third["best"] + third["worst"]] == ["new7.0"]


def test_completions_of_an_evaluation_are_told_from_those_of_training(tmp_path):
    rows, log = record(), begun(tmp_path)
    sample(rows, [1.0], mark="train")
    log.collect(rows, [1.0])
    sample(rows, [2.0], mark="eval")
    write(log, 1, rows, eval_reward=2.0)
    write(log, 2, rows, reward=1.0)
    evaluation, training = lines(tmp_path)
    assert [row["completion"] for row in evaluation["best"]] == ["eval2.0"]
    assert [row["completion"] for row in training["best"]] == ["train1.0"]


def test_long_texts_are_cut_in_the_middle_and_marked():
    text = cut("a" * 5000 + "the answer", longest=400)
    assert text.startswith("a" * 300)
    assert text.endswith("the answer")
    assert "[... 4610 characters cut ...]" in text
    assert cut("a" * 400, longest=400) == "a" * 400


def test_messages_become_text():
    messages = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]},
        {"role": "assistant", "content": "a cat"},
    ]
    assert as_text(messages) == "user: [image] what?\nassistant: a cat"
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "x"}}}
    turns = [{"role": "assistant", "content": "so", "tool_calls": [call, call]}, {"role": "tool", "name": "add"}]
    assert as_text(turns) == f"assistant: so {json.dumps(call)} {json.dumps(call)}\ntool add: "


def test_a_lone_surrogate_can_be_written(tmp_path):
    rows = record()
    sample(rows, [1.0], mark="\udc80")
    write(begun(tmp_path), 1, rows)
    assert lines(tmp_path)[0]["best"][0]["prompt"] == "\udc80>"


def test_tensors_are_numbers_and_objects_text():
    assert strict({"a": torch.tensor(2.0), "b": (float("inf"), 1), 3: None}) == {"a": 2.0, "b": [None, 1], "3": None}
    assert strict(CPU) == "cpu"


def test_an_unfinished_last_line_is_left_out_and_the_next_one_is_whole(tmp_path):
    log = begun(tmp_path)
    for step in (1, 2):
        write(log, step)
    path = tmp_path / LOG
    path.write_bytes(path.read_bytes()[:-20])
    run = read_log(path)
    assert [entry["step"] for entry in run.entries] == [1]
    assert run.unreadable == 1
    write(begun(tmp_path, checkpoint(tmp_path, 1)), 2, reward=9.0)
    run = read_log(path)
    assert [(entry["step"], entry["values"]["reward"]) for entry in run.entries] == [(1, 1.0), (2, 9.0)]


def test_a_resume_drops_the_lines_of_later_steps(tmp_path):
    log = begun(tmp_path)
    for step in (1, 2, 3, 4):
        write(log, step)
    write(begun(tmp_path, checkpoint(tmp_path, 2)), 3, reward=33.0)
    run = read_log(tmp_path / LOG)
    assert [entry["values"]["reward"] for entry in run.entries] == [1.0, 2.0, 33.0]
    assert run.resumed_from == [2]
    assert len((tmp_path / LOG).read_text().splitlines()) == 6, "the log is only ever added to"


def test_seconds_of_all_starts_are_added_up(tmp_path):
    rows = [{"step": 1, "time": 5.0}, {"step": 2, "time": 9.0}, {"resumed_from": 1}, {"step": 2, "time": 3.0}]
    text = "".join(json.dumps(row | ({"values": {}} if "step" in row else {})) + "\n" for row in rows)
    (tmp_path / LOG).write_text(text)
    assert read_log(tmp_path / LOG).seconds == 12.0


def test_a_new_run_sets_the_log_of_an_earlier_one_aside(tmp_path):
    write(begun(tmp_path), 1)
    write(begun(tmp_path), 5)
    assert [line["step"] for line in lines(tmp_path)] == [5]
    assert json.loads((tmp_path / "log-1.jsonl").read_text())["step"] == 1


def test_a_run_that_goes_on_elsewhere_takes_the_log_along(tmp_path):
    log = begun(tmp_path / "old")
    for step in (1, 2):
        write(log, step)
    write(begun(tmp_path / "new", checkpoint(tmp_path / "old", 1)), 2, reward=7.0)
    assert [e["values"]["reward"] for e in read_log(tmp_path / "new" / LOG).entries] == [1.0, 7.0]
    assert len(lines(tmp_path / "old")) == 2


def test_a_log_that_cannot_be_written_does_not_end_the_training(tmp_path):
    from accelerate.state import PartialState

    PartialState()
    log = begun(tmp_path)
    (tmp_path / LOG).unlink()
    (tmp_path / LOG).mkdir()
    write(log, 1)
    assert log.path is None
    write(log, 2)


def test_nothing_is_written_before_a_run_begins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(RunLog(), 1)
    assert list(tmp_path.iterdir()) == []
