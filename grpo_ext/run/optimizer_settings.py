"""Settings of the optimizer that a resumed run has changed on purpose.

transformers restores the optimizer and the scheduler with the settings they had when the checkpoint was written, so
that another `learning_rate` would have no effect. Used while a checkpoint is read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

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
