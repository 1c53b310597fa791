"""`trainer.rerun(step, cases=[...])`: a step with other settings, beside the step as it was.

The rerun trains to the step. Before its optimizer moves the weights, the step runs once more as it was and once for
each case: from the same weights, completions, rewards, optimizer state and dropout. So a difference is the setting's
alone, where two runs would also differ by the steps before. Everything is restored before the step goes on.
"""

import copy
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..config import GRPOConfig
from ..errors import ConfigError, MemoryShortageError, PrecisionError, did_you_mean
from ..forward.columns import ADVANTAGES
from ..rollouts.batch import RolloutBatch
from ..rollouts.settings import advantage_rule
from ..rollouts.source import Rollouts
from ..runtime.attributes import temporarily_set
from ..settings import decides, named
from ..step.optimizer_step import StepPlanner
from ..step.record import StepRecord
from ..view import TrainerView
from .case_comparison import ALL, StepResult, Tensors, alike
from .rounding import ROUNDING, relative
from .trail import origins_of, rewards_of

Case = Mapping[str, Any]  # settings by name


def title_of(case: Case) -> str:
    return ", ".join(f"{name}={value}" for name, value in case.items())


def attributes_of(view: TrainerView, case: Case) -> dict[str, Any]:
    """A trainer's attributes by TRL's names, with its `args`, in a case; a ConfigError for what a case cannot have."""
    if not isinstance(case, Mapping) or {*map(type, case)} != {str}:
        raise ConfigError(f"cases: {case!r} is not a mapping from names of settings to values, as {{'epsilon': 0.1}}.")
    args, known, rate = copy.copy(view.args), named("case"), view.args.learning_rate
    # the loop may make the optimizer later
    groups = getattr(view.optimizer, "param_groups", [{"eps": args.adam_epsilon, "params": ()}])
    changes = "a case has the step's completions, model and optimizer, and changes advantages, loss or update size"
    for name, value in case.items():
        advantages = decides(name, "advantages") and name != "scale_rewards"
        weights = name == "reward_weights" and value is not None
        reasons = {
            did_you_mean(name, known, changes, cutoff=0.8): name not in known,
            "under FSDP, DeepSpeed or fp16 the gradient is in parts, or scaled": args.fp16 or view.sharded,
            "the optimizer holds copies of the weights, which a step would move": not all(
                set(view.policy.parameters()).issuperset(group["params"]) for group in groups
            ),
            "the run has beta=0, and so no reference": name == "beta" and not view.beta,
            "it is a number with a teacher, and None without one": name == "teacher_kl_coef"
            and (value is None) == (view.teacher_model is not None),
            "with dynamic_sampling it decides completions": advantages and args.dynamic_sampling,
            "give one weight for each reward function": weights
            and (not isinstance(value, list | tuple) or len(value) != len(view.reward_funcs)),
            f"the optimizer has no eps={args.adam_epsilon}": name == "adam_epsilon"
            and all(group.get("eps") != args.adam_epsilon for group in groups),
            f"the optimizer's rate is not a part of learning_rate={rate}": name == "learning_rate"
            and any(group.get("initial_lr", rate) != rate or not rate for group in groups),
        }
        for reason, applies in reasons.items():
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

    @functools.cached_property
    def weights(self) -> Tensors:
        return {name: weight for name, weight in self.view.policy.named_parameters() if weight.requires_grad}

    def run(self, step: StepRecord) -> None:
        """Compare a step, whose clipped gradient the optimizer is about to get, with each case.

        A case that cannot be compared gets a "reason" instead.
        """
        of_step = {weight: weight.grad for weight in self.weights.values()}
        run_again = functools.cache(lambda: self._as_it_was(step))
        for case in self.cases:
            compared: dict[str, Any] = {"case": case, "title": title_of(case)}
            try:
                attributes = attributes_of(self.view, case)  # before a step of the optimizer
                compared |= self._compare(case, attributes, step, *run_again())
            except (ConfigError, MemoryShortageError, PrecisionError) as error:  # on all processes together
                compared["reason"] = str(error)
            self.compared.append(compared)
            for weight, gradient in of_step.items():
                weight.grad = gradient

    def _as_it_was(self, step: StepRecord) -> tuple[StepResult, dict[str, float]]:
        """The step by the settings of the run, and how far gradient and update are from those of the first time."""
        args, clipped = self.view.args, self._gradients()
        update = self._update(args)
        if alike(update, self._update(args))[ALL]["difference"] > ROUNDING["gradient again"][0]:
            raise ConfigError(
                "the optimizer draws random numbers, or changes more than its `state` and `param_groups`."
            )
        run = self._run({"args": args}, step.rollout)
        pairs = {"gradient": (clipped, run.clipped), "update": (update, run.update)}
        noise = {what: alike(*pair)[ALL]["difference"] for what, pair in pairs.items()}
        apart = max(noise["gradient"], relative(step.norm, run.norm, least=0.0))  # clipping hides a factor
        if not apart <= ROUNDING["gradient again"][0]:
            raise ConfigError(
                f"the gradient of the step differs by {apart:.1e} of its norm when it is computed again (a random "
                "loss, or an override of training_step), so a case cannot be compared with it."
            )
        return run, noise

    def _compare(
        self, case: Case, attributes: dict[str, Any], step: StepRecord, run: StepResult, noise: dict[str, float]
    ) -> dict[str, Any]:
        view, batch = self.view, step.rollout
        if any(decides(name, "advantages") for name in case):
            if not torch.equal(self._advantages(len(batch)), torch.hstack([*batch[ADVANTAGES]])):
                called = "" if self.rollouts.worker.known_rewards else "functions, called again, gave other rewards, "
                raise ConfigError(
                    "it changes advantages, and those of this step do not follow from the rewards in the record: "
                    f"{called}an override made them, or the record has sums (of more than 1,024 completions)."
                )
            with view.having(attributes):
                batch = batch.having(ADVANTAGES, self._advantages(len(batch)))
        other = self._run(attributes, batch)
        for row in step.tokens:  # those of this process
            pairs = zip(*(part.tokens[row]["coefficient"] for part in (run, other)), strict=True)
            step.cases.setdefault(row, {})[title_of(case)] = [after - before for before, after in pairs]
        return {
            "noise": noise,
            "gradient": alike(run.gradient, other.gradient),
            "update": alike(run.update, other.update),
            "values": {name: [run.values.get(name), value] for name, value in other.values.items()},
        }

    def _run(self, attributes: dict[str, Any], batch: RolloutBatch) -> StepResult:
        """The step of these completions by these attributes of the trainer; the weights stay as they are."""
        view, record, args = self.view, StepRecord(with_gradients=False), attributes["args"]
        view.policy.zero_grad()
        with view.having(self.start | attributes), temporarily_set(self.planner, record=record):
            attempt = self.planner.add_gradients(view.model_wrapped, batch)
            values = attempt.step.metrics.reduce()
            attempt.end(values["loss"])
        record.gather()
        gradient, most = copy.deepcopy(self._gradients()), args.max_grad_norm or 0.0
        # as in the Trainer, 0 or less: no clip
        norm = float(torch.nn.utils.clip_grad_norm_(self.weights.values(), most if most > 0 else math.inf))
        return StepResult(gradient, self._gradients(), norm, self._update(args), values, record.tokens)

    def _update(self, args: GRPOConfig) -> Tensors:
        """What the optimizer makes of the gradient; weights and optimizer stay as they are."""
        optimizer, of_run = self.view.optimizer, self.view.args
        before = {name: weight.detach().clone() for name, weight in self.weights.items()}
        factor = args.learning_rate / (of_run.learning_rate or 1.0)  # that of the schedule stays
        # changed in place, because an optimizer may share them with another; `load_state_dict` would round the state to
        # the type of the weights
        parts = [*_dictionaries_of(optimizer).values()]
        restored = [dict(part) for part in parts]
        try:
            for part in parts:
                part.update({key: copy.deepcopy(value) for key, value in part.items() if key != "params"})
            for group in optimizer.param_groups:
                group["lr"] *= factor
                if group.get("eps") == of_run.adam_epsilon:
                    group["eps"] = args.adam_epsilon
            optimizer.step()
            return {name: weight.detach() - before[name] for name, weight in self.weights.items()}
        finally:
            for name, weight in self.weights.items():
                weight.data.copy_(before[name])
            for part, values in zip(parts, restored, strict=True):
                part.clear()
                part.update(values)

    def _gradients(self) -> Tensors:
        """Zero for a weight that does not take part."""
        return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in self.weights.items()}

    def _advantages(self, size: int) -> torch.Tensor:
        """The advantages of the step by the settings of now; none where the record has no rewards of its rollout."""
        view, current = self.view, self.rollouts.current
        part, completions = origins_of(self.trail, view.state.global_step + 1, size)
        if current is None or len(completions) != len(current.batch):
            return torch.empty(0)
        rewards_BF = rewards_of(completion["rewards"].values() for completion in completions)
        return advantage_rule(view).advantages(rewards_BF, current.batch.loss_masks)[part]


def _dictionaries_of(optimizer: Any) -> dict[int, dict[Any, Any]]:
    """The state and the groups of an optimizer, and of those that it holds; by id, because it may share theirs."""
    values = [part for value in vars(optimizer).values() for part in (value if isinstance(value, list) else [value])]
    parts = {id(part): part for part in (optimizer.state, *optimizer.param_groups)}
    for part in values:
        if isinstance(part, torch.optim.Optimizer):
            parts |= _dictionaries_of(part)
    return parts
