"""How an uncaught error of this package is shown in a script: the frames of the user's code, and the sentence.

Frames of this package and of the libraries under it are left out. `GRPO_EXT_TRACEBACK=full` shows all of them.
"""

import os
import sys
import sysconfig
import traceback
from pathlib import Path
from types import TracebackType

from ..errors import GrpoExtError

_PACKAGE = Path(__file__).parents[1]
_LIBRARIES = (
    "IPython",
    "accelerate",
    "datasets",
    "huggingface_hub",
    "peft",
    "tenacity",
    "torch",
    "transformers",
    "trl",
)
_INSTALLED = [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")]
_HIDDEN = tuple(f"{path}{os.sep}" for path in [_PACKAGE, *(root / name for root in _INSTALLED for name in _LIBRARIES)])
_STANDARD = f"{sysconfig.get_path('stdlib')}{os.sep}"


def _is_hidden(file: str) -> bool:
    standard = file.startswith(_STANDARD) and "site-packages" not in file
    return standard or file.startswith(("<frozen ", *_HIDDEN))


def of_the_user(error: BaseException) -> str:
    """The traceback of an error and of its causes, without hidden frames; causes that have no others are left out."""
    whole = part = traceback.TracebackException.from_exception(error)
    if os.environ.get("GRPO_EXT_TRACEBACK") == "full":
        return "".join(whole.format())
    while True:
        if frames := [frame for frame in part.stack if not _is_hidden(frame.filename)]:
            part.stack[:] = frames
        cause = part.__cause__ or (None if part.__suppress_context__ else part.__context__)
        if cause is None or all(_is_hidden(frame.filename) for frame in cause.stack):
            part.__cause__ = part.__context__ = None
            return "".join(whole.format())
        part = cause


def show_sentences() -> None:
    """Let an uncaught `GrpoExtError` end a script with its sentence; other errors are shown as before."""
    before = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        if isinstance(error, GrpoExtError):
            sys.stderr.write(of_the_user(error))
        else:
            before(kind, error, frames)

    sys.excepthook = show
