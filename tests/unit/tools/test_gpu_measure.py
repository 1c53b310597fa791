"""`make test-gpu` beyond its tests: which parts it runs, within which time, and what its file holds."""

import copy
import io
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest

from grpo_ext.tools.stock import OURS
from tests.bench import worker
from tests.gpu import measure, parts, processes, pytests, results, scripts, step_profile, steps, two_ranks
from tests.support.gpu import TEST_PARTS

RUN = {"status": "done", "steps": 3, "seconds": 1.0, "phases": {}, "tokens_per_second": 2.0, "peak_mib": 3.0}
RUN |= {"working_mib": 1.0, "form": "packed", "micro_batch": 8}
ABOUT = {"format": results.FORMAT, "toy": True, "machine": {}, "versions": {}, "seconds": 3.0}
TIMES = {"share": 60, "seconds": 2.5}
RESULT = {
    **ABOUT,
    "parts": {
        "bits": {"status": "done", **TIMES, "passed": 3, "failed": {}, "skipped": {}, "figures": {}},
        "1.7B": {"status": "failed", **TIMES, "reason": "an error", "runs": {"a": RUN}, "shapes": [], "ratios": {}},
        "vLLM": {"status": "not run", **TIMES, "reason": "not installed", "figures": {}},
        "profile": {"status": "waiting", **TIMES},
    },
}


def test_the_schema_takes_what_a_measurement_writes(tmp_path):
    results.write(tmp_path / "gpu.json", RESULT)
    assert list(results.problems(json.loads((tmp_path / "gpu.json").read_text()))) == []
    assert [path.name for path in tmp_path.iterdir()] == ["gpu.json"]


@pytest.mark.parametrize(
    ("part", "change", "sentence"),
    [
        ("bits", {"status": "fine"}, "bits has status 'fine', which is not one of done"),
        ("bits", {"reason": "none"}, "bits has status 'done' and a reason"),
        ("bits", {"passed": "3"}, "bits has 'passed' as str"),
        ("bits", {"note": "3"}, "bits has an unknown 'note'"),
        ("vLLM", {"status": "out of time", "reason": None}, "vLLM has 'reason' as NoneType"),
        ("1.7B", {"runs": {"a": {"status": "done", "seconds": 1.0}}}, "a has no 'steps'"),
        ("1.7B", {"runs": {"a": {"status": "failed"}}}, "a has status 'failed' and no reason"),
        ("profile", {"status": "done"}, "profile is done and has neither runs nor figures"),
        ("profile", {"status": "running"}, "profile is running and has neither runs nor figures"),
        ("bits", {"passed": True}, "bits has 'passed' as bool"),
        ("bits", {"figures": {"a": [1, {2}]}}, "1 in 'a' in figures of bits is of type set"),
        ("bits", {"seconds": math.nan}, "bits has 'seconds' as nan"),
        ("1.7B", {"ratios": {"a / b": "2"}}, "ratios of 1.7B has 'a / b' as str"),
        ("1.7B", {"runs": {"a": RUN | {"phases": {"step": None}}}}, "phases of a has 'step' as NoneType"),
        ("1.7B", {"runs": {"a": RUN | {"published": {"seconds": "2"}}}}, "published of a has 'seconds' as str"),
    ],
)
def test_the_schema_names_what_is_wrong(part, change, sentence):
    broken = copy.deepcopy(RESULT)
    broken["parts"][part] |= change
    assert any(problem.startswith(sentence) for problem in results.problems(broken))


def test_numbers_that_json_does_not_have_are_written_as_none(tmp_path):
    results.write(tmp_path / "gpu.json", {"figures": {"a": [math.nan, 1.0], "b": math.inf}})
    assert json.loads((tmp_path / "gpu.json").read_text()) == {"figures": {"a": [None, 1.0], "b": None}}


NCCL = """[rank1]:[W1 ProcessGroupNCCL.cpp:1] Warning: out of memory somewhere before
[rank1]: Traceback (most recent call last):
[rank1]:   File "two_ranks.py", line 1, in <module>
[rank1]:     raise error
[rank1]: torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:77, invalid usage
[rank1]: ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
[rank1]: Last error:
[rank1]: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000
[rank1]:[W2 ProcessGroupNCCL.cpp:2] Warning: destroy_process_group() was not called
"""


