"""`trainer.rerun(step, cases=[...])`: a step with other settings, beside the step as it was.

The rerun trains to the step. Before its optimizer moves the weights, the step runs once more as it was and once for
each case: from the same weights, completions, rewards, optimizer state and dropout. So a difference is the setting's
alone, where two runs would also differ by the steps before. Everything is restored before the step goes on.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..algorithms.digests import layer_groups
from ..errors import ConfigError, did_you_mean
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
from .trail import origins_of, rewards_of

Case = Mapping[str, Any]  # settings by name


def attributes_of(view: TrainerView, case: Case) -> dict[str, Any]:
    """A trainer's attributes by TRL's names, with its `args`, in a case; a ConfigError for what a case cannot have."""
    args, known = copy.copy(view.args), named("case")
    changes = (
        "a case has the step's completions, model and optimizer, and changes advantages, loss or the update's size"
    )
    for name, value in case.items():
        advantages = decides(name, "advantages") and name != "scale_rewards"
        reasons = {
            did_you_mean(name, known, changes, cutoff=0.8): name not in known,
            "under FSDP, DeepSpeed or fp16 the gradient is in parts, or scaled": args.fp16
            or shards_parameters(view.accelerator),
            "the run has beta=0, and so no reference": name == "beta" and not view.beta,
            "with dynamic_sampling it decides completions": advantages and args.dynamic_sampling,
            "give one weight for each reward function": name == "reward_weights"
            and len(value or ()) != len(view.reward_funcs),
        }
        for reason, applies in reasons.items():
            if applies:
                raise ConfigError(f"{name}={value!r} cannot be a case of a step: {reason}")
    vars(args).update(case)
    args.check()
    attributes = {name: getattr(args, name) for name in case if hasattr(view, name)} | {"args": args}
    if {"epsilon", "epsilon_high"} & case.keys():
        high = args.epsilon if args.epsilon_high is None else args.epsilon_high
        attributes |= {"epsilon_low": args.epsilon, "epsilon_high": high}
    if "reward_weights" in case:
        attributes["reward_weights"] = torch.tensor(case["reward_weights"])
    if "entropy_coef" in case:
        attributes["_entropy_bonus_enabled"] = args.use_adaptive_entropy or args.entropy_coef != 0.0
    return attributes


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
        """Compare a step, whose gradient the optimizer is about to get, with each case, and record its coefficients.

        A ConfigError where the gradient, or advantages that a case changes, are other ones when computed again.
        """
        view, batch, size = self.view, step.rollout, len(step.rollout)
        weights = {name: weight for name, weight in view.policy.named_parameters() if weight.requires_grad}
        groups, gradient, held = layer_groups(weights), _gradients(weights), {p: p.grad for p in weights.values()}
        run = self._run({"args": view.args}, weights, batch)
        apart = alike(gradient, _gradients(weights), groups)[ALL]["difference"]
        if not apart <= 1e-2:  # on GPUs kernels add in any order
            raise ConfigError(
                f"the gradient of the step differs by {apart:.1e} of its norm when it is computed again (a random "
                "loss, or an override of training_step), so a case cannot be compared with it."
            )
        follows = torch.equal(self._advantages(size), torch.hstack([*batch[ADVANTAGES]]))
        for case in self.cases:
            attributes, changed = attributes_of(view, case), batch
            with view.having(attributes):
                if follows:
                    changed = batch.having(ADVANTAGES, self._advantages(size))
                elif any(decides(name, "advantages") for name in case):
                    raise ConfigError(
                        f"{case} changes advantages, and those of this step do not follow from the rewards in the "
                        "record: an override made them, or the record has sums (of more than 1,024 completions)."
                    )
            other = self._run(attributes, weights, changed)
            title = ", ".join(f"{name}={value}" for name, value in case.items())
            self.compared.append(
                {
                    "case": case,
                    "title": title,
                    "gradient": alike(run.gradient, other.gradient, groups),
                    "update": alike(run.update, other.update, groups),
                    "values": {name: [run.values.get(name), value] for name, value in other.values.items()},
                }
            )
            for row, columns in step.tokens.items():  # those of this process
                pairs = zip(*(part.tokens[row]["coefficient"] for part in (run, other)), strict=True)
                columns[title] = [after - before for before, after in pairs]
        for weight, of_step in held.items():
            weight.grad = of_step

    def _run(self, attributes: dict[str, Any], weights: Tensors, batch: RolloutBatch) -> StepResult:
        """The step of these completions by these attributes of the trainer; the weights stay as they are."""
        view, record, args = self.view, StepRecord(with_gradients=False), attributes["args"]
        view.policy.zero_grad()
        with view.having(self.start | attributes), temporarily_set(self.planner, record=record):
            attempt = self.planner.add_gradients(view.model_wrapped, batch)
            values = attempt.step.metrics.reduce()
            attempt.end(values["loss"])
        record.gather()
        gradient, before = _gradients(weights), {name: weight.detach().clone() for name, weight in weights.items()}
        torch.nn.utils.clip_grad_norm_(weights.values(), args.max_grad_norm or math.inf)
        optimizer, state = view.optimizer, copy.deepcopy(view.optimizer.state_dict())
        for group in optimizer.param_groups:
            group["lr"] *= args.learning_rate / (view.args.learning_rate or 1.0)  # the schedule's factor stays
            if group.get("eps") == view.args.adam_epsilon:
                group["eps"] = args.adam_epsilon
        optimizer.step()
        optimizer.load_state_dict(state)
        update = {name: weight.detach() - before[name] for name, weight in weights.items()}
        for name, weight in weights.items():
            weight.data.copy_(before[name])
        return StepResult(gradient, update, values, record.tokens)

    def _advantages(self, size: int) -> torch.Tensor:
        """The advantages of the step by the settings of now; none where the record has no rewards of its rollout."""
        view, current = self.view, self.rollouts.current
        part, completions = origins_of(self.trail, view.state.global_step + 1, size)
        if current is None or len(completions) != len(current.batch):
            return torch.empty(0)
        rewards_BF = rewards_of(completion["rewards"].values() for completion in completions)
        return advantage_rule(view).advantages(rewards_BF, current.batch.loss_masks)[part]


def _gradients(weights: Tensors) -> dict[str, torch.Tensor]:
    """Copies; zero for a weight that does not take part."""
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in weights.items()}
