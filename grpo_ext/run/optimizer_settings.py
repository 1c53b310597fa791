"""Settings of the optimizer that a resumed run has changed on purpose, and state that it would miss.

transformers restores the optimizer and the scheduler with the settings they had when the checkpoint was written, so
that another `learning_rate` would have no effect. Used while a checkpoint is read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch

# setting -> its name in an optimizer's parameter groups
CHANGEABLE = {
    "learning_rate": "initial_lr",
    "weight_decay": "weight_decay",
    "adam_beta1": "betas",
    "adam_beta2": "betas",
    "adam_epsilon": "eps",
}


@contextmanager
def settings_kept(optimizer: Any, scheduler: Any, changed: Collection[str]) -> Iterator[None]:
    """Whatever is loaded inside, the `changed` ones of `CHANGEABLE` stay as they are in `optimizer`.

    A learning rate keeps its place in the schedule: the present rate moves by the same factor.
    """
    names = {CHANGEABLE[name] for name in changed if name in CHANGEABLE}
    if not names:
        yield
        return
    chosen = [{name: group[name] for name in names if name in group} for group in optimizer.param_groups]
    yield
    inner = getattr(scheduler, "scheduler", scheduler)  # without Accelerate's wrapper
    for number, (group, values) in enumerate(zip(optimizer.param_groups, chosen)):
        if "initial_lr" in values:
            old, new = group["initial_lr"], values["initial_lr"]
            group["lr"] = group["lr"] * new / old if old else new
            if hasattr(inner, "base_lrs"):
                inner.base_lrs[number], inner._last_lr[number] = new, group["lr"]
        group.update(values)


def fill_missing_state(optimizer: Any) -> None:
    """Give parameters that never had a gradient the state they would begin with, zeros.

    torch saves none for them under FSDP2, and then refuses what it has saved. A model with an image tower has such
    parameters: LLaVA reads the last layer but one.
    """
    known = {parameter: state for parameter, state in optimizer.state.items() if state}
    if not known:
        return
    like, first = next(iter(known.items()))
    tensors = {name: value for name, value in first.items() if isinstance(value, torch.Tensor)}
    if any(value.dim() and value.shape != like.shape for value in tensors.values()):
        return  # factored, or otherwise not of a parameter's shape
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if parameter.requires_grad and parameter not in known:
            optimizer.state[parameter] = {
                name: torch.zeros_like(parameter if value.dim() else value) for name, value in tensors.items()
            }
