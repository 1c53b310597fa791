"""The gradients that a real trainer hands to its optimizer, and how far their mean is from an exact gradient.

The policy stays, or moves between two fixed places: the optimizer notes the gradient of each step and puts the weights
where the next step is to find them. Shapes: M blocks of steps with completions of their own, D parameters.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from grpo_ext import GRPOConfig, GRPOTrainer
from tests.support.tiny import config_kwargs

from .objectives import GENERATIONS
from .policy import LONGEST, PROMPTS, model, reward, tokenizer

STEP, ROLLOUT = 256, 4096  # completions; every step has all prompts equally often
PROMPT_ROWS = list(PROMPTS) * (2 * ROLLOUT // GENERATIONS // len(PROMPTS))


class Noting(torch.optim.Optimizer):
    """Notes gradients instead of following them; `places` take turns, one for each pass over a rollout batch."""

    def __init__(self, policy: torch.nn.Module, places: list[torch.Tensor], steps: int) -> None:
        super().__init__(policy.parameters(), {"lr": 0.0})
        self.policy, self.places, self.steps = policy, places, steps
        self.gradients: list[torch.Tensor] = []

    def place(self) -> None:
        turn = len(self.gradients) // self.steps % len(self.places)
        vector_to_parameters(self.places[turn].float(), self.policy.parameters())

    def step(self, closure: Any = None) -> None:
        found = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self.policy.parameters()]
        self.gradients.append(-parameters_to_vector(found).double())  # of what is maximised
        self.place()


def gradients(
    folder: Path,
    completions: int,
    places: list[torch.Tensor],
    cls: type[GRPOTrainer] = GRPOTrainer,
    rewards: Any = reward,
    **settings: Any,
) -> torch.Tensor:
    """The gradients at the last of one or two places, (M, D), from this many completions, with a trainer's `settings`.

    Gradients from the same completions are averaged. A reference model and a teacher have the parameters of `model`.
    """
    policy, step = model(), settings.get("global_batch_size", STEP)
    passes, steps = max(settings.get("num_iterations", 1), len(places)), ROLLOUT // step
    base = {
        **{"global_batch_size": step, "rollout_batch_size": ROLLOUT, "per_device_train_batch_size": step},
        **{"num_generations": GENERATIONS, "max_completion_length": LONGEST, "rollout_chunk_size": None},
        **{"max_steps": completions // step * passes, "max_grad_norm": 0.0, "shuffle_dataset": False},
        **{"loss_aggregation": "sequence_sum", "use_cpu": True, "trail": False, "logging_steps": 10**6},
    }
    if "scale_rewards" not in settings:
        base["advantage_estimator"] = "group_centered"
    noting = Noting(policy, places, steps)
    trainer = cls(
        model=policy,
        reward_funcs=rewards,
        args=GRPOConfig(**config_kwargs(folder, **{**base, **settings})),
        train_dataset=Dataset.from_dict({"prompt": PROMPT_ROWS}),
        processing_class=tokenizer(),
        teacher_model=model() if "teacher_kl_coef" in settings else None,
        optimizers=(noting, torch.optim.lr_scheduler.LambdaLR(noting, lambda _: 1.0)),
    )
    noting.place()
    trainer.train()
    by_pass = torch.stack(noting.gradients).view(-1, passes, steps, len(places[0]))
    return (by_pass[:, -1] if len(places) > 1 else by_pass.mean(1)).flatten(0, 1)


@dataclass(frozen=True)
class Comparison:
    """A mean gradient beside an exact one."""

    factor: float  # the mean is this many times the exact gradient, and what is left
    factor_error: float  # one standard error
    left: float  # the norm of what is left, without its noise, over that of the mean gradient
    smallest: float  # the least `left` for which `norm` comes to 4, on average
    norm: float  # of what is left, as a normal deviate of the same probability
    projection: float  # of what is left on a fixed direction, in standard errors
    noise: float  # the variance of a block's gradient, over the squared norm of the mean

    @property
    def biased(self) -> bool:
        return max(self.norm, abs(self.projection)) > 4


def left_over(found_D: torch.Tensor, exact_D: torch.Tensor) -> float:
    """The norm of what is left of a gradient beside an exact one, over the gradient's own norm."""
    fitted_D = found_D @ exact_D / (exact_D @ exact_D) * exact_D
    return float((found_D - fitted_D).norm() / found_D.norm())


def compare(gradients_MD: torch.Tensor, exact_D: torch.Tensor, direction_D: torch.Tensor) -> Comparison:
    """Fit the exact gradient and test what is left of the mean; errors are those of independent blocks.

    Without a bias, M times the squared norm of what is left is a weighted sum of chi-squares. A chi-square with its
    mean and variance (Satterthwaite), and the cube root of that (Wilson-Hilferty), make it a normal deviate.
    """
    blocks, unit_D = len(gradients_MD), exact_D / exact_D.norm()
    along_M = gradients_MD @ unit_D
    left_MD = gradients_MD - along_M[:, None] * unit_D
    mean_D, projected_M = left_MD.mean(0), left_MD @ direction_D
    variance = left_MD.var(0).sum()  # the trace of the covariance, and below that of its square
    centred_MM = (left_MD - mean_D) @ (left_MD - mean_D).T
    squares = (centred_MM - centred_MM.diag().diag()).square().sum() / (blocks * (blocks - 1))
    freedom, statistic = variance**2 / squares, mean_D.square().sum() * blocks / variance
    centre, deviation = 1 - 2 / (9 * freedom), (2 / (9 * freedom)).sqrt()  # of the cube root, without a bias
    without_noise = (mean_D.square().sum() - variance / blocks).clamp(min=0)
    undetected = ((centre + 4 * deviation) ** 3 - 1) * variance / blocks
    signal = gradients_MD.mean(0).square().sum() - gradients_MD.var(0).sum() / blocks
    return Comparison(
        factor=float(along_M.mean() / exact_D.norm()),
        factor_error=float(along_M.std() / exact_D.norm()) / math.sqrt(blocks),
        left=float((without_noise / signal).sqrt()),
        smallest=float((undetected / signal).sqrt()),
        norm=float((statistic ** (1 / 3) - centre) / deviation),
        projection=float(projected_M.mean() / projected_M.std()) * math.sqrt(blocks),
        noise=float(gradients_MD.var(0).sum() / signal),
    )
