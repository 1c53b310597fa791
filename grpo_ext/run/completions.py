"""TRL's table of completions, which never ends the training. Called by the trainer, around TRL's `log`."""

import contextlib
import io
import json
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pandas
from accelerate.logging import get_logger
from transformers import Trainer

from ..compat import strip_images_from_messages
from ..view import TrainerView

logger = get_logger(__name__)


@contextlib.contextmanager
def completions_logged(view: TrainerView) -> Iterator[None]:
    """Write columns that parquet cannot hold as JSON text; warn once of a table that is not written."""
    before, table = len(view.state.log_history), view.logs
    writes = view.log_completions and view.accelerator.is_main_process
    if writes:
        shown = {n: _writable(table[n], strip_images_from_messages) for n in ("prompt", "completion")}
        table = {**table, **shown, "extra": {n: _writable(column) for n, column in table["extra"].items()}}
    try:
        with view.logging(table):
            yield
    except Exception as error:
        inner = (frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__))
        if not writes or len(view.state.log_history) == before or Trainer.log.__code__ in inner:
            raise
        logger.warning_once(f"The table of completions was not written ({type(error).__name__}: {error}).")


def _writable(column: Sequence[Any], shown: Callable[[Any], Any] = lambda cell: cell) -> Sequence[Any]:
    try:
        cells = list(map(shown, column))
        json.dumps(cells, default=str)  # a cell that holds itself would end the process in pyarrow
        pandas.DataFrame({"column": cells}).to_parquet(io.BytesIO())
    except Exception:  # of pyarrow, in many kinds
        return [None if cell is None else _text(cell) for cell in column]
    return column


def _text(cell: Any) -> str:
    try:
        text = cell if isinstance(cell, str) else json.dumps(cell, default=str, ensure_ascii=False)
    except (TypeError, ValueError):  # keys that JSON does not have
        text = repr(cell)
    return text.encode("utf-8", "backslashreplace").decode()
