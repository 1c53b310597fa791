"""The rollouts that every trainer gets, and the models whose gradient is compared.

`given.json` has 16 ragged completions of 4 prompts, drawn at random: a group whose rewards are equal, a group with
tokens of a tool, a completion that was cut off; and the sizes of the models.
"""

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

GIVEN: dict[str, Any] = json.loads(Path(__file__).with_name("given.json").read_text())
GROUP, MAX_LENGTH = 4, 12  # completions of a prompt; tokens of a completion (`max_completion_length`)
PAD, END = 0, 1
Gradient = dict[str, torch.Tensor]


class Refused(Exception):
    """A trainer does not accept a split; the message says why, in a clause."""


@dataclass(frozen=True)
class Row:
    """One completion and its prompt."""

    prompt_ids: list[int]
    ids: list[int]
    trained: list[int]  # 1: sampled by the policy, 0: written by a tool
    sampler_logps: list[float]  # log-probabilities when the tokens were sampled
    reward: float


@dataclass(frozen=True)
class Objective:
    """What is optimised, in TRL's terms; its settings are TRL's defaults but for these."""

    name: str
    loss: str  # `loss_type`
    sequence: bool = False  # `importance_sampling_level="sequence"`
    without_cut_off: bool = False  # `mask_truncated_completions`
    kl: float = 0.0  # `beta`, to a reference model
    entropy: float = 0.0  # `entropy_coef`
    top_entropy: float = 1.0  # `top_entropy_quantile`
    router: float = 0.0  # `router_aux_loss_coef`, of a MoE model

    def mask(self, row: Row) -> list[int]:
        """1 for each token of a completion that is trained."""
        cut_off = row.ids[-1] != END
        return [0] * len(row.ids) if self.without_cut_off and cut_off else row.trained


OBJECTIVES = {
    objective.name: objective
    for objective in (
        *(Objective(loss, loss) for loss in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo")),
        Objective("luspo", "luspo", sequence=True),
        Objective("rloo", "rloo"),
        Objective("gspo", "grpo", sequence=True),
        Objective("dapo, truncated masked", "dapo", without_cut_off=True),
        Objective("grpo, truncated masked", "grpo", without_cut_off=True),
        Objective("grpo, KL", "grpo", kl=0.5),
        Objective("dapo, KL", "dapo", kl=0.5),
        Objective("dapo, entropy", "dapo", entropy=0.5),
        Objective("dapo, top entropy", "dapo", top_entropy=0.505),
        Objective("dapo, load balance", "dapo", router=5.0),
    )
}


@dataclass(frozen=True)
class Split:
    """How the 16 completions of a step are divided."""

    micro_batch: int  # completions in a forward
    processes: int = 1
    rollouts: int = 1  # parts in which a step's completions are sampled

    @property
    def name(self) -> str:
        parts = "" if self.rollouts == 1 else f", {self.rollouts} rollouts"
        return f"{self.processes} x {self.micro_batch}{parts}"


SPLITS = (Split(16), Split(5), Split(1), Split(4, rollouts=2), Split(8, 2), Split(2, 2))


def read() -> list[Row]:
    return [Row(**row) for row in copy.deepcopy(GIVEN["rows"])]


def groups(rows: list[Row]) -> list[list[Row]]:
    """The completions of each prompt."""
    return [rows[start : start + GROUP] for start in range(0, len(rows), GROUP)]


def model(objective: Objective, dtype: torch.dtype, seed: int = 0) -> Any:
    """The policy; with another seed the reference. Weights do not depend on torch's version."""
    kind = "qwen2_moe" if objective.router else "qwen2"
    config = AutoConfig.for_model(kind, **GIVEN[kind], router_aux_loss_coef=objective.router)
    made, numbers = AutoModelForCausalLM.from_config(config), np.random.default_rng(seed)
    for name, parameter in made.named_parameters():
        weight = numbers.normal(float("norm" in name), 0.3, tuple(parameter.shape))
        parameter.data = torch.from_numpy(weight.astype(np.float32)).to(dtype)
    if objective.router:
        made.set_experts_implementation("eager")  # grouped products have no float64
    return made.eval()


def log_probs(policy: Any, row: Row) -> torch.Tensor:
    """Log-probabilities of a completion's tokens, (T,), from a forward of this row alone."""
    return scores(policy, row).gather(1, torch.tensor(row.ids)[:, None])[:, 0]


def scores(policy: Any, row: Row, **options: Any) -> torch.Tensor:
    """Log-probabilities of all words at each token of a completion, (T, V)."""
    logits = policy(input_ids=torch.tensor([row.prompt_ids + row.ids]), **options).logits[0]
    return logits[len(row.prompt_ids) - 1 : -1].log_softmax(-1)


def gradient_of(policy: Any, *losses: Callable[[], torch.Tensor]) -> Gradient:
    """The gradient of the sum of losses, one backward pass after the other."""
    policy.zero_grad()
    for loss in losses:
        loss().backward()
    return {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}


def padded(rows: Sequence[Sequence[float]], width: int = MAX_LENGTH, **options: Any) -> torch.Tensor:
    """Numbers of rows as a tensor (B, width) with zeros on the right."""
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], **options)


def left_padded(rows: Sequence[Sequence[float]], value: float = PAD) -> torch.Tensor:
    """Numbers of rows as a tensor (B, longest row), `value` on the left."""
    width = max(map(len, rows))
    return torch.tensor([[*[value] * (width - len(row)), *row] for row in rows])