def test_the_reason_of_a_rank_is_its_exception_with_all_of_its_message():
    reason = results.reason_in(NCCL)
    assert reason.startswith("torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:77")
    assert reason.endswith("Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000")
    assert not results.of_memory(reason)
    assert results.reason_in("a line\nKilled") == "Killed"


def test_a_warning_about_memory_before_another_error_is_not_the_reason():
    warned = "UserWarning: a step ran out of memory with 8 completions; 4 at a time from now on.\n"
    crash = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
    assert not results.of_memory(results.reason_in(warned + crash))
    assert results.of_memory(results.reason_in(warned + "torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB"))


def test_each_set_of_parts_takes_at_most_twenty_minutes():
    for chosen in parts.SETS.values():
        assert sum(part.share for part in chosen) <= 60 * parts.MINUTES


def test_each_part_of_runs_is_expected_to_end_within_its_share():
    """By the arithmetic of an H100; it grows with the tokens, and stock TRL has a prompt for each completion."""
    expected = {part.name: sum(map(parts.expected_seconds, part.runs)) for part in parts.PARTS if part.runs}
    assert len(expected) == 7
    of_scripts = {part.name: parts.SCRIPT_SECONDS[part.script] for part in parts.PARTS if part.script is not None}
    assert len(of_scripts) == 3
    expected |= of_scripts
    assert [name for name, seconds in expected.items() if seconds > parts_by_name()[name].share] == []
    ours, stock = (parts.expected_seconds(run) for run in parts.SHARED_RUNS[:2])
    assert parts.START < ours < stock
    assert parts.expected_seconds(parts.LONG_RUNS[0]) < parts.expected_seconds(parts.LONG_RUNS[4])


def parts_by_name() -> dict[str, parts.Part]:
    return {part.name: part for part in parts.PARTS}


def test_parts_are_chosen_by_name_and_by_set_in_the_order_in_which_they_run():
    assert [part.name for part in parts.chosen("profile, bits,head")] == ["head", "bits", "profile"]
    assert parts.chosen("figures") == [*parts.SETS["figures"]]
    assert parts.chosen("tests,figures,processes,bits") == [*parts.PARTS]
    with pytest.raises(ValueError, match=r"there is no part 'speed'; there are tests, figures, processes, head, "):
        parts.chosen("head,speed")


def test_names_of_parts_and_runs_are_unlike_and_ratios_name_runs():
    names = [part.name for part in parts.PARTS]
    runs = [run.name for part in parts.PARTS for run in part.runs]
    assert len({*names}) == len(names)
    assert len({*runs}) == len(runs)
    assert {one for part in parts.PARTS for pair in part.ratios.values() for one in pair} <= {*runs}


def test_a_run_that_plan_does_not_expect_to_fit_is_not_started():
    result = steps.measure(steps.toy(parts.LONG_RUNS[0]), end=0.0, device_mib=1.0)
    assert (result["status"], result["reason"][:12]) == ("does not fit", "plan expects")
    assert result["published"]["seconds"] == 1.99


def test_the_worst_status_of_its_runs_is_a_parts():
    assert results.worst(["done", "does not fit", "out of time"]) == "out of time"
    assert results.worst(["done", "done"]) == "done"
    assert results.worst(["does not fit", "failed"]) == "failed"


@pytest.mark.full
def test_a_script_that_ends_early_leaves_what_it_wrote(monkeypatch):
    def run(text: str, seconds: float = 20.0) -> dict:
        monkeypatch.setattr(scripts, "command", lambda name, file, *rest: ["/bin/sh", "-c", text, str(file)])
        return scripts.run_script("any", True, seconds, saved.append)

    saved: list[dict] = []
    written = """echo '{"figures": {"a": 1}}' > $0; """
    assert run(written) == {"status": "done", "figures": {"a": 1}}
    wrong = run(written + "echo wrong >&2; exit 3")
    assert wrong.pop("errors") == {"any": "wrong\n"}
    assert wrong == {"status": "failed", "figures": {"a": 1}, "reason": "wrong"}
    monkeypatch.setattr(processes, "POLL", 0.1)
    late = run(written + "sleep 60", 1.0)
    assert late.pop("reason") == "the script any did not end in 1 s"
    assert late == {"status": "out of time", "figures": {"a": 1}}
    assert {"status": "running", "figures": {"a": 1}} in saved


