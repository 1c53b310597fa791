"""`manifest.json` in a run's folder: settings, versions and data of a run, and hashes of its result.

One entry for each call of `train()`, so a resumed run has several. Written by the main process when training starts
and when it ends; read by people and by `grpo-ext`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import platform
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError
from ..runtime.determinism import environment
from .fingerprint import state_hashes

MANIFEST = "manifest.json"
_PACKAGES = ("grpo_ext", "trl", "transformers", "accelerate", "torch", "peft", "datasets", "safetensors", "tokenizers")


@functools.cache
def versions() -> dict[str, str | None]:
    """Installed versions of what a run depends on."""
    installed: dict[str, str | None] = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            installed[name] = None
    return installed


def opening(trainer: Any, fingerprint: dict[str, Any], resumed_from: str | None) -> dict[str, Any]:
    """The entry of a training that starts."""
    config = getattr(trainer.accelerator.unwrap_model(trainer.model), "config", None)
    name = str(getattr(config, "_name_or_path", None) or "")
    return {
        "started": _now(),
        "finished": None,
        "ended": None,
        "resumed_from": resumed_from,
        "model_name": Path(name).name if Path(name).is_dir() else name,  # without paths of this machine
        "versions": versions(),
        "environment": environment(),
        "geometry": dataclasses.asdict(trainer.geometry),
        **fingerprint,
    }


def closing(step: int, ended: str, model: torch.nn.Module | None) -> dict[str, Any]:
    """What the end of a training adds to its entry.

    Args:
        ended: "finished", "interrupted" or "failed".
        model: whose parameters are hashed; None where no process holds all of them.
    """
    entry: dict[str, Any] = {"finished": _now(), "ended": ended, "step": step}
    if model is not None:
        lines = sorted(f"{name} {value}" for name, value in state_hashes(model, optimizer=None).items())
        entry["parameters_sha256"] = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return entry


def read_manifest(folder: str | Path) -> list[dict[str, Any]]:
    """The entries of a run, oldest first; none where there is no manifest that can be read."""
    try:
        return list(json.loads((Path(folder) / MANIFEST).read_text())["trainings"])
    except (OSError, ValueError, KeyError, TypeError):
        return []


def write_manifest(folder: str | Path, entries: list[dict[str, Any]]) -> None:
    """Replace the manifest of a run.

    Raises:
        CheckpointError: it cannot be written; the old one stays.
    """
    path = Path(folder) / MANIFEST
    temporary = path.with_name(f".{MANIFEST}")
    try:
        temporary.write_text(json.dumps({"format": 1, "trainings": entries}, indent=1, default=str) + "\n")
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise CheckpointError(
            f"{path} could not be written ({error.strerror}), so it does not say how this run ended or goes on; free "
            "some space, or name another output_dir."
        ) from error


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
