"""Models with a `generate` of their own: by a subclass, on the instance, in a wrapper, under an adapter."""

from __future__ import annotations

import random
from typing import Any

import torch
import transformers
from peft import LoraConfig

from tests.support.tiny import tiny_model

GROUP = 4
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


class Sampler:
    """A `generate` that answers from a prompt and the place in its group alone, and keeps what it was given.

    The shape says what a batch of answers looks like: "ended" at different places, all "short", "long" beyond
    max_completion_length, or padded on the "left".
    """

    def __init__(self, shape: str = "ended") -> None:
        self.shape, self.given = shape, []

    def __call__(self, **kwargs: Any) -> torch.Tensor:
        self.given.append(kwargs)
        rows = []
        for row, (ids, mask) in enumerate(zip(kwargs["input_ids"], kwargs["attention_mask"])):
            source = random.Random(str((ids[mask.bool()].tolist(), row % GROUP, self.shape)))
            width = {"short": 2, "long": 20}.get(self.shape, 10)
            answer = [source.randint(3, 20) for _ in range(width)]
            if self.shape == "ended" and source.random() < 0.7:
                answer[source.randrange(width)] = 1
            if self.shape == "left":
                answer[: source.randrange(3)] = [0] * 2
                answer = answer[:10]
            rows.append(answer + [0] * (width - len(answer)))
        return torch.cat([kwargs["input_ids"], torch.tensor(rows)], dim=1)


class OwnQwen2(transformers.Qwen2ForCausalLM):
    """A subclass."""

    sampler: Sampler

    def generate(self, **kwargs: Any) -> torch.Tensor:
        return self.sampler(**kwargs)


class Wrapper(torch.nn.Module):
    """A wrapper of a transformers model, which answers for it in everything else."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


class OwnWrapper(Wrapper):
    def generate(self, **kwargs: Any) -> torch.Tensor:
        return self.sampler(**kwargs)


def model_with(sampler: Sampler, kind: str) -> Any:
    model = tiny_model()
    if kind == "subclass":
        model.__class__ = OwnQwen2
    elif kind == "wrapper":
        model = OwnWrapper(model)
    elif kind == "instance":
        model.generate = sampler
    object.__setattr__(model, "sampler", sampler)
    return model