@pytest.mark.full
def test_a_script_that_failed_before_its_time_ended_has_failed(monkeypatch):
    text = """echo '{"figures": {}, "status": "failed", "reason": "they disagree"}' > $0; sleep 60"""
    monkeypatch.setattr(scripts, "command", lambda name, file, *rest: ["/bin/sh", "-c", text, str(file)])
    result = scripts.run_script("any", True, 1.0, lambda part: None)
    assert (result["status"], result["reason"]) == (
        "failed",
        "they disagree; the script any did not end in 1 s",
    )


def test_a_process_that_a_script_started_ends_with_the_measurement(monkeypatch, tmp_path):
    """As SIGTERM does: it becomes SystemExit, wherever the measurement is."""
    monkeypatch.setattr(processes, "POLL", 0.1)
    pid = tmp_path / "pid"

    def terminate() -> None:
        if pid.exists() and pid.read_text().strip():
            os.kill(os.getpid(), signal.SIGTERM)

    command = ["/bin/sh", "-c", f"sleep 60 & echo $! > {pid}; wait"]
    before = signal.getsignal(signal.SIGTERM)
    processes.exit_when_terminated()
    try:
        with pytest.raises(SystemExit):
            processes.watched(command, os.environ, 20.0, subprocess.DEVNULL, terminate)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended_soon(int(pid.read_text()))


def ended_soon(pid: int) -> bool:
    """Whether a process has ended, or is a zombie that waits for its parent."""
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def test_half_a_line_of_tests_that_were_killed_is_left_out():
    line = json.dumps({"test": "a", "outcome": "passed", "seconds": 1.0, "figures": {}})
    assert pytests.ended(f"{line}\n{line[:20]}")["passed"] == 1
    assert pytests.ended(f"{line}\n{line}\n")["passed"] == 2


def test_a_part_that_raises_does_not_end_those_after_it(monkeypatch, tmp_path):
    file = tmp_path / "gpu.json"

    def run_part(part: parts.Part, is_toy: bool, seconds: float, save: object) -> None:
        if part.name == "head":
            raise ValueError("half a line")
        assert callable(save)
        save({"status": "done", "passed": 1, "failed": {}, "skipped": {}, "figures": {}})

    monkeypatch.setattr(measure, "run_part", run_part)
    monkeypatch.setattr(measure, "exit_when_terminated", lambda: None)
    monkeypatch.setattr(sys, "argv", ["measure", "--toy", "--parts", "head,bits", "--output", str(file)])
    with mock.patch.dict(os.environ):
        assert measure.main() == 1
    written = json.loads(file.read_text())
    assert {name: part["status"] for name, part in written["parts"].items()} == {"head": "failed", "bits": "done"}
    assert written["parts"]["head"]["reason"] == "ValueError: half a line"
    assert list(results.problems(written)) == []


STEP = {"wall": 2.0, "seconds": {"rollout": 1.0, "optimizer": 0.25}, "tokens": 10.0, "peak_mib": 3.0}
STEP |= {"working_mib": 1.0, "peak_reserved_mib": 4.0}


def test_the_seconds_of_a_step_are_those_of_all_of_it_and_of_sampling_its_own():
    whole, sampled = steps.summary([STEP]), steps.summary([STEP], is_sampling=True)
    assert (whole["seconds"], whole["tokens_per_second"], whole["peak_reserved_mib"]) == (2.0, 5.0, 4.0)
    assert (sampled["seconds"], sampled["tokens_per_second"]) == (1.0, 10.0)


def test_the_wall_time_of_a_step_has_what_is_between_its_phases(monkeypatch):
    answers = io.StringIO()
    server = worker._Server(answers)
    monkeypatch.setattr(sys, "stdin", io.StringIO("step\n"))
    server.wait()
    time.sleep(0.02)
    server.report(4.0)
    answer = json.loads(answers.getvalue())
    assert sum(answer["seconds"].values()) == 0.0
    assert answer["wall"] >= 0.02


