"""Errors of this package leave its entry points with the frames of the user's code alone.

Frames of this package, of the libraries under it and of Python's own are left out, also of causes, so that a reward
function's frames remain. `GRPO_EXT_TRACEBACK=full` keeps all of them.
"""

import functools
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar, cast

from ..errors import GrpoExtError, ProcessError

Entry = TypeVar("Entry", bound=Callable[..., Any])

_LIBRARIES = (
    "grpo_ext",
    "accelerate",
    "datasets",
    "huggingface_hub",
    "peft",
    "tenacity",
    "torch",
    "transformers",
    "trl",
)
_HIDDEN = {*_LIBRARIES, *sys.stdlib_module_names}


def _of_the_user(frames: TracebackType | None) -> TracebackType | None:
    if frames is None:
        return None
    rest = _of_the_user(frames.tb_next)
    if str(frames.tb_frame.f_globals.get("__name__")).partition(".")[0] in _HIDDEN:
        return rest
    return TracebackType(rest, frames.tb_frame, frames.tb_lasti, frames.tb_lineno)


def hide_frames(entry: Entry) -> Entry:
    """Let errors of an entry point end in the user's frames; not a ProcessError, whose cause may be a fault here."""

    @functools.wraps(entry)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return entry(*args, **kwargs)
        except GrpoExtError as error:
            hidden = os.environ.get("GRPO_EXT_TRACEBACK") != "full" and not isinstance(error, ProcessError)
            part: BaseException | None = error if hidden else None
            while part is not None:
                part.__traceback__ = _of_the_user(part.__traceback__)
                part = part.__cause__ or part.__context__
            raise

    return cast(Entry, call)
