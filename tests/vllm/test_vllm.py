"""Rollouts from a real vLLM engine on the CPU (`make test-vllm`, in an environment of its own).

Several steps in colocate mode, with weights synced: the same completions for one process and for two.
"""

import functools
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils.other import get_free_port

from grpo_ext import compat
from grpo_ext.algorithms.keyed_random import completion_keys
from grpo_ext.batching.sizes import ChunkSizes
from grpo_ext.rollouts.transcript import Transcript
from grpo_ext.sampling.vllm import VllmServer, seeds_of
from tests.support.launch import ROOT
from tests.support.server import generation_settings

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="needs the environment of `make test-vllm`, which has vLLM"
)
SCRIPT = Path(__file__).with_name("train.py")
STEPS = 3


def environment() -> dict[str, str]:
    quiet = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **quiet}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    from tests.vllm.train import save_model

    root = tmp_path_factory.mktemp("vllm")

    @functools.cache
    def launch(processes: int, control: str = "", url: str = "", lag: int = 0) -> list[dict[str, Any]]:
        folder = root / f"{processes}{control}{lag if url else ''}"
        save_model(folder / "model")
        command = [sys.executable, str(SCRIPT), str(folder), control, *([url, str(lag)] if url else [])]
        if processes > 1:
            config = ROOT / "recipes" / "accelerate" / "cpu_2.yaml"
            launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
            command = [*launcher, "--main_process_port", "0", *command[1:]]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=600, cwd=ROOT)
        if control in ("sync", "masks"):
            assert done.returncode != 0
            return [{"error": done.stderr}]
        assert done.returncode == 0, done.stderr[-3000:]
        return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(processes)]

    return launch


def completions(results: list[dict[str, Any]], step: int, steps: int = STEPS) -> list[Any]:
    """Prompt and token ids of one step, in global order."""
    rows_of_step = []
    for process in results:
        rows = len(process["sampled"]) // steps
        rows_of_step += process["sampled"][step * rows : (step + 1) * rows]
    return rows_of_step


def differences(results: list[dict[str, Any]]) -> list[float]:
    """Mean difference of vLLM's and the trainer's log-probabilities, by step."""
    name = "sampling/sampling_logp_difference/mean"
    return [line[name] for line in results[0]["log"] if name in line]


def test_completions_do_not_depend_on_the_number_of_processes(run):
    one, two = run(1), run(2)
    for step in range(STEPS):
        assert len(completions(one, step)) == 16
        assert completions(one, step) == completions(two, step), step


def test_without_the_seeds_they_would(run):
    assert completions(run(1), 0) != completions(run(2, "seeds"), 0)
    assert completions(run(1, "seeds"), 0) != completions(run(2, "seeds"), 0)


def test_completions_of_a_group_differ(run):
    rows = completions(run(1), 0)
    for start in range(0, 16, 4):
        assert len({tuple(ids) for _, ids in rows[start : start + 4]}) > 1


def test_the_engine_gets_the_new_weights(run):
    assert run(1)[0]["moved"] > 1.0
    synced, stale = differences(run(1)), differences(run(1, "unchecked"))
    print(f"log-probability difference by step: {synced}; without new weights: {stale}")
    assert len(synced) == len(stale) == STEPS
    assert max(synced) < 2e-3
    assert max(stale[1:]) > 20 * max(synced)


def test_a_run_whose_weights_do_not_arrive_ends(run):
    assert "vLLM's log-probabilities of the" in run(1, "sync")[0]["error"]


def test_masks_that_this_platform_does_not_return_are_refused_by_name(run):
    """vLLM 0.31 returns them from its Model Runner V2, which it does not run on a CPU."""
    error = run(1, "masks")[0]["error"]
    assert "ConfigError: vLLM does not start with {'return_sampling_mask': True}" in error
    assert "requires Model Runner V2" in error


def test_this_platform_returns_no_experts_though_vllm_takes_the_option():
    assert re.fullmatch(r"vLLM [\d.+a-z]+ returns no experts on a CPU", str(compat.why_no_experts("colocate")))


