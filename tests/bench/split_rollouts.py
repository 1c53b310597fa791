"""How far default rollouts of 1, 2 and 8 processes differ: `python -m tests.bench.split_rollouts QUESTIONS.jsonl`.

A process samples its chunks in one `generate` call, so the shapes of matrices follow from the number of processes, and
rounding may choose another token now and then. Here one process samples the calls of each number of processes, with
SmolLM2-135M and chat prompts of the file's questions, and prints a Markdown table: the share of completions that are
those of one process, token by token.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from grpo_ext.algorithms.keyed_random import TRAIN_STREAM, completion_keys
from grpo_ext.batching.sizes import geometry_of, process_prompts
from grpo_ext.rollouts.keyed import sample_chunk
from recipes.smollm2 import smollm2

PROCESSES = (1, 2, 8)
DTYPES = (torch.float32, torch.bfloat16)
GROUPS, GENERATIONS, ROLLOUTS, TOKENS = 8, 8, 4, 32


def calls(processes: int, together: bool) -> list[range]:
    """The rows of every `generate` call of all processes, for a rollout batch."""
    rows = GROUPS * GENERATIONS
    size = geometry_of({"num_generations": GENERATIONS, "global_batch_size": rows}, processes).rollout_chunk_size
    shares = [process_prompts(GROUPS, GENERATIONS, size, processes, rank) for rank in range(processes)]
    parts = [range(share.start * GENERATIONS, share.stop * GENERATIONS) for share in shares]
    return parts if together else [part[i : i + size] for part in parts for i in range(0, len(part), size)]


def sampled(model: Any, tokenizer: Any, prompts: list[list[int]], parts: list[range], rollout: int) -> list[list[int]]:
    """The completions of a rollout batch, in order."""
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    config = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, max_new_tokens=TOKENS, eos_token_id=tokenizer.eos_token_id
    )
    config.pad_token_id, index = pad, torch.arange(GROUPS * GENERATIONS)
    keys_B = completion_keys(0, TRAIN_STREAM, 0, rollout, index // GENERATIONS, index % GENERATIONS)
    ends, found = [tokenizer.eos_token_id], []
    with torch.no_grad():
        for part in parts:
            rows = [prompts[row // GENERATIONS] for row in part]
            rest = (torch.zeros(len(part), dtype=torch.long), config, ends, torch.device("cpu"), None, True)
            found += sample_chunk(model, rows, keys_B[list(part)], *rest)
    return found


def main(questions: Path) -> None:
    folder, weights = smollm2()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    lines = questions.read_text().splitlines()[: GROUPS * ROLLOUTS]
    messages = [[{"role": "user", "content": json.loads(line)["question"]}] for line in lines]
    prompts = [tokenizer.apply_chat_template(m, add_generation_prompt=True, return_dict=False) for m in messages]
    layouts = {str(n): calls(n, together=True) for n in PROCESSES}
    layouts |= {f"{n}, a call for each chunk": calls(n, together=False) for n in (1, 8)}
    print(f"{weights}; {ROLLOUTS} rollout batches of {GROUPS * GENERATIONS} completions of up to {TOKENS} tokens")
    print("| processes | calls of | " + " | ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES) + " |")
    print("|---|---|" + "---|" * len(DTYPES))
    cells: dict[str, list[str]] = {name: [] for name in layouts}
    for dtype in DTYPES:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        results = {name: [] for name in layouts}
        for rollout in range(ROLLOUTS):
            batch = prompts[rollout * GROUPS : (rollout + 1) * GROUPS]
            for name, parts in layouts.items():
                results[name] += sampled(model, tokenizer, batch, parts, rollout)
        for name, completions in results.items():
            base = results["8, a call for each chunk" if "call" in name else "1"]
            same = sum(one == other for one, other in zip(completions, base, strict=True))
            cells[name].append(f"{same} of {len(base)}")
    for name, row in cells.items():
        print(f"| {name} | {max(map(len, layouts[name]))} | " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
