"""Writes the checkpoints of a run: the Trainer's files, and those of this package, in a folder that is whole or absent.

Differs from transformers, which writes into the final folder. Called by run.keeper around the Trainer's method.
"""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..errors import CheckpointError, ProcessError
from ..runtime.attributes import assigned
from ..runtime.collectives import together, without_long_waits
from ..view import TrainerView
from .checkpoint import publish, rotate, write_listing
from .fingerprint import FINGERPRINT
from .state import callback_states, save_state

logger = get_logger(__name__)


class _SavedLater(TrainerState):
    def save_to_json(self, json_path: str) -> None:
        """Write nothing, because `_complete` does."""


@contextlib.contextmanager
def _failing_together(explain: Callable[[str], str]) -> Iterator[None]:
    """An error inside on one process is a CheckpointError on all, so that none waits in a later collective."""
    try:
        with together("a checkpoint"):
            yield
    except CheckpointError:
        raise
    except Exception as error:
        cause = str(error) if isinstance(error, ProcessError) else f"{type(error).__name__}: {error}"
        raise CheckpointError(explain(cause)) from error


@contextlib.contextmanager
def writing_checkpoint(
    view: TrainerView, folder: Path, final: Path, components: Mapping[str, Any] | None, fingerprint: Mapping[str, Any]
) -> Iterator[None]:
    """The Trainer writes to `folder` inside; afterwards `final` is whole or absent. `components`: their states."""
    run, saves, state, written = final.parent, view.args.should_save, view.state, folder / final.name
    # transformers lists states of a class after earlier ones, and knows no callbacks that came with a resume
    state.stateful_callbacks = callback_states([*view.callback_handler.callbacks, view.control])

    def explain(reason: str) -> str:
        if saves:
            shutil.rmtree(folder, ignore_errors=True)
        free = shutil.disk_usage(str(view.args.output_dir)).free / 2**20
        return (
            f"{final.name} could not be written to {run}, with {free:.0f} MiB free ({reason}). The older "
            "checkpoints are untouched. If space is short, use save_total_limit, save_only_model or another output_dir."
        )

    # transformers looks for the best checkpoint in the folder it writes to, and this one does not hold it
    with assigned(state, best_global_step=None, __class__=_SavedLater), _failing_together(explain):
        yield
    best_folder = run / f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}"
    if best_folder == final or best_folder.is_dir():
        state.best_model_checkpoint = str(best_folder)
    with _failing_together(explain):
        complete = functools.partial(_complete, view, written, components, fingerprint)
        without_long_waits(complete if saves else lambda: None)
    with _failing_together(explain):  # once all processes know that it is complete
        if saves and (replaced := publish(written, final)) is not None:
            logger.warning(f"{final} was there already, from an earlier run of these steps; it is now {replaced}.")
    if saves:
        shutil.rmtree(folder, ignore_errors=True)
        rotate(run, view.args.save_total_limit, final, state.best_model_checkpoint)


def _complete(
    view: TrainerView, folder: Path, components: Mapping[str, Any] | None, fingerprint: Mapping[str, Any]
) -> None:
    state = view.state
    # keys that a resume has read are texts, which cannot be sorted among numbers
    state.stateful_callbacks = json.loads(json.dumps(state.stateful_callbacks))
    state.save_to_json(str(folder / TRAINER_STATE_NAME))  # with the best checkpoint's final name
    (folder / FINGERPRINT).write_text(json.dumps(fingerprint, indent=1) + "\n")
    if not any((folder / name).exists() for name in ("config.json", "adapter_config.json")):
        # the engine wrote its shards of the weights alone
        model = view.policy
        adapter = getattr(model, "peft_config", None)
        configs: list[Any] = [model.config, getattr(model, "generation_config", None)]
        configs = configs if adapter is None else [adapter[model.active_adapter]]
        for part in filter(None, [*configs, view.processing_class]):
            part.save_pretrained(folder)
    if components is not None:
        save_state(folder, components)
    write_listing(folder, {"step": state.global_step, "processes": view.accelerator.num_processes})
