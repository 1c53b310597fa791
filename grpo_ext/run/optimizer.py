"""The optimizer and the schedule of a run: held against the weights that are trained, recorded, compared on resume.

Differs from transformers, which steps whatever weights an optimizer holds, and loads a checkpoint's state into an
optimizer of another kind, or with its weights in another order. Called by run.keeper and where a run begins.
"""

import hashlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.optimizer import AcceleratedOptimizer

from ..errors import ModelError
from ..runtime.attributes import assigned
from ..runtime.collectives import from_main_process
from ..view import TrainerView
from .fingerprint import check_same_run, differences, plain, saved_identity

logger = get_logger(__name__)

# entries of a group that a schedule moves, or that say how a step is computed, not what it is
_NOT_COMPARED = {"params", "param_names", "lr", "initial_lr", "foreach", "fused", "capturable", "differentiable"}
_PLAIN = bool | int | float | str | list | tuple | torch.Tensor | None
_RATES = ("lr", "initial_lr")


def check_weights(optimizer: Any, model: torch.nn.Module) -> str | None:
    """Refuse an optimizer that holds none of the trained weights; a sentence where it lacks some."""
    if not hasattr(optimizer, "param_groups"):  # None, or what stands for DeepSpeed's
        return None
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    trained = {name: id(parameter) for name, parameter in model.named_parameters() if parameter.requires_grad}
    absent = [name for name, identity in trained.items() if identity not in held]
    if not absent:
        return None
    if len(absent) == len(trained):
        if "param_groups" not in vars(optimizer):  # computed: perhaps of copies that it keeps on another device
            return None
        raise ModelError(
            f"the optimizer {type(optimizer).__name__} holds none of the {len(trained)} weights that are trained (for "
            f"example {absent[0]}), so nothing would be learned; build it of the trainer's model, in create_optimizer. "
            "A peft_config adds its weights after an optimizer of model.parameters() was built: pass the result of "
            "peft.get_peft_model instead, and build the optimizer of its parameters. One of another instance of the "
            "model moves only that instance."
        )
    shown = ", ".join(absent[:3]) + (", ..." if len(absent) > 3 else "")
    return (
        f"{len(absent)} of {len(trained)} trained weights are in no group of the optimizer {type(optimizer).__name__}, "
        f"so they stay as they are: {shown}."
    )


def _class_name(part: Any) -> str:
    """The class of an object, with the package that it is from; that of a script by its name alone."""
    root = type(part).__module__.split(".")[0]
    package = f"{root}." if hasattr(sys.modules.get(root), "__path__") else ""
    return package + type(part).__qualname__


def _described(optimizer: Any, model: torch.nn.Module) -> dict[str, Any]:
    """The class of an optimizer, and of each group the names of its weights, in order, and its values at the start."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = getattr(optimizer, "param_groups", [])
    described: dict[str, Any] = {"class": _class_name(optimizer), "groups": len(groups)}
    for number, group in enumerate(groups):
        weights = [names.get(id(parameter), "(not of the model)") for parameter in group["params"]]
        digest = hashlib.sha256("\n".join(weights).encode()).hexdigest()[:8]
        values = {n: v for n, v in group.items() if n not in _NOT_COMPARED and isinstance(v, _PLAIN)}
        values["lr"] = group.get("initial_lr", group.get("lr"))
        values["weights"] = f"{len(weights)} ({', '.join(weights[:1])} ...; {digest} of all names)"
        described[f"group {number}"] = plain(values)
    return described


def _shared(part: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """What both have: another version of torch gives groups further values."""
    pairs = {name: (value, other[name]) for name, value in part.items() if name in other}
    return {name: _shared(*pair) if isinstance(pair[0], dict) else pair[0] for name, pair in pairs.items()}


class RunOptimizer:
    def __init__(self, view: TrainerView) -> None:
        self.view = view
        self._described: dict[str, Any] | None = None  # as it was before an engine wrapped it, and before its first step

    def identity(self) -> dict[str, Any]:
        """What is compared on resume; without what there is not yet."""
        optimizer, schedule = self.view.optimizer, self.view.lr_scheduler
        if optimizer is not None and not isinstance(optimizer, AcceleratedOptimizer):
            self._described = _described(optimizer, self.view.policy)
        names = {} if schedule is None else {"lr_scheduler": _class_name(schedule)}
        return names if optimizer is None else {"optimizer": self._described, **names}

    def begin(self) -> None:
        """Check and describe the optimizer of a run, before an engine replaces the weights in it."""
        if not isinstance(self.view.optimizer, AcceleratedOptimizer) and (
            sentence := check_weights(self.view.optimizer, self.view.policy)
        ):
            logger.warning(sentence)
        self.identity()

    def changes(self, checkpoint: str) -> dict[str, tuple[Any, Any]]:
        """The allowed differences from the checkpoint's; a CheckpointError for any other."""
        saved, current = saved_identity(checkpoint), self.identity()
        if "optimizer" in saved.keys() & current.keys():
            old, new = saved["optimizer"], current["optimizer"]
            saved["optimizer"], current["optimizer"] = _shared(old, new), _shared(new, old)
        fixed = {"optimizer"} if self.view.is_deepspeed_enabled else set[str]()  # the engine has loaded it by now
        current |= {"model": {}, "settings": {}}
        return check_same_run(checkpoint, saved, current, self.view.args.allow_changed_on_resume or (), fixed)

    def load(self, checkpoint: str, load: Callable[[str], None]) -> None:
        """Load the states in a checkpoint; an allowed other optimizer or schedule begins as the user made it."""
        view = self.view
        changes = from_main_process(view.accelerator, lambda: self.changes(checkpoint))
        if "optimizer" not in from_main_process(view.accelerator, lambda: saved_identity(checkpoint)):
            logger.warning(
                f"{checkpoint} does not record its optimizer (an earlier version, or another trainer, wrote it), so its "
                "state is loaded into this one without a comparison."
            )
        for part, old, new in differences(changes):
            logger.warning(f"{part} was {old} in {checkpoint} and is {new} now, as allowed.")
        if "optimizer" in changes:
            logger.warning("The optimizer begins without the checkpoint's state, and the schedule at its start.")
        elif "lr_scheduler" in changes:
            logger.warning("The schedule begins at its start.")
            before = [dict(group) for group in view.optimizer.param_groups]
            with assigned(view.lr_scheduler, load_state_dict=lambda state: None):
                load(checkpoint)
            for group, start in zip(view.optimizer.param_groups, before, strict=True):
                group.update({name: start[name] for name in start if name in _RATES or name not in group})
        else:
            load(checkpoint)
