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

_HIDDEN = {
    *sys.stdlib_module_names,
    *("grpo_ext", "accelerate", "datasets", "huggingface_hub", "peft", "tenacity", "torch", "transformers", "trl"),
}


def _of_the_user(first: TracebackType | None, innermost: bool) -> TracebackType | None:
    """A traceback without hidden frames; of one that has no others the innermost, if it is asked for."""
    places, pruned = list[TracebackType](), None
    while first is not None:
        places.append(first)
        first = first.tb_next
    shown = [place for place in places if place.tb_frame.f_globals.get("__name__", "").partition(".")[0] not in _HIDDEN]
    if innermost and not shown:
        shown = places[-1:]
    for place in reversed(shown):
        pruned = TracebackType(pruned, place.tb_frame, place.tb_lasti, place.tb_lineno)
    return pruned


def hide_frames(entry: Entry) -> Entry:
    """Let errors of an entry point end in the user's frames; not a ProcessError, whose cause may be a fault here."""

    @functools.wraps(entry)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return entry(*args, **kwargs)
        except GrpoExtError as error:
            hidden = os.environ.get("GRPO_EXT_TRACEBACK") != "full" and not isinstance(error, ProcessError)
            part: BaseException | None = error if hidden else None
            visited = list[BaseException]()
            while part is not None and part not in visited:  # users' causes may lead back
                part.__traceback__ = _of_the_user(part.__traceback__, part is not error)
                visited.append(part)
                part = part.__cause__ or part.__context__
            raise

    return cast(Entry, call)