@pytest.mark.parametrize("how", ["alone", "merged"])
def test_the_engine_samples_with_the_adapter_that_is_trained(run, how):
    one, two = run(1, how), run(2, how)
    for step in range(STEPS):
        assert completions(one, step) == completions(two, step), step
    assert one[0]["moved"] > 1.0
    print(f"{how}: log-probability difference by step: {differences(one)}")
    assert max(differences(one)) < 2e-3


def test_the_log_is_that_of_one_process(run):
    for line, other in zip(run(1)[0]["log"][:STEPS], run(2)[0]["log"][:STEPS]):
        for name in ("loss", "reward", "entropy", "grad_norm"):
            assert line[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5), name


@pytest.fixture(scope="module")
def server(tmp_path_factory, request):
    """A vLLM server on the CPU, and TRL's client of it. Weights go to a server over NCCL, which no CPU has."""
    from trl.generation.vllm_client import VLLMClient

    from tests.vllm.train import save_model

    folder = tmp_path_factory.mktemp("server")
    save_model(folder / "model")
    port = get_free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder / "model")]
    command += ["--dtype", "float32", "--port", str(port), "--max-model-len", "128", "--enforce-eager"]
    command += ["--logprobs-mode", "processed_logprobs", "--worker-extension-cls", "tests.vllm.on_the_cpu.FileWeights"]
    command += getattr(request, "param", [])
    env = environment() | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        yield VLLMClient(base_url=f"http://127.0.0.1:{port}", connection_timeout=240)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def test_a_server_samples_by_the_seeds_however_prompts_are_sent(server):
    prompts = [[5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16]]
    rows = torch.arange(3).repeat_interleave(4)
    keys = completion_keys(3, 1, 0, 0, rows, torch.arange(4).repeat(3))
    transcripts = [Transcript(key, prompt_ids=prompts[i // 4]) for i, key in enumerate(keys.tolist())]
    seeds = seeds_of(transcripts, 4)

    def ask(rows: list[Transcript]) -> list[list[int]]:
        return [row.ids for row in VllmServer(generation_settings(), server).generate(rows, None, ChunkSizes(4))]

    def ask_for_one(prompt: list[int], seed: int) -> list[int]:
        answer = server.generate(prompts=[prompt], n=1, max_tokens=12, generation_kwargs={"seed": seed})
        return answer["completion_ids"][0]

    together = ask(transcripts)
    assert together == ask(transcripts[:8]) + ask(transcripts[8:])
    assert together == [ask_for_one(prompts[i // 4], seeds[i]) for i in range(12)]  # as colocated ones
    assert len({tuple(ids) for ids in together}) > 8
    unseeded = server.generate(prompts=prompts, n=4, max_tokens=12)["completion_ids"]
    assert unseeded != together


@pytest.mark.parametrize("server", [["--enable-lora", "--max-lora-rank", "8"]], indirect=True)
def test_a_server_samples_with_the_adapter_alone(run, server):
    results = run(1, "alone", server.base_url, 1)
    assert results[0]["moved"] > 1.0
    print(f"log-probability difference by step: {differences(results)}")
    assert max(differences(results)) < 2e-3
    assert max(line.get("sampling/ratio_max", 0.0) for line in results[0]["log"]) > 1.01


@pytest.mark.parametrize("lag", [1, 2])
def test_a_server_that_samples_ahead_has_the_weights_that_are_named(run, server, lag):
    url, steps = server.base_url, 5
    one, two = run(1, "", url, lag), run(2, "", url, lag)
    for step in range(steps):
        assert completions(one, step, steps) == completions(two, step, steps), step
    synced, stale = differences(one), differences(run(1, "unchecked", url, lag))
    print(f"lag {lag}, log-probability difference by step: {synced}; without new weights: {stale}")
    assert max(synced) < 2e-3
    assert max(stale) > 20 * max(synced)
    assert max(line.get("sampling/ratio_max", 0.0) for line in one[0]["log"]) > 1.2
