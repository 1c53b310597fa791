"""A `generate` that a test puts in the place of a model's own."""

import random
from typing import Any

import torch

GROUP = 4


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
