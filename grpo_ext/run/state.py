"""Writes the checkpoints of a run, complete or absent; the states of components and callbacks in a checkpoint.

Differs from transformers, which writes into the final folder, and from TRL, which samples again on resume. States are
read with `weights_only`, so that reading them executes nothing. Called by run.keeper around the Trainer's method.
"""

import contextlib
import functools
import json
import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import recursively_apply
from torch.serialization import get_unsafe_globals_in_checkpoint
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_pt_utils import safe_globals
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..errors import CheckpointError, ProcessError
from ..runtime.attributes import temporarily_set
from ..runtime.collectives import raise_on_all, without_long_waits
from ..runtime.messages import logger
from ..view import TrainerView
from .checkpoint import FINGERPRINT, publish, rotate, write_listing
from .record import Identity

STATE = "grpo_ext_state.pt"
# what torch.save writes, and a resume reads with `weights_only`
_PICKLES = (STATE, "scheduler.pt", "optimizer.pt", "optimizer.bin", "scaler.pt", "rng_state*.pth")


def save_state(folder: str | Path, state: Mapping[str, Any]) -> None:
    # copies, because a tensor that is part of another would be written with all of it
    torch.save(recursively_apply(lambda tensor: tensor.detach().cpu().clone(), dict(state)), Path(folder) / STATE)


def load_state(folder: str | Path) -> dict[str, Any] | None:
    """The states in a checkpoint by name, or a CheckpointError; None if another trainer wrote it."""
    path = Path(folder) / STATE
    if not any(path.parent.glob("grpo_ext_*")):
        return None
    try:
        return dict(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:  # whatever the unpickler raises
        raise CheckpointError(f"{path} is broken, or of another version: {error}.") from None


def callback_states(callbacks: Sequence[Any]) -> Any:
    """The states of callbacks that have one (transformers' `ExportableState`), by their classes' names."""
    stateful: Any = [callback for callback in callbacks if isinstance(callback, ExportableState)]
    return TrainerState(stateful_callbacks=stateful).stateful_callbacks


def restore_callbacks(callbacks: Sequence[Any], saved: Mapping[str, Any], checkpoint: str) -> None:
    """Restore the attributes that callbacks saved, in the user's objects."""
    for name, states in saved.items():
        alike = [part for part in callbacks if isinstance(part, ExportableState) and type(part).__name__ == name]
        latest = (states if isinstance(states, list) else [states])[-len(alike) :]
        for callback, state in zip(alike, latest, strict=False):
            try:
                for attribute, value in state.get("attributes", {}).items():
                    setattr(callback, attribute, value)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                logger.warning(f"The state of {name} in {checkpoint} was not restored ({reason}).")


# ---- Writing a checkpoint -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _failing_together(explain: Callable[[str], str]) -> Iterator[None]:
    """An error inside on one process is a CheckpointError on all, so that none waits in a later collective."""
    try:
        with raise_on_all("a checkpoint"):
            yield
    except CheckpointError:
        raise
    except Exception as error:
        cause = str(error) if isinstance(error, ProcessError) else f"{type(error).__name__}: {error}"
        raise CheckpointError(explain(cause)) from error


@contextlib.contextmanager
def writing_checkpoint(
    view: TrainerView, folder: Path, final: Path, components: Mapping[str, Any] | None, fingerprint: Identity
) -> Iterator[None]:
    """The Trainer writes to `folder` inside; afterwards `final` is complete or absent. `components`: their states."""
    run, saves, state, written = final.parent, view.args.should_save, view.state, folder / final.name
    # transformers lists states of a class after earlier ones, and knows no callbacks that came with a resume
    state.stateful_callbacks = callback_states([*view.callback_handler.callbacks, view.control])

    def explain(reason: str) -> str:
        if saves:
            shutil.rmtree(folder, ignore_errors=True)
        free = shutil.disk_usage(view.output_dir).free / 2**20
        return (
            f"{final.name} could not be written to {run}, with {free:.0f} MiB free ({reason}). The older "
            "checkpoints are untouched. If space is short, use save_total_limit, save_only_model or another output_dir."
        )

    # transformers looks for the best checkpoint in the folder it writes to, and this one does not hold it; `_complete`
    # saves the state
    with temporarily_set(state, best_global_step=None, save_to_json=lambda path: None), _failing_together(explain):
        yield
    best_folder = run / f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}"
    if best_folder == final or best_folder.is_dir():
        state.best_model_checkpoint = str(best_folder)
    with _failing_together(explain):
        complete = functools.partial(_complete, view, written, components, fingerprint)
        without_long_waits(complete if saves else lambda: None)
    with _failing_together(explain):  # once all processes know that it is complete
        if saves:
            publish(written, final)
    if saves:
        shutil.rmtree(folder, ignore_errors=True)
        rotate(run, view.args.save_total_limit, final, state.best_model_checkpoint)


def _read_back(folder: Path) -> None:
    """Refuse a file that a resume could not read, before the checkpoint counts as complete. Tensors are not read."""
    for path in (path for pattern in _PICKLES for path in folder.glob(pattern)):
        try:
            with safe_globals() if path.suffix == ".pth" else contextlib.nullcontext():  # as transformers does
                torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError as error:
            kinds = get_unsafe_globals_in_checkpoint(path) or [str(error)]
            raise ValueError(
                f"it could not be read again: {path.name} holds {', '.join(sorted(kinds))}. Checkpoints are read with "
                "weights_only; let the state_dict of an optimizer and of a schedule hold only tensors, numbers, "
                "strings, lists and dictionaries. A schedule that returns numpy's numbers has to return float(...)"
            ) from error


def _complete(view: TrainerView, folder: Path, components: Mapping[str, Any] | None, fingerprint: Identity) -> None:
    if components is not None:
        save_state(folder, components)
    _read_back(folder)
    state = view.state
    # keys that a resume has read are texts, which cannot be sorted among numbers
    state.stateful_callbacks = json.loads(json.dumps(state.stateful_callbacks))
    state.save_to_json(str(folder / TRAINER_STATE_NAME))  # with the best checkpoint's final name
    (folder / FINGERPRINT).write_text(json.dumps(fingerprint, indent=1) + "\n")
    if not any((folder / name).exists() for name in ("config.json", "adapter_config.json")):
        # the engine wrote only its shards of the weights
        model = view.policy
        adapter = getattr(model, "peft_config", None)
        configs: list[Any] = [model.config, getattr(model, "generation_config", None)]
        configs = configs if adapter is None else [adapter[model.active_adapter]]
        for part in (*configs, view.processing_class):
            if part is not None:
                part.save_pretrained(folder)
    write_listing(folder, {"step": state.global_step, "processes": view.accelerator.num_processes})
