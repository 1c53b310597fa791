"""TRL's table of completions: it never ends the training, and that of an evaluation is a file of its own.

Repairs `trl.GRPOTrainer.log`, which raises where pyarrow or a tracker refuses a column, and writes the table of an
evaluation over that of the training step. Until TRL fixes both; last seen in 1.16. Called by the trainer, around TRL's
method.
"""

import contextlib
import io
import json
import re
import reprlib
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import pandas
from transformers import Trainer

from ..compat import strip_images_from_messages
from ..runtime.messages import logger
from ..view import TrainerView

_WITH_TABLES = ("wandb", "trackio")  # trackers that TRL sends the table to


@contextlib.contextmanager
def completions_logged(view: TrainerView, logs: Mapping[str, Any]) -> Iterator[None]:
    """Write columns that the file or a tracker refuses as JSON text; warn once of a table that is not written.

    The table of an evaluation is a file of its own, where TRL writes over that of the training step.
    """
    before, table = len(view.state.log_history), view.logs
    writes = view.log_completions and view.accelerator.is_main_process
    ended = [name.removesuffix("_runtime") for name in logs if writes and name.endswith("_runtime")]
    if writes:
        trackers = [
            sys.modules[n].Table for n in _WITH_TABLES if n in cast(list[str], view.args.report_to) and n in sys.modules
        ]
        shown = {n: _writable(table[n], trackers, strip_images_from_messages) for n in ("prompt", "completion")}
        table = {**table, **shown, "extra": {n: _writable(column, trackers) for n, column in table["extra"].items()}}
    try:
        with view.logging(table), _evaluation_in_its_own_file(view, ended):
            yield
        if writes and not before and (printed := view.args.num_completions_to_print):  # said once
            logger.info(f"Each log shows {printed} of the completions; all are in {view.args.output_dir}/completions.")
    except Exception as error:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        in_callback = any(frame.f_code is Trainer.log.__code__ for frame in frames)
        if not writes or len(view.state.log_history) == before or in_callback:
            raise
        logger.warning_once(
            "The table of completions was not written, or not sent to a tracker "
            f"({type(error).__name__} in {frames[-1].f_globals['__name__']}). Logged once for each cause."
        )


@contextlib.contextmanager
def _evaluation_in_its_own_file(view: TrainerView, ended: Sequence[str]) -> Iterator[None]:
    """Move the table of an evaluation to a file of its own, and leave that of the training step as it was.

    TRL writes every table to the file of the step, also once an evaluation ("eval") or the training ("train") `ended`.
    """
    path = view.output_dir / "completions" / f"completions_{view.state.global_step:05d}.parquet"
    aside = path.with_suffix(".training")
    if ended and path.is_file():
        path.replace(aside)
    try:
        yield
    finally:
        for name in ended:
            if name != "train" and path.is_file():
                path.replace(path.with_stem(f"{path.stem}_{re.sub('[^0-9A-Za-z_-]', '_', name)}"))
        if aside.is_file():
            aside.replace(path)


def _writable(
    column: Sequence[Any], trackers: Sequence[Callable[..., Any]], shown: Callable[[Any], Any] = lambda cell: cell
) -> Sequence[Any]:
    cells = list(column)
    try:
        cells = list(map(shown, cells))
        json.dumps(cells, default=str)  # a cell that holds itself would end the process in pyarrow
        frame = pandas.DataFrame({"column": cells})
        frame.to_parquet(io.BytesIO())
        for table in trackers:
            table(dataframe=frame)
    except Exception:  # of pyarrow and trackers, in many kinds
        return [None if cell is None else _text(cell) for cell in cells]
    return column


def _text(cell: Any) -> str:
    try:
        text = cell if isinstance(cell, str) else json.dumps(cell, default=str, ensure_ascii=False)
    except (TypeError, ValueError):  # keys that JSON does not have
        text = repr(cell)
    except RecursionError:
        text = reprlib.repr(cell)
    return text.encode("utf-8", "backslashreplace").decode()