def test_a_sampler_that_returns_fewer_rows_than_asked_for_fails():
    sampler = mock.Mock()
    sampler._generate_single_turn = lambda prompts: ([[1, 2]], None)
    count = worker._counting(sampler)
    sampler._generate_single_turn([[1]])
    assert count() == 2
    with pytest.raises(RuntimeError, match="sampling returned 1 of 2 completions"):
        sampler._generate_single_turn([[1], [2]])


def test_sampling_out_of_memory_is_not_started_again(monkeypatch):
    started: list[int] = []

    def out_of_memory(run: steps.Run, spec: dict, end: float) -> tuple[dict, list, str]:
        started.append(spec["micro"])
        return {}, [], "torch.OutOfMemoryError: CUDA out of memory."

    monkeypatch.setattr(steps, "_steps", out_of_memory)
    end = time.monotonic() + 60
    assert steps.measure(steps.toy(parts.SAMPLING_RUNS[0]), end, None)["status"] == "does not fit"
    assert len(started) == 1
    trained = steps.toy(steps.Run(parts.FULL, OURS))
    assert steps.measure(trained, end, None)["status"] == "does not fit"
    assert started[1:] == [8, 4, 2, 1]


def test_a_device_in_use_is_said_and_in_the_file(monkeypatch, capsys):
    monkeypatch.setattr(steps, "_steps", lambda run, spec, end: ({"in_use_mib": 9000.0}, [STEP, STEP], None))
    result = steps.measure(steps.toy(parts.SAMPLING_RUNS[0]), time.monotonic() + 60, None)
    assert result["in_use_mib"] == 9000.0
    assert "started with 9000 MiB of the device in use" in capsys.readouterr().err


def event(kind: str, name: str, start: float, length: float) -> dict:
    return {"cat": kind, "name": name, "ts": start, "dur": length}


def test_a_phase_has_the_kernels_launches_waits_and_idle_time_within_it():
    events = [
        event("user_annotation", "phase: step", 0, 1000),
        event("user_annotation", "phase: forward", 100, 400),
        event("user_annotation", step_profile.EDGE, 480, 20),
        event("cuda_runtime", "cudaLaunchKernel", 110, 5),
        event("cuda_runtime", "cudaStreamSynchronize", 300, 50),
        event("cuda_runtime", "cudaDeviceSynchronize", 485, 10),  # at the edge of the phase
        event("kernel", "gemm", 120, 100),
        event("kernel", "gemm", 200, 100),
        event("gpu_memcpy", "Memcpy HtoD", 400, 10),
        event("kernel", "adam", 600, 100),
        event("cuda_driver", "cuLaunchKernelEx", 590, 5),
    ]
    phases = step_profile.by_phase(events)
    forward, rest = phases["forward"], phases["rest"]
    whole = ("launches", "kernels", "copies", "waits")
    assert [forward[column] for column in whole] == [1, 2, 1, 1]
    assert [rest[column] for column in whole] == [1, 1, 0, 0]
    assert [round(1e6 * forward[c]) for c in ("seconds", "busy", "idle", "waited")] == [400, 190, 210, 50]
    assert [round(1e6 * rest[c]) for c in ("seconds", "busy", "idle")] == [600, 100, 500]
    assert step_profile.longest_kernels(events)[0] == {"name": "gemm", "seconds": pytest.approx(2e-4), "count": 2}
    assert step_profile.as_table(phases)[2].startswith("| rest | 0.6 ms | 0.1 ms | 0.5 ms | 1 | 1 | 0 | 0 |")


def test_a_profile_without_kernels_has_no_idle_time_and_fails_on_a_gpu():
    events = [event("user_annotation", "phase: step", 0, 1000), event("cpu_op", "aten::mm", 100, 10)]
    columns = step_profile.by_phase(events)["rest"]
    assert columns["operators"] == 1
    assert not {"busy", "idle"} & columns.keys()
    assert "| rest | 1.0 ms | - | - |" in step_profile.as_table({"rest": columns})[2]
    assert step_profile.without_kernels("step", events, on_gpu=True)["status"] == "failed"
    assert step_profile.without_kernels("step", events, on_gpu=False) == {}
    assert step_profile.without_kernels("step", [*events, event("kernel", "gemm", 1, 1)], on_gpu=True) == {}


