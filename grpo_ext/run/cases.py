"""`trainer.rerun(step, cases=[...])`: a step with other settings, beside the step as it was.

The rerun trains to the step. Before its optimizer moves the weights, the step runs once more as it was and once for
each case: from the same weights, completions, rewards, optimizer state and dropout. So a difference is the setting's
alone, where two runs would also differ by the steps before. Everything is restored before the step goes on.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch

from ..config import GRPOConfig
from ..errors import ConfigError, MemoryShortageError, PrecisionError, did_you_mean
from ..forward.columns import ADVANTAGES
from ..rollouts.batch import RolloutBatch
from ..rollouts.settings import advantage_rule
from ..rollouts.source import Rollouts
from ..runtime.attributes import temporarily_set
from ..runtime.collectives import shards_parameters
from ..settings import decides, named
from ..step.optimizer_step import StepPlanner
from ..step.record import StepRecord
from ..view import TrainerView
from .case_comparison import ALL, StepResult, Tensors, alike
from .rounding import ROUNDING, relative
from .trail import origins_of, rewards_of

Case = Mapping[str, Any]  # settings by name
_CANNOT = ConfigError, MemoryShortageError, PrecisionError  # on all processes together


def attributes_of(view: TrainerView, case: Case) -> dict[str, Any]:
    """A trainer's attributes by TRL's names, with its `args`, in a case; a ConfigError for what a case cannot have."""
    args, known, groups = copy.copy(view.args), named("case"), getattr(view.optimizer, "param_groups", None)
    changes = (
        "a case has the step's completions, model and optimizer, and changes advantages, loss or the update's size"
    )
    for name, value in case.items():
        advantages = decides(name, "advantages") and name != "scale_rewards"
        teacherless = name == "teacher_kl_coef" and (value is None) == (view.teacher_model is not None)
        epsilons = [args.adam_epsilon] if groups is None else [group.get("eps") for group in groups]
        unweighted = name == "reward_weights" and value is not None
        weights = len(value) if isinstance(value, list | tuple) and all(isinstance(w, Real) for w in value) else 0
        reasons = [
            (name not in known, did_you_mean(name, known, changes, cutoff=0.8)),
            (
                args.fp16 or shards_parameters(view.accelerator),
                "under FSDP, DeepSpeed or fp16 the gradient is in parts, or scaled",
            ),
            (name == "beta" and not view.beta, "the run has beta=0, and so no reference"),
            (teacherless, "it is a number with a teacher, and None without one"),
            (advantages and args.dynamic_sampling, "with dynamic_sampling it decides completions"),
            (unweighted and weights != len(view.reward_funcs), "give one weight for each reward function"),
            (
                name == "adam_epsilon" and args.adam_epsilon not in epsilons,
                f"no group of parameters of the optimizer has the run's eps={args.adam_epsilon}",
            ),
        ]
        for applies, reason in reasons:
            if applies:
                raise ConfigError(f"{name}={value!r} cannot be a case of a step: {reason}")
    vars(args).update(case)
    args.check()
    return view.attributes_for(args, case)


@dataclass
class Cases:
    """Runs a step with the settings of each case."""

    view: TrainerView
    rollouts: Rollouts
    planner: StepPlanner
    cases: Sequence[Case]
    trail: Mapping[int, Any]  # the rollout batches in the run's record
    start: dict[str, float] = field(default_factory=dict)  # attributes of the trainer that the step itself moves
    compared: list[Any] = field(default_factory=list)  # for each case; pairs are the run's and the case's

    def run(self, step: StepRecord) -> None:
        """Compare a step, whose clipped gradient the optimizer is about to get, with each case.

        A case that cannot be compared has a "reason" instead.
        """
        weights = {name: weight for name, weight in self.view.policy.named_parameters() if weight.requires_grad}
        of_step = {weight: weight.grad for weight in weights.values()}
        for case in self.cases:
            self.compared.append({"case": case, "title": ", ".join(f"{name}={value}" for name, value in case.items())})
        try:
            run, noise = self._as_it_was(step, weights)
            for comparison in self.compared:
                try:
                    comparison |= {"noise": noise} | self._compare(comparison, step, weights, run)
                except _CANNOT as error:
                    comparison["reason"] = str(error)
        except _CANNOT as error:
            for comparison in self.compared:
                comparison["reason"] = str(error)
        finally:
            for weight, gradient in of_step.items():
                weight.grad = gradient

    def _as_it_was(self, step: StepRecord, weights: Tensors) -> tuple[StepResult, dict[str, float]]:
        """The step by the settings of the run, and how far its gradient and update are from what it made before."""
        args, clipped = self.view.args, _gradients(weights)
        update = self._update(weights, args)
        run = self._run({"args": args}, weights, step.rollout)
        noise = {
            "gradient": alike(clipped, run.clipped)[ALL]["difference"],
            "update": alike(update, run.update)[ALL]["difference"],
        }
        apart = noise["gradient"] + relative(step.norm, run.norm, least=0.0)  # clipping hides a factor
        if not apart <= ROUNDING["gradient again"][args.bf16]:
            raise ConfigError(
                f"the gradient of the step differs by {apart:.1e} of its norm when it is computed again (a random "
                "loss, or an override of training_step), so a case cannot be compared with it."
            )
        return run, noise

    def _compare(
        self, comparison: Mapping[str, Any], step: StepRecord, weights: Tensors, run: StepResult
    ) -> dict[str, Any]:
        view, batch, case = self.view, step.rollout, comparison["case"]
        attributes, size = attributes_of(view, case), len(batch)
        if any(decides(name, "advantages") for name in case):
            if not torch.equal(self._advantages(size), torch.hstack([*batch[ADVANTAGES]])):
                called = self.rollouts.worker.known_rewards is None
                again = "the reward functions gave others when they were called again, " if called else ""
                raise ConfigError(
                    f"it changes advantages, and those of this step do not follow from the rewards in the record: "
                    f"{again}an override made them, or the record has sums (of more than 1,024 completions)."
                )
            with view.having(attributes):
                batch = batch.having(ADVANTAGES, self._advantages(size))
        other = self._run(attributes, weights, batch)
        for row in step.tokens:  # those of this process
            pairs = zip(*(part.tokens[row]["coefficient"] for part in (run, other)), strict=True)
            step.cases.setdefault(row, {})[comparison["title"]] = [after - before for before, after in pairs]
        return {
            "gradient": alike(run.gradient, other.gradient),
            "update": alike(run.update, other.update),
            "values": {name: [run.values.get(name), value] for name, value in other.values.items()},
        }

    def _run(self, attributes: dict[str, Any], weights: Tensors, batch: RolloutBatch) -> StepResult:
        """The step of these completions by these attributes of the trainer; the weights stay as they are."""
        view, record, args = self.view, StepRecord(with_gradients=False), attributes["args"]
        view.policy.zero_grad()
        with view.unlogged(), view.having(self.start | attributes), temporarily_set(self.planner, record=record):
            attempt = self.planner.add_gradients(view.model_wrapped, batch)
            values = attempt.step.metrics.reduce()
            attempt.end(values["loss"])
        record.gather()
        gradient = {name: part.clone() for name, part in _gradients(weights).items()}
        most = args.max_grad_norm or 0.0
        norm = float(torch.nn.utils.clip_grad_norm_(weights.values(), most if most > 0 else math.inf))
        return StepResult(gradient, _gradients(weights), norm, self._update(weights, args), values, record.tokens)

    def _update(self, weights: Tensors, args: GRPOConfig) -> Tensors:
        """What the optimizer makes of the gradient; weights and optimizer stay as they are."""
        optimizer, before = self.view.optimizer, {name: weight.detach().clone() for name, weight in weights.items()}
        state, groups = {**optimizer.state}, [{**group} for group in optimizer.param_groups]
        optimizer.state.update({weight: copy.deepcopy(values) for weight, values in state.items()})
        for group in optimizer.param_groups:
            # the schedule's factor stays
            group["lr"] = group["lr"] * (args.learning_rate / (self.view.args.learning_rate or 1.0))
            if group.get("eps") == self.view.args.adam_epsilon:
                group["eps"] = args.adam_epsilon
        optimizer.step()
        optimizer.state.clear()
        optimizer.state.update(state)
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            group.update(values)
        update = {name: weight.detach() - before[name] for name, weight in weights.items()}
        for name, weight in weights.items():
            weight.data.copy_(before[name])
        return update

    def _advantages(self, size: int) -> torch.Tensor:
        """The advantages of the step by the settings of now; none where the record has no rewards of its rollout."""
        view, current = self.view, self.rollouts.current
        part, completions = origins_of(self.trail, view.state.global_step + 1, size)
        if current is None or len(completions) != len(current.batch):
            return torch.empty(0)
        rewards_BF = rewards_of(completion["rewards"].values() for completion in completions)
        return advantage_rule(view).advantages(rewards_BF, current.batch.loss_masks)[part]


def _gradients(weights: Tensors) -> dict[str, torch.Tensor]:
    """Zero for a weight that does not take part."""
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in weights.items()}
