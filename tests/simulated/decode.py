"""Run by test_simulated_gpu.py in a process of its own: what sampling a token does on the simulated device, as JSON.

    python -m tests.simulated.decode '{"who": "ours"}'

`who` is ours or stock (transformers' `generate`). Counts are those of a long completion less those of a short one, over
the tokens between, of a Llama with 2 and with 4 layers: what a layer needs, and what a token needs beside its layers.
Settings: `filters` of the configuration; `ends`, tokens that end a completion; `planted`, another
copy to the device and another wait for every token.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from grpo_ext.rollouts import engine
from tests.simulated.device import CUDA, LEDGER, reference_kernels, simulated_gpu
from tests.support.rollouts import sampled_chunk
from tests.support.tiny import tiny_model

ROWS = 16
TOKENS = {"ours": (32, 96), "stock": (4, 12)}  # a short and a long completion; only ours leaves out rows that ended
KINDS = ("launches", "waits", "to_device", "to_host")


class Planted(LogitsProcessor):
    """For every token another copy to the device, and another wait."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + torch.zeros(1).to(scores.device) * float(scores[0, 0])


def sample(model: Any, who: str, tokens: int, filters: dict[str, Any], ends: list[int]) -> None:
    prompts = [[3 + group + token for token in range(8 + group % 3)] for group in range(4) for _ in range(4)]
    config = GenerationConfig(
        max_new_tokens=tokens, do_sample=True, top_k=0, pad_token_id=0, eos_token_id=ends or None, **filters
    )
    if who == "stock":
        ids = torch.tensor([[0] * (10 - len(prompt)) + prompt for prompt in prompts])
        model.generate(input_ids=ids.to(CUDA), attention_mask=(ids > 0).long().to(CUDA), generation_config=config)
        return
    sampled_chunk(model, prompts, torch.arange(ROWS), config, ends, str(CUDA), compact=True)


def per_token(who: str, model: Any, filters: dict[str, Any], ends: list[int]) -> dict[str, Counter[str]]:
    """Counts of each kind by place, for one token."""
    model = model.to(CUDA)
    runs, (fewer, more) = [], TOKENS[who]
    for tokens in (fewer, more):
        LEDGER.reset()
        with torch.no_grad():
            sample(model, who, tokens, filters, ends)
        runs.append({kind: Counter(getattr(LEDGER, kind)) for kind in KINDS})
    short, long = runs
    for kind in KINDS:
        long[kind].subtract(short[kind])
    return {kind: Counter({str(k): n / (more - fewer) for k, n in long[kind].items() if n}) for kind in KINDS}


def main() -> None:
    case = {"who": "ours", "filters": {}, "ends": [], "planted": False, **json.loads(sys.argv[1])}
    torch.set_num_threads(1)
    if case["planted"]:
        filters_of = engine.sampling_filters

        def planted(*args: Any) -> tuple[LogitsProcessorList, Any]:
            filters, recorder = filters_of(*args)
            return LogitsProcessorList([Planted(), *filters]), recorder

        engine.sampling_filters = planted
    sizes = {"tie_word_embeddings": False, "max_position_embeddings": 512, "eos_token_id": None}
    models = [tiny_model("llama", num_hidden_layers=layers, **sizes).eval() for layers in (2, 4)]
    with simulated_gpu(), reference_kernels():
        two, four = (per_token(case["who"], model, case["filters"], case["ends"]) for model in models)
    result: dict[str, Any] = {}
    for kind in KINDS:
        layer = (four[kind].total() - two[kind].total()) / 2
        result[kind] = {"layer": layer, "token": two[kind].total() - 2 * layer, "places": dict(two[kind])}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
