"""Stands in for a vLLM server and its clients: one set of weights at a time, a seed for each request.

Processes share it through a folder. Weights come in by TRL's own `VLLMGeneration.sync_weights`, and slowly.
"""

import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from trl.generation import vllm_generation
from trl.trainer import grpo_trainer

from grpo_ext import compat
from tests.support.tiny import tiny_model


def generation_settings(**changes: Any) -> Any:
    """What is read of TRL's `VLLMGeneration`, without a connection."""
    settings = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0, "logprobs": 0}
    settings |= {"structured_outputs_regex": None, "generation_kwargs": None, "max_completion_length": 12}
    settings |= {"mask_bound": None, "unfiltered": False, "accelerator": SimpleNamespace(process_index=0)}
    return SimpleNamespace(**{**settings, **changes})


class StandIn:
    """A process's client, and the server itself: it loads what was sent last before it samples."""

    def __init__(self, folder: Path, policy: Any) -> None:
        self.policy, self.folder, self.numbers = policy, folder, itertools.count()
        self.loaded, self.loading = 0, threading.Lock()

    @property
    def sent(self) -> int:
        """How often weights were sent."""
        return len(list(self.folder.glob("*.safetensors")))

    base_url = "http://server"
    config: dict[str, Any] = {"model_config": {"logprobs_mode": "processed_logprobs"}}
    env: dict[str, Any] = {}

    @property
    def session(self) -> Any:
        """Its requests, as far as they are asked for."""
        return SimpleNamespace(get=self.get, post=self.post)

    def get(self, url: str, params: Any) -> Any:
        assert url == "http://server/server_info"
        return SimpleNamespace(status_code=200, json=lambda: {"vllm_config": self.config, "vllm_env": self.env})

    def post(self, url: str, json: dict[str, Any]) -> Any:
        raise AssertionError(f"nothing is asked of {url}")

    def get_server_info(self) -> dict[str, Any]:
        return self.config

    def reset_prefix_cache(self) -> None:
        pass

    def update_named_params(self, described: Any, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        found = {name: value.detach().cpu().contiguous().clone() for name, value in parameters}
        assert found.keys() <= self.policy.state_dict().keys()
        assert not list(self.folder.glob("open_*")), "weights were sent while requests were open"
        time.sleep(0.05)
        number = self.sent + 1
        save_file(found, self.folder / "writing")
        os.replace(self.folder / "writing", self.folder / f"{number}.safetensors")

    def generate(self, prompts: Any, n: int, max_tokens: int, generation_kwargs: Any, **rest: Any) -> dict[str, Any]:
        is_open = self.folder / f"open_{os.getpid()}_{next(self.numbers)}"
        is_open.touch()
        try:
            with self.loading:  # requests come together
                if self.sent > self.loaded:
                    self.loaded = self.sent
                    self.policy.load_state_dict(load_file(self.folder / f"{self.loaded}.safetensors"), strict=False)
            seed = generation_kwargs.get("seed", next(self.numbers))
            answers = [answer for ids in prompts for answer in self.sample(ids, range(seed, seed + n), max_tokens)]
            time.sleep(random.SystemRandom().uniform(0, 0.02))
        finally:
            is_open.unlink()
        return {
            "prompt_ids": prompts,
            "completion_ids": [ids for ids, _ in answers],
            "logprobs": [[[value] for value in values] for _, values in answers],
            "logprob_token_ids": [[[token] for token in ids] for ids, _ in answers],
        }

    def sample(self, prompt: list[int], seeds: Sequence[int], length: int) -> list[tuple[list[int], list[float]]]:
        """Tokens and log-probabilities for each seed."""
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        answers: list[tuple[list[int], list[float]]] = [([], []) for _ in seeds]
        rows_BT = torch.tensor([prompt] * len(seeds))
        for _ in range(length):
            with torch.no_grad():
                logps_BV = self.policy(input_ids=rows_BT).logits[:, -1].log_softmax(-1)
            tokens = [int(torch.multinomial(row.exp(), 1, generator=g)) for row, g in zip(logps_BV, generators)]
            rows_BT = torch.cat([rows_BT, torch.tensor(tokens)[:, None]], dim=1)
            for (ids, logps), row, token in zip(answers, logps_BV, tokens):
                if not ids or ids[-1] != 1:
                    ids.append(token)
                    logps.append(float(row[token]))
            if all(ids[-1] == 1 for ids, _ in answers):
                break
        return answers


def stand_in(folder: Path, put: Callable[[Any, str, Any], None] = setattr, kind: type[StandIn] = StandIn) -> StandIn:
    """Let trainers of this process ask a stand-in; the folder is shared by the processes of one run."""
    folder.mkdir(parents=True, exist_ok=True)
    client = kind(folder, tiny_model())

    class Generation(vllm_generation.VLLMGeneration):
        def _init_vllm(self) -> None:
            if self.accelerator.is_main_process:
                self.vllm_client = client

    put(grpo_trainer, "VLLMGeneration", Generation)
    put(compat, "VLLMClient", lambda **settings: client)
    return client
