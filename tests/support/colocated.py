"""Stands in for a vLLM engine of this process: TRL's own `VLLMGeneration` starts it, sends it weights and asks it."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from trl.generation import vllm_generation
from trl.trainer import grpo_trainer

from tests.support.tiny import tiny_model, tiny_tokenizer


class Params(SimpleNamespace):
    """vLLM's `SamplingParams`."""

    min_tokens, seed, stop, stop_token_ids = 0, None, (), ()

    def clone(self) -> Params:
        return copy.copy(self)


class Engine:
    """Samples by the seed of each row, as vLLM's engine with `logprobs_mode="processed_logprobs"`."""

    started: list[Engine] = []

    def __init__(self, return_sampling_mask: bool = False, **options: Any) -> None:
        assert options["logprobs_mode"] == "processed_logprobs"
        self.returns_masks, self.options, self.policy = return_sampling_mask, options, tiny_model()
        self.asked: list[Params] = []
        runner = SimpleNamespace(model_runner=SimpleNamespace(model=self))
        executor, config = SimpleNamespace(driver_worker=runner), SimpleNamespace(max_model_len=128)
        self.llm_engine = SimpleNamespace(model_executor=executor, model_config=config)
        self.started.append(self)

    def load_weights(self, weights: Any) -> None:
        self.policy.load_state_dict({name: value.detach().clone() for name, value in weights}, strict=False)

    def reset_prefix_cache(self) -> None:
        pass

    def generate(self, prompts: Any, sampling_params: Any, lora_request: Any, use_tqdm: bool) -> list[Any]:
        if self.returns_masks and min(params.top_k for params in sampling_params) <= 0:
            raise ValueError("sampling distribution replay requires top_k > 0")
        self.asked += sampling_params
        return [self.sample(row["prompt_token_ids"], params) for row, params in zip(prompts, sampling_params)]

    def sample(self, prompt: list[int], params: Params) -> Any:
        generator, ids, logps, masks = torch.Generator().manual_seed(params.seed), [], [], []
        ends = {1, *params.stop_token_ids, *tiny_tokenizer().convert_tokens_to_ids(list(params.stop))}
        while len(ids) < params.max_tokens and ends.isdisjoint(ids[-1:]):
            scores = self.scores(torch.tensor([prompt + ids]), params, len(ids))
            ids.append(int(torch.multinomial(scores.exp(), 1, generator=generator)))
            logps.append({ids[-1]: SimpleNamespace(logprob=float(scores[0, ids[-1]]), rank=1)})
            masks.append(scores[0].isfinite().nonzero().flatten().tolist())
        reason = "stop" if ids[-1] in ends else "length"
        completion = SimpleNamespace(token_ids=ids, logprobs=logps, finish_reason=reason)
        if self.returns_masks:
            completion.sampling_mask = self.masks_of(masks)
        return SimpleNamespace(prompt_token_ids=prompt, outputs=[completion])

    def scores(self, ids: torch.Tensor, params: Params, position: int) -> torch.Tensor:
        with torch.no_grad():
            scores: Any = self.policy(input_ids=ids).logits[:, -1] / params.temperature
        if position < params.min_tokens:
            scores[:, 1] = -torch.inf
        filters: list[Any] = [MinPLogitsWarper(params.min_p)] if params.min_p else []
        filters += [TopKLogitsWarper(params.top_k)] if params.top_k > 0 else []
        filters += [TopPLogitsWarper(params.top_p)] if params.top_p < 1 else []
        for each in filters:
            scores = each(ids, scores)
        return scores.log_softmax(-1)

    def masks_of(self, kept_ids: list[list[int]]) -> Any:
        """What it returns of the ids that were kept."""
        return SimpleNamespace(token_ids=kept_ids)


class Generation(vllm_generation.VLLMGeneration):
    def _init_vllm(self) -> None:
        # TRL leaves a rank there, which a further trainer would take for a launcher's
        with mock.patch.dict(os.environ):
            super()._init_vllm()


def stand_in(put: Callable[..., None], kind: Callable[..., Any] = Engine) -> list[Engine]:
    """Let trainers of this process start a stand-in with `vllm_mode="colocate"`; returns those that were started."""
    put(Engine, "started", [])
    put(grpo_trainer, "VLLMGeneration", Generation)
    put(vllm_generation, "is_vllm_available", lambda: True)
    put(vllm_generation, "LLM", kind, raising=False)
    put(vllm_generation, "SamplingParams", Params, raising=False)
    return Engine.started
