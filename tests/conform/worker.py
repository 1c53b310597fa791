"""Runs an adapter in its environment and writes how far its updates are from the exact one, as JSON.

    python -m tests.conform.worker ADAPTER FILE [OBJECTIVE ...]

As one process all splits of one process, as several (torchrun) those of as many.
"""

import contextlib
import functools
import importlib.util
import json
import math
import os
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from tests.conform import exact, given

BESIDE = ("torch", "transformers", "trl", "deepspeed")
DEFAULTS: dict[str, Any] = {
    "OBJECTIVES": tuple(name for name in given.OBJECTIVES if name != "rloo"),
    "DEFINITION": exact.Definition(),
    "SPLITS": given.SPLITS,
    "DTYPE": torch.float64,  # of the policy; the first split runs in float32 too
    "IN_ONE_PROCESS": False,  # whether it computes what several processes do
    "REASONS": {},  # why an objective, or else a split, is wrong: a clause and the public issue
}
NEEDED = ("NAME", "VERSION", "ENTRY", "gradient")
PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))


def load(path: str) -> Any:
    """An adapter, with the defaults of what it leaves out."""
    spec = importlib.util.spec_from_file_location(f"adapter_{Path(path).stem}", path)
    assert spec is not None
    assert spec.loader is not None
    adapter = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = adapter
    spec.loader.exec_module(adapter)
    whole = SimpleNamespace(**{**DEFAULTS, **vars(adapter)})
    if missing := [name for name in NEEDED if not hasattr(whole, name)]:
        raise ValueError(f"{path} has no {', '.join(missing)}")
    if whole.DTYPE not in (torch.float64, torch.float32):
        raise ValueError(f"DTYPE is {whole.DTYPE}; use torch.float64 or torch.float32")
    if not whole.SPLITS or {split.processes for split in whole.SPLITS} - {1, 2}:
        raise ValueError("SPLITS has at least one split, of one or two processes")
    if unknown := {*whole.OBJECTIVES} - {*given.OBJECTIVES}:
        raise ValueError(f"OBJECTIVES has {sorted(unknown)}; it is a tuple of some of {[*given.OBJECTIVES]}")
    return whole


def error(found: given.Gradient, wanted: given.Gradient) -> float:
    """norm(found - wanted) / norm(wanted), over all parameters, in float64; infinite where a number is not finite."""

    def norm(gradient: given.Gradient) -> float:
        return sum(float(part.detach().double().square().sum()) for part in gradient.values()) ** 0.5

    zero = torch.zeros(())
    parts = {name: found.get(name, zero) - wanted.get(name, zero) for name in wanted.keys() | found.keys()}
    ratio = norm(parts) / norm(wanted)
    return ratio if math.isfinite(ratio) else math.inf


def checked(found: Any, policy: Any) -> given.Gradient:
    """A gradient as an adapter returns it, if it is one."""
    if not isinstance(found, dict):
        raise TypeError(f"gradient returned {type(found).__name__}, not a dictionary of tensors by names of parameters")
    known = dict(policy.named_parameters())
    if unfit := [name for name in found if name not in known or found[name].shape != known[name].shape]:
        raise ValueError(f"the policy has no parameter {unfit[0]!r} of shape {tuple(found[unfit[0]].shape)}")
    if PROCESSES > 1 and not dist.is_initialized():
        raise RuntimeError("the processes did not join: torch.distributed is not initialised")
    return found


def largest(number: float) -> float:
    """The largest of all processes' numbers."""
    numbers = [number] * PROCESSES
    if PROCESSES > 1:
        dist.all_gather_object(numbers, number)
    return max(numbers)


def cell(adapter: Any, objective: given.Objective, split: given.Split, wanted: given.Gradient, dtype: Any) -> Any:
    """The error of an update; or why the trainer refused it, or why it ended."""
    policy = given.model(objective, dtype)
    reference = given.model(objective, dtype, seed=1) if objective.kl else None
    try:
        found = checked(adapter.gradient(objective, split, given.read(), policy, reference), policy)
        return {"error": largest(error(found, wanted))}
    except given.Refused as reason:
        return {"refused": str(reason) or "it gives no reason"}
    except Exception as failure:
        traceback.print_exc()
        if PROCESSES > 1:
            raise  # other processes may wait for this one
        return {"failed": f"{type(failure).__name__}: {failure}".splitlines()[0][:200]}


def main(path: str, file: str, *objectives: str) -> None:
    adapter = load(path)
    splits = [split for split in adapter.SPLITS if split.processes == PROCESSES or adapter.IN_ONE_PROCESS]
    cells = []
    for name in (name for name in objectives or adapter.OBJECTIVES if name in adapter.OBJECTIVES):
        objective = given.OBJECTIVES[name]
        policy, reference = (given.model(objective, torch.float64, seed) for seed in (0, 1))
        loss = functools.partial(exact.loss, objective, given.read(), policy, reference, adapter.DEFINITION)
        wanted = given.gradient_of(policy, loss)
        for split in splits:
            for dtype in dict.fromkeys((adapter.DTYPE, torch.float32) if split is splits[0] else (adapter.DTYPE,)):
                with contextlib.redirect_stdout(sys.stderr):
                    found = cell(adapter, objective, split, wanted, dtype)
                cells.append({"objective": name, "split": split.name, "dtype": str(dtype)[6:], **found})
    if os.environ.get("RANK", "0") == "0":
        about: dict[str, Any] = {
            name.lower(): getattr(adapter, name) for name in ("NAME", "VERSION", "ENTRY", "REASONS")
        }
        about["left"] = [] if adapter.IN_ONE_PROCESS else [one.name for one in adapter.SPLITS if one.processes == 2]
        about["beside"] = [f"{name} {sys.modules[name].__version__}" for name in BESIDE if name in sys.modules]
        Path(file).write_text(json.dumps({**about, "cells": cells}))


if __name__ == "__main__":
    main(*sys.argv[1:])
