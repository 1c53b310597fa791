"""prime-rl's default loss, on a CPU. None of the given objectives is like it, so `LOSS` is the exact one.

`compute_loss` divides by a count of tokens that `train` sums over a step's micro-batches and ranks before the first
forward, and `train` turns FSDP's mean over ranks into their sum; both are written here, as `train` needs GPUs.
Advantages are rewards without their group's mean, as `GRPOAlgorithm.score_group` computes them.
"""

from typing import Any

import torch
from prime_rl.configs.trainer import DefaultLossConfig
from prime_rl.trainer.rl.loss import compute_loss, setup_rl_loss_fn

from tests.conform import given
from tests.conform.given import GROUP, Gradient, Objective, Refused, Row, Split, gradient_of, log_probs, scores

NAME, VERSION = "prime-rl", "0.8.0, commit 559b4477 of 2026-08-21"
ENTRY = (
    "compute_loss with the default loss (DPPO), dppo_mask_low and dppo_mask_high 0.002; its count of tokens as in train"
)
REQUIRES = (
    "prime-rl @ git+https://github.com/PrimeIntellect-ai/prime-rl@559b44772e471d1538537b8805cc77f3824a5e64",
    "prime-rl-configs @ git+https://github.com/PrimeIntellect-ai/prime-rl@559b44772e471d1538537b8805cc77f3824a5e64"
    "#subdirectory=packages/prime-rl-configs",
    "prime-pydantic-config==0.4.3",
    "jaxtyping==0.3.11",
    "beartype==0.23.1",
    "wadler-lindig==0.1.8",
    "tomli-w==1.2.0",
    "loguru==0.7.3",
    "wandb==0.31.0",
    "protobuf==7.36.2",
    "platformdirs==4.14.7",
    "pydantic==2.14.3",
    "pydantic-core==2.50.4",
    "annotated-types==0.8.0",
    "typing-inspection==0.4.5",
)
OBJECTIVES = ("dapo",)  # the same mean over a step's tokens
IN_ONE_PROCESS = True
SPLITS = tuple(split for split in given.SPLITS if split.rollouts == 1)
FARTHEST, REGULARIZER = 0.002, 1e-3  # `dppo_mask_low`, `dppo_mask_high`: a few tokens are masked; `kl_tau`


def advantages(rows: list[Row]) -> list[float]:
    groups = [rows[start : start + GROUP] for start in range(0, len(rows), GROUP)]
    return [row.reward - sum(one.reward for one in group) / GROUP for group in groups for row in group]


def LOSS(objective: Objective, rows: list[Row], policy: Any, reference: Any) -> torch.Tensor:
    """Tokens whose probability moved too far in the advantage's direction have no policy term; arXiv 2602.04879."""
    total, tokens = torch.zeros(()), 0
    for row, advantage in zip(rows, advantages(rows), strict=True):
        logps_TV = scores(policy, row)
        for place, word in enumerate(row.ids):
            if not row.trained[place]:
                continue
            logp, before = logps_TV[place, word], row.sampler_logps[place]
            moved = float(logp.detach().exp() - torch.tensor(before, dtype=logp.dtype).exp())
            too_far = moved > FARTHEST if advantage > 0 else moved < -FARTHEST
            if not too_far:
                total = total - advantage * (logp - before).exp()
            total = total + REGULARIZER * (logp - before) ** 2
            tokens += 1
    return total / tokens


def gradient(objective: Objective, split: Split, rows: list[Row], policy: Any, reference: Any) -> Gradient:
    config = DefaultLossConfig(dppo_mask_low=FARTHEST, dppo_mask_high=FARTHEST, kl_tau=REGULARIZER)
    found, of_rows = setup_rl_loss_fn(config), advantages(rows)
    masks = [torch.tensor(row.trained, dtype=torch.bool) for row in rows]
    batches = [range(len(rows))[start : start + split.micro_batch] for start in range(0, len(rows), split.micro_batch)]
    if len(batches) % split.processes:
        raise Refused("ranks have different numbers of micro-batches")
    tokens = sum(int(mask.sum()) for mask in masks)

    def loss(chosen: range) -> torch.Tensor:
        logps = [log_probs(policy, rows[number]) for number in chosen]
        before = [torch.tensor(rows[number].sampler_logps, dtype=logps[0].dtype) for number in chosen]
        value, _ = compute_loss(
            logps,
            before,
            None,
            [torch.full_like(logp, of_rows[number]) for logp, number in zip(before, chosen, strict=True)],
            [masks[number] for number in chosen],
            **{"rl_weights": None, "ce_weights": None, "ref_kl_weights": None, "rl_loss_fn": found},
            **{"rl_scale": tokens, "ce_scale": 1, "ref_kl_scale": 1},
        )
        return value

    return gradient_of(policy, *[lambda batch=batch: loss(batch) for batch in batches])
