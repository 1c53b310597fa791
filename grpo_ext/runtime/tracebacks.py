"""Errors of this package leave its entry points with the frames of the user's code alone.

Frames of this package and of the libraries under it are left out, also of causes, so that a reward function's own
frames remain. `GRPO_EXT_TRACEBACK=full` keeps all of them.
"""

import functools
import os
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, cast

from ..errors import GrpoExtError, ProcessError

Entry = TypeVar("Entry", bound=Callable[..., Any])

_LIBRARIES = ("accelerate", "datasets", "huggingface_hub", "peft", "tenacity", "torch", "transformers", "trl")
_ROOTS = [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")]
_HIDDEN = tuple(f"{path}{os.sep}" for path in [Path(__file__).parents[1], *(r / n for r in _ROOTS for n in _LIBRARIES)])
_STANDARD = f"{sysconfig.get_path('stdlib')}{os.sep}"


def _is_hidden(file: str) -> bool:
    standard = file.startswith(_STANDARD) and "site-packages" not in file
    return standard or file.startswith(("<frozen ", *_HIDDEN))


def _users(frames: TracebackType | None) -> TracebackType | None:
    """A traceback without hidden frames."""
    if frames is None:
        return None
    rest = _users(frames.tb_next)
    if _is_hidden(frames.tb_frame.f_code.co_filename):
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
                part.__traceback__ = _users(part.__traceback__)
                part = part.__cause__ or part.__context__
            raise

    return cast(Entry, call)
