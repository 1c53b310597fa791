"""Output folders: what an earlier run saved is never mixed with, or overwritten by, another run.

Used by the trainer at the start of `train()`; the recipe refuses such a folder before anything is loaded.
"""

from __future__ import annotations

import itertools

from accelerate.logging import get_logger

from ..runtime.collectives import broadcast_value
from .checkpoint import checkpoints

logger = get_logger(__name__)


def free_output_dir(folder: str, process_index: int) -> str:
    """`folder`, or the first free `folder-2`, `folder-3`, ... if it holds checkpoints of an earlier run.

    Decided by the main process for all.
    """
    chosen = folder
    if process_index == 0 and checkpoints(folder):
        chosen = next(name for i in itertools.count(2) if not checkpoints(name := f"{folder.rstrip('/')}-{i}"))
        logger.warning(
            f"{folder} holds {len(checkpoints(folder))} checkpoint(s) of an earlier run, which are left alone; this "
            f"run saves to {chosen}. To go on with the earlier run, call train(resume_from_checkpoint=True)."
        )
    return broadcast_value(chosen)
