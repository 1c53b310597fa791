"""What a step computes for each token, layer and completion, where a step is run again (`run.rerun`).

Differs from logged values: nothing is averaged. Filled by `assemble_loss` for each micro-batch, and by `fill`
once the parameters hold the gradient of the step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..algorithms.digests import layer_of
from ..algorithms.losses import LossConfig, TokenBatch, TokenLoss, clip_indicators
from ..batching.micro_batches import MicroBatch
from ..forward.columns import SAMPLER_LOGPS, TEACHER_LOGPS
from ..forward.runner import ForwardRunner
from ..rollouts.batch import RolloutBatch
from ..runtime.collectives import full_tensor, gather_lists
from .inputs import LossInputs
from .statistics import StepPlan


@dataclass
class StepRecord:
    """A step, as this process computes it."""

    with_gradients: bool  # also the gradient of each completion: one more backward pass for each
    # by row of the step, columns with one value for each token: see `add`
    tokens: dict[int, dict[str, list[Any] | None]] = field(default_factory=dict)
    layers: dict[str, float] = field(default_factory=dict)  # norms of their gradients, before clipping
    # by row of the step: the norm of the completion's own gradient, and its cosine with the gradient of the step
    gradients: dict[int, dict[str, float]] = field(default_factory=dict)
    # by row of the step: by the title of a case, how far it changes each token's coefficient
    cases: dict[int, dict[str, list[float]]] = field(default_factory=dict)
    norm: float | None = None  # of the gradient before clipping
    rollout: RolloutBatch = field(init=False)  # the completions of the step, those of all processes
    # once the gradient is there: runs all completions of this process again, without gradients
    forward_again: Callable[[], None] = lambda: None
    moved: bool = False  # the weights are those after the step

    def add(
        self,
        cfg: LossConfig,
        micro_batch: LossInputs,
        batch: TokenBatch,
        loss: TokenLoss,
        entropies_S: torch.Tensor,
        shares_S: torch.Tensor,
    ) -> None:
        """Record the tokens of a micro-batch: log-probabilities and entropies in nats, shares of the step's loss.

        The coefficient of a token is the derivative of the loss, without entropy bonus and router term, with respect to
        its log-probability: the gradient is the sum of coefficients times gradients of log-probabilities.
        """
        rows, lengths = micro_batch.part.rows, micro_batch.lengths
        if not micro_batch.part.weight or len(rows) != len(lengths):
            return  # repeated to keep processes in step, or with rows of a user's override
        clipped = [batch.spread(part).bool() for part in clip_indicators(cfg, loss, batch).values()]
        clipped += [batch.spread(loss.outside_bounds_B1)] if loss.outside_bounds_B1 is not None else []
        coefficients_S = torch.zeros_like(shares_S)
        if shares_S.requires_grad:
            (coefficients_S,) = torch.autograd.grad(shares_S.sum(), batch.logps_S, retain_graph=True)
        columns: dict[str, torch.Tensor | None] = {
            "mask": batch.mask_S.long(),
            "sampler": micro_batch.columns.get(SAMPLER_LOGPS, batch.sampling_logps_S),
            "old": batch.logps_S if batch.old_logps_S is None else batch.old_logps_S,
            "training": batch.logps_S,
            "ratio": batch.spread(loss.ratio),
            "kl": loss.kl_S,
            "teacher": micro_batch.columns.get(TEACHER_LOGPS),
            "clipped": torch.stack(clipped).any(0) if clipped else None,
            "entropy": entropies_S,
            "share": shares_S,
            "coefficient": coefficients_S,
        }
        if self.moved:
            columns = {"after": batch.logps_S}
        for name, values in columns.items():
            parts = [None] * len(rows) if values is None else values.detach().split(lengths)
            for row, part in zip(rows, parts, strict=True):
                of_row = None if part is None else part.tolist()
                self.tokens.setdefault(row, {}).setdefault(name, of_row)  # the first: the step's own forward

    def fill(
        self,
        rollout: RolloutBatch,
        plan: StepPlan,
        forwards: ForwardRunner,
        policy: Any,
        run: Callable[[LossInputs], torch.Tensor],
        run_again: Callable[[Sequence[MicroBatch], Callable[[LossInputs], Any]], None],
    ) -> None:
        """Record gradients, which the parameters hold, and the completions that add nothing to the step."""
        accelerator, scale, self.rollout = forwards.accelerator, 1.0, rollout
        if accelerator.scaler is not None:  # fp16
            scale = float(accelerator.scaler.get_scale())
        parameters = {name: p for name, p in policy.named_parameters() if p.grad is not None}
        squares: dict[str, float] = {}
        for name, parameter in parameters.items():
            gradient, layer = full_tensor(parameter.grad), layer_of(name)
            squares[layer] = squares.get(layer, 0.0) + _dot(gradient, gradient)
        self.layers = {layer: square**0.5 / scale for layer, square in squares.items()}
        others = sorted({*range(len(rollout))} - {*plan.rows})
        mine = [] if forwards.sharded else others[forwards.group_number :: forwards.groups]
        further = [MicroBatch((row,)) for row in mine]

        def forward(parts: Sequence[MicroBatch]) -> None:
            with forwards.without_gradients(policy):
                run_again(parts, run)

        forward(further)
        self.forward_again = lambda: forward([*plan.micro_batches, *further])
        if not self.with_gradients:
            return
        length = sum(squares.values()) ** 0.5
        of_step = [(parameter, parameter.grad) for parameter in parameters.values()]

        def backward(micro_batch: LossInputs) -> None:
            policy.zero_grad()
            (run(micro_batch) * scale).backward()
            pairs = [(parameter.grad, gradient) for parameter, gradient in of_step if parameter.grad is not None]
            norm = sum(_dot(own, own) for own, _ in pairs) ** 0.5
            cosine = sum(_dot(*pair) for pair in pairs) / (norm * length) if norm and length else 0.0
            self.gradients[micro_batch.part.rows[0]] = {"norm": norm / scale, "cosine": cosine}

        try:
            run_again(plan.alone(), backward)
        finally:
            for parameter, gradient in of_step:
                parameter.grad = gradient

    def gather(self) -> None:
        """Take what the other processes have recorded; a collective."""
        for tokens, gradients, cases in gather_lists([(self.tokens, self.gradients, self.cases)]):
            self.tokens |= tokens
            self.cases |= cases
            self.gradients |= gradients


def _dot(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.double() * other.double()).sum())
