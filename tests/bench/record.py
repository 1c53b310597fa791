"""The file that `make bench --json` writes, and the comparison of a bench with an older one."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.table import Table

from grpo_ext.errors import ConfigError
from grpo_ext.run.log import versions
from grpo_ext.tools.stock import OURS, STOCK

from .shapes import Result, Shape


def machine(device: torch.device) -> dict[str, Any]:
    """The kind of machine, without its name."""
    return {
        "system": platform.system(),
        "processor": platform.machine(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
    }


def _cpu() -> str:
    try:  # what platform.processor() leaves empty on Linux
        with open("/proc/cpuinfo") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def record_of(results: Sequence[Result], settings: Mapping[str, Any]) -> dict[str, Any]:
    """All figures as plain values, with when, on what, with what and how they were measured."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(device),
        "versions": versions(),
        "settings": dict(settings),
        "results": [dataclasses.asdict(r) | {"speed_up": r.speed_up} for r in results],
    }
    return json.loads(json.dumps(found, default=str))


def read_record(path: Path, shapes: Sequence[Shape]) -> dict[str, Any]:
    """An older bench that a bench of `shapes` can be compared with.

    Raises:
        ConfigError: no such file, not one that `--json` wrote, or none of the shapes is in it.
    """
    try:
        found = json.loads(path.read_text())
        known = [_key(result["shape"]) for result in found["results"]]
        names = "; ".join(result["shape"]["name"] for result in found["results"] if result["seconds"][STOCK])
        missing = {"machine", "versions", "settings"} - found.keys()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} holds no figures of a bench ({type(error).__name__}: {error}); name a file that "
            "`make bench --json` wrote."
        ) from None
    if missing:
        raise ConfigError(f"{path} does not say its {', '.join(sorted(missing))}; write it again with `--json`.")
    if not any(_key(dataclasses.asdict(shape)) in known for shape in shapes):
        asked = "; ".join(shape.name for shape in shapes)
        raise ConfigError(f"{path} holds none of the shapes of this bench ({asked}); it has {names}.")
    return found


def _key(shape: Mapping[str, Any]) -> str:
    return json.dumps(shape, sort_keys=True)


def compared(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[Table, list[str]]:
    """Old against new milliseconds per token, by shape, trainer and phase; and where the two benches differ.

    Per token, because sampled completions have other lengths every time.
    """
    table = Table(title="Milliseconds per token, old against new")
    for name in ("shape", "trainer", "phase", "old", "new", "old / new"):
        table.add_column(name, justify="left" if name in ("shape", "trainer", "phase") else "right")
    before = {_key(result["shape"]): result for result in old["results"]}
    after = {_key(result["shape"]): result for result in new["results"]}
    notes = [
        f"{part}: {name} was {old[part].get(name)}, is {new[part].get(name)}."
        for part in ("machine", "versions", "settings")
        for name in {**old[part], **new[part]}
        if old[part].get(name) != new[part].get(name)
    ]
    for key, result in after.items():
        name = result["shape"]["name"]
        if key not in before:
            notes.append(f"{name}: not in the old file.")
            continue
        if before[key]["micro"] != result["micro"]:
            notes.append(f"{name}: micro-batches were {before[key]['micro']}, are {result['micro']}.")
        for who in (STOCK, OURS):
            then, now = (_per_token(one, who) for one in (before[key], result))
            for phase in now:
                if then[phase] and now[phase]:
                    figures = (f"{then[phase]:.4g}", f"{now[phase]:.4g}", f"{then[phase] / now[phase]:.2f}x")
                    table.add_row(name, who, phase, *figures)
    return table, notes


def _per_token(result: Mapping[str, Any], who: str) -> dict[str, float]:
    """Milliseconds by phase, of those that the shape is about, and of all of them."""
    seconds, tokens = result["seconds"][who], result["tokens"][who]
    found = {phase: 1000 * seconds[phase] / tokens for phase in Shape(**result["shape"]).phases}
    return {**found, "all": sum(found.values())}
