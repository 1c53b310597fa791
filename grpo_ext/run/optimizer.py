"""The optimizer and the schedule of a run: checked against the trained weights, recorded, compared on resume.

Differs from transformers, which steps whatever weights an optimizer holds, and loads a checkpoint's state into an
optimizer of a different class, or with its weights in a different order. Called by run.keeper, and where a run begins.
"""

import hashlib
from collections.abc import Callable, Collection
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer

from ..errors import ModelError
from ..runtime.attributes import temporarily_set
from ..runtime.messages import logger
from ..view import TrainerView
from .fingerprint import plain
from .record import Identity

# entries of a group that a schedule moves, or that say how a step is computed, not what it is
_NOT_COMPARED = {"lr", "initial_lr", "params", "param_names", "foreach", "fused", "capturable", "differentiable"}


def check_weights(optimizer: Any, model: torch.nn.Module) -> None:
    """Refuse an optimizer that holds none of the trained weights; warn of one that lacks some."""
    if not hasattr(optimizer, "param_groups"):  # None, or what stands for DeepSpeed's
        return
    held = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    absent = [name for name in trained if id(model.get_parameter(name)) not in held]
    name = type(optimizer).__name__
    if 0 < len(absent) < len(trained):
        logger.warning_once(
            f"{len(absent)} of {len(trained)} trained weights are in no group of the optimizer {name}, so they stay as "
            f"they are: {', '.join(absent[:3])}{', ...' if absent[3:] else ''}."
        )
    # a property `param_groups` may hold copies of the weights, which an optimizer keeps on another device
    elif absent and "param_groups" in vars(optimizer):
        raise ModelError(
            f"the optimizer {name} holds none of the {len(trained)} weights that are trained (for example {absent[0]}),"
            " so nothing would be learned. Build it from the trainer's model, in create_optimizer. A peft_config adds "
            "weights after an optimizer of model.parameters() was built: pass the result of peft.get_peft_model "
            "instead, and build the optimizer from its parameters."
        )


def _described(optimizer: Any, model: torch.nn.Module) -> Identity:
    """The class of an optimizer, and of each group the names of its weights, in order, and its values at the start."""
    names, groups = {id(p): name for name, p in model.named_parameters()}, getattr(optimizer, "param_groups", [])
    described: Identity = {"optimizer.class": type(optimizer).__qualname__, "optimizer.groups": len(groups)}
    for number, group in enumerate(groups):
        weights = [names.get(id(weight), "a weight of a different model") for weight in group["params"]]
        digest = hashlib.sha256("\n".join(weights).encode()).hexdigest()[:8]
        values = {n: value for n, value in group.items() if n not in _NOT_COMPARED and not callable(value)}
        values["lr"] = group.get("initial_lr", group.get("lr"))
        values["weights"] = f"{len(weights)} weights (hash of their names {digest}) from {', '.join(weights[:1])} on"
        described |= {f"optimizer.group {number} {name}": plain(value) for name, value in values.items()}
    return described


class RunOptimizer:
    def __init__(self, view: TrainerView) -> None:
        self.view = view
        self._described: Identity = {}

    def identity(self) -> Identity:
        """What is compared on resume, of the optimizer and the schedule that there are by now."""
        optimizer, schedule = self.view.optimizer, self.view.lr_scheduler
        # described before its first step, and before an engine replaces its weights
        if optimizer is not None and not isinstance(optimizer, AcceleratedOptimizer):
            check_weights(optimizer, self.view.policy)
            if schedule is not None and getattr(schedule, "optimizer", optimizer) is not optimizer:
                raise ModelError(
                    f"the schedule {type(schedule).__name__} moves the learning rate of another optimizer than this "
                    "run's; build it from the optimizer that you pass with it, or pass none."
                )
            self._described = _described(optimizer, self.view.policy)
        return self._described | ({} if schedule is None else {"lr_scheduler": type(schedule).__qualname__})

    def load(self, load: Callable[[], None], changes: Collection[str]) -> None:
        """Load both states; a schedule of another class, where it is allowed, begins at its start."""
        if "lr_scheduler" not in changes:
            load()
            return
        starts = [dict(group) for group in self.view.optimizer.param_groups]
        with temporarily_set(self.view.lr_scheduler, load_state_dict=lambda state: None):
            load()
        for group, start in zip(self.view.optimizer.param_groups, starts, strict=True):
            group.update(start)
