"""One completion of 8,192 tokens on two processes, each held to less memory than it would need alone.

    python -m tests.bench.long_completion [--tokens 8192] [--limit 3.0]

Trains one step with completions that are given, of a Llama with 4 layers and random weights: two processes that each
have a completion of their own, then two that share each one. First without a limit, which measures the peak; then with
the same limit on the address space of every process. On the CPU, in float32, without gradient checkpointing.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from grpo_ext.tools.check.runs import on_cpus, ranked
from tests.support.launch import ROOT, environment

GIB = 2**30
SHAPE = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "num_attention_heads": 8}


def mapped() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def train(members: int, tokens: int, limit: float | None) -> dict[str, Any]:
    """One step on this process: the peak of the address space and of resident memory above the start, in GiB."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from grpo_ext import GRPOConfig, GRPOTrainer
    from tests.support.tiny import letter_reward, prompts, tiny_tokenizer

    tokenizer = tiny_tokenizer()

    def given(batch: list[str], trainer: Any) -> dict[str, Any]:
        ids = [torch.randint(3, 20, (tokens,), generator=torch.Generator().manual_seed(n)).tolist() for n in (0, 1)]
        asked = [tokenizer(prompt)["input_ids"] for prompt in batch]
        return {"prompt_ids": asked, "completion_ids": [ids[n % 2] for n in range(len(batch))], "logprobs": None}

    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=8, max_position_embeddings=16384, **SHAPE)
        settings: dict[str, Any] = {"global_batch_size": 4, "num_generations": 2, "per_device_train_batch_size": 1}
        settings |= {"max_completion_length": tokens, "max_steps": 1, "bf16": False, "gradient_checkpointing": False}
        settings |= {"sequence_parallel_size": members, "rollout_chunk_size": 2, "loss_type": "dr_grpo"}
        settings |= {
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "scale_rewards": "none",
        }
        args = GRPOConfig(folder, **settings)
        parts: dict[str, Any] = {"train_dataset": prompts(2), "processing_class": tokenizer, "rollout_func": given}
        trainer = GRPOTrainer(LlamaForCausalLM(config), letter_reward, args, **parts)
        start, resident = mapped(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if limit is not None:
            most = start + int(limit * GIB)
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
        trainer.train()
    peak = int(next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmPeak" in line).split()[1])
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    norm = next(line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line)
    return {"mapped": (peak * 1024 - start) / GIB, "resident": (held - resident) / GIB, "grad_norm": norm}


def launch(members: int, tokens: int, limit: float | None) -> str:
    command = [sys.executable, "-m", "tests.bench.long_completion", "--worker", str(members), "--tokens", str(tokens)]
    command += [] if limit is None else ["--limit", str(limit)]
    env = environment(OMP_NUM_THREADS="1", MALLOC_ARENA_MAX="1", **on_cpus(2))
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    workers = [subprocess.Popen(command, env=each, **pipes) for each in ranked(env, 2)]
    texts = [worker.communicate() for worker in workers]
    if any(worker.returncode for worker in workers):
        errors = [line for _, error in texts for line in error.splitlines() if "memory" in line]
        return f"ends: {(errors or [texts[0][1][-300:]])[-1]}"
    found = [json.loads(out.splitlines()[-1]) for out, _ in texts]
    sizes = {name: max(each[name] for each in found) for name in ("mapped", "resident")}
    text = ", ".join(f"{size:.2f} GiB {name}" for name, size in sizes.items())
    return f"trains: {text} above the start; gradient norm {found[0]['grad_norm']:.6f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192, help="of each completion")
    parser.add_argument("--limit", type=float, help="GiB of address space above the start, of each process")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        print(json.dumps(train(options.worker, options.tokens, options.limit)))
        sys.stdout.flush()
        os._exit(0)
    for limit in (None, options.limit):
        for members in (1, 2):
            text = "no limit" if limit is None else f"{limit:g} GiB"
            print(f"sequence_parallel_size={members}, {text}: {launch(members, options.tokens, limit)}", flush=True)
        if options.limit is None:
            break


if __name__ == "__main__":
    main()
