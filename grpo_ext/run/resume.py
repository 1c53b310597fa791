"""Resume: find the checkpoint that a run resumes from, verify it, and compare it with the run.

Differs from transformers: a broken checkpoint is skipped or refused, and so is one of a run that means something else.
Used by run.keeper before anything is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.logging import get_logger
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from ..errors import CheckpointError
from ..runtime.collectives import from_main_process
from .checkpoint import checkpoints, newest_whole, read_listing, why_not_resumable
from .fingerprint import KEEPS_ROLLOUT, check_same_run, differences
from .state import RunState, load_reference

logger = get_logger(__name__)
LATEST, AUTO = "latest", "auto"


@dataclass
class Resumed:
    """What a checkpoint holds for the run that resumes from it.

    Attributes:
        state: of the run; None where another trainer wrote the checkpoint.
        micro_batch_size: completions on one device, when it was written.
        step: optimizer steps done.
    """

    state: RunState | None = None
    micro_batch_size: int | None = None
    step: int = 0


def is_path(wanted: str | bool | None) -> bool:
    """Whether `resume_from_checkpoint` names a checkpoint, and not which one to look for."""
    return isinstance(wanted, str) and wanted not in (LATEST, AUTO)


def find_checkpoint(wanted: str | bool | None, folder: str, accelerator: Accelerator) -> str | None:
    """The checkpoint to resume from, found and verified on the main process; None for a new run.

    Args:
        wanted: a path; "latest" or True; "auto"; None or False.
        folder: the run's.

    Raises:
        CheckpointError: it is broken, or there is none.
    """
    if not wanted:
        return None

    def find() -> tuple[str | None, str | None, list[str]]:
        if wanted == AUTO and not checkpoints(folder):
            return None, None, []
        if is_path(wanted):
            return str(wanted), why_not_resumable(str(wanted)), []
        newest, skipped = newest_whole(folder, why_not_resumable)
        if newest is None:
            return None, f"{folder} holds no whole checkpoint: {'; '.join(skipped) or 'it has none'}", []
        return str(newest), None, skipped

    path, reason, skipped = from_main_process(accelerator, find)
    for sentence in skipped:
        logger.warning(f"Skipped a checkpoint: {sentence}.")
    if reason is not None:
        raise CheckpointError(
            f"{reason}, so nothing can be resumed from it; use resume_from_checkpoint='latest' for the newest "
            "whole checkpoint of output_dir, 'auto' for that or a new run where there is none, or leave it out to "
            "start anew."
        )
    if path is None:
        return None
    if (listing := read_listing(Path(path))) is None:
        logger.warning(f"{path} has no checksums (another trainer wrote it), so it is read unverified.")
    elif _uses_deepspeed(accelerator) and listing.get("processes") not in (None, accelerator.num_processes):
        processes = listing["processes"]
        raise CheckpointError(
            f"{path} was written by {processes} processes, and DeepSpeed's shards are read by as many; this run has "
            f"{accelerator.num_processes}. Start {processes}, or export the model and begin a new run with it."
        )
    return str(path)


def _uses_deepspeed(accelerator: Accelerator) -> bool:
    return getattr(accelerator.state, "deepspeed_plugin", None) is not None


def read_checkpoint(checkpoint: str, trainer: Any, fingerprint: dict[str, Any]) -> Resumed:
    """Compare a checkpoint with a trainer's run, and read its state; weights and optimizer are read by transformers.

    Raises:
        CheckpointError: it belongs to another run, or a file is broken.
    """
    args, accelerator = trainer.args, trainer.accelerator
    allowed = args.allow_changed_on_resume or ()
    changes = from_main_process(accelerator, lambda: check_same_run(checkpoint, fingerprint, allowed))
    for part, old, new in (part for name, values in changes.items() for part in differences(name, *values)):
        logger.warning(f"{part} was {old} when {checkpoint} was written and is {new} now, as allowed.")
    if "global_batch_size" in changes:
        logger.warning("Steps are counted on, so some prompts of this epoch are skipped or repeated.")
    state = RunState.load(checkpoint, trainer.num_generations)
    if state is None:
        logger.warning(f"{checkpoint} holds no rollout batch, so completions are sampled again from here.")
    elif others := sorted(changes.keys() - KEEPS_ROLLOUT):
        ahead = " and what was being sampled ahead are" if state.waiting else " is"
        logger.warning(f"{', '.join(others)} changed, so the rollout batch of the checkpoint{ahead} not used.")
        state.forget_rollouts()
    if trainer.ref_model is not None:
        load_reference(accelerator.unwrap_model(trainer.ref_model), checkpoint)
    loop = TrainerState.load_from_json(str(Path(checkpoint) / TRAINER_STATE_NAME))
    size = None if loop.train_batch_size is None else loop.train_batch_size // max(1, args.n_gpu)
    return Resumed(state, size, loop.global_step)