def test_of_processes_that_run_together_the_first_failure_is_the_reason():
    rank = "import os, sys, time; rank = int(os.environ['RANK'])\n"
    wrong = rank + "time.sleep(60 if rank == 0 else 0); sys.exit('Error: of ' + os.environ['LOCAL_RANK'])"
    begin = time.monotonic()
    assert two_ranks.run_together([sys.executable, "-c", wrong], 2, 30.0) == ("Error: of 1", "Error: of 1\n")
    assert time.monotonic() - begin < 30
    assert two_ranks.run_together([sys.executable, "-c", rank], 2, 30.0) is None
    late = two_ranks.run_together([sys.executable, "-c", "import time; time.sleep(60)"], 2, 0.5)
    assert late is not None
    assert late[0] == "it did not end in 0 s"


def test_splits_that_disagree_and_seeds_that_agree_fail():
    figures = {"one process": 0.0, "another seed": 1.2, "gloo, micro-batches of 8": 1e-6, "nccl": "Duplicate GPU"}
    assert two_ranks.verdict(figures) == {}
    for split, figure in (("another seed", 0.0), ("gloo, micro-batches of 8", 0.1), ("one process", "killed")):
        assert two_ranks.verdict(figures | {split: figure})["status"] == "failed"
    late = {"gloo, micro-batches of 3": "it did not end in 30 s"}
    assert two_ranks.verdict(figures | late)["status"] == "out of time"
    assert two_ranks.verdict(figures | late | {"another seed": 0.0})["status"] == "failed"


def test_a_measurement_without_a_gpu_says_so(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["measure"])
    monkeypatch.setattr(measure.torch.cuda, "is_available", lambda: False)
    with mock.patch.dict(os.environ), pytest.raises(SystemExit):
        measure.arguments()
    assert "there is no CUDA device; --toy rehearses on the CPU" in capsys.readouterr().err


@pytest.mark.full
def test_a_rehearsal_runs_a_part_of_every_script(tmp_path):
    """`make rehearse-gpu` also runs the parts that are left out here: other shapes by the same script."""
    left_out = ("long sequences", "shared prompt", "bitwise cost", "1.7B", "other forms", "sampling speed")
    rehearsed = [part for part in parts.PARTS if part.name not in left_out]
    file, names = tmp_path / "gpu.json", [part.name for part in rehearsed]
    # three times what a GPU gets: a part has its share of it, also on a machine that does other work
    arguments = ["--toy", "--parts", ",".join(names), "--output", str(file), "--seconds", "7200"]
    command = [sys.executable, "-m", "tests.gpu.measure", *arguments]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
    found = json.loads(file.read_text())
    assert list(results.problems(found)) == []
    assert (done.returncode, {part["status"] for part in found["parts"].values()}) == (0, {"done"})
    assert list(found["parts"]) == names
    tests = {name: part["passed"] for name, part in found["parts"].items() if name in TEST_PARTS}
    assert sum(tests.values()) > 300
    assert {name for name, passed in tests.items() if not passed} == {"flex attention"}
    for part in rehearsed:
        runs = found["parts"][part.name].get("runs", {})
        assert list(runs) == [one.name for one in part.runs]
        assert found["parts"][part.name].get("ratios", {}).keys() == {
            name for name, pair in part.ratios.items() if {*pair} <= {*runs}
        }
        for one, result in zip(map(steps.toy, part.runs), runs.values()):
            rows = one.shape.groups * one.shape.group
            assert (result["steps"], result["micro_batch"]) == (one.rounds, one.micro or rows)
            assert "forward" not in one.options or result["form"] == one.options["forward"]
            assert result["seconds"] > 0
            assert result["peak_mib"] > result["working_mib"] > 0
            assert ("planned_mib" in result) == (one.who == OURS and not one.shape.sample)
    assert {*found["parts"]["profile"]["figures"]["phases"]} >= {"forward", "backward", "optimizer", "sampling"}
