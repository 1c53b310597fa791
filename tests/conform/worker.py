"""Runs an adapter in its environment and writes how far its updates are from the exact one, as JSON.

    python -m tests.conform.worker ADAPTER FILE [OBJECTIVE ...]

As one process all splits of one process, as several (torchrun) those of as many.
"""

import contextlib
import functools
import importlib.util
import json
import os
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

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


def load(path: str) -> Any:
    """An adapter, with the defaults of what it leaves out."""
    spec = importlib.util.spec_from_file_location(f"adapter_{Path(path).stem}", path)
    assert spec is not None
    assert spec.loader is not None
    adapter = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(adapter)
    whole = SimpleNamespace(**{**DEFAULTS, **vars(adapter)})
    if unknown := {*whole.OBJECTIVES} - {*given.OBJECTIVES}:
        raise ValueError(f"OBJECTIVES has {', '.join(unknown)}; use some of {', '.join(given.OBJECTIVES)}")
    return whole


def error(found: given.Gradient, wanted: given.Gradient) -> float:
    """norm(found - wanted) / norm(wanted), over all parameters, in float64."""

    def norm(gradient: given.Gradient) -> float:
        return sum(float(part.detach().double().square().sum()) for part in gradient.values()) ** 0.5

    zero = torch.zeros(())
    parts = {name: found.get(name, zero) - wanted.get(name, zero) for name in wanted.keys() | found.keys()}
    return norm(parts) / norm(wanted)


def cell(adapter: Any, objective: given.Objective, split: given.Split, wanted: given.Gradient, dtype: Any) -> Any:
    """The error of an update; or why the trainer refused it, or why it ended."""
    policy = given.model(objective, dtype)
    reference = given.model(objective, dtype, seed=1) if objective.kl else None
    try:
        return {"error": error(adapter.gradient(objective, split, given.read(), policy, reference), wanted)}
    except given.Refused as reason:
        return {"refused": str(reason)}
    except Exception as failure:
        traceback.print_exc()
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise  # other processes may wait for this one
        return {"failed": f"{type(failure).__name__}: {failure}".splitlines()[0][:200]}


def main(path: str, file: str, *objectives: str) -> None:
    adapter, processes = load(path), int(os.environ.get("WORLD_SIZE", "1"))
    splits = [split for split in adapter.SPLITS if split.processes == processes or adapter.IN_ONE_PROCESS]
    cells = []
    for name in objectives or adapter.OBJECTIVES:
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
            name.lower(): getattr(adapter, name) for name in ("NAME", "VERSION", "ENTRY", "REASONS", "IN_ONE_PROCESS")
        }
        about["beside"] = [f"{name} {sys.modules[name].__version__}" for name in BESIDE if name in sys.modules]
        Path(file).write_text(json.dumps({**about, "cells": cells}))


if __name__ == "__main__":
    main(*sys.argv[1:])
