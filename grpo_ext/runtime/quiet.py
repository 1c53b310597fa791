"""Remarks of other libraries that nobody who uses this package can act on, kept off the console while it works.

Differs from a blanket filter: each remark is named by who makes it and by its text, a user's filters of warnings come
first, and everything is put back. Light to import, as it stands around the imports of those libraries too.
`quiet_libraries` is the blanket filter, for commands and recipes; the trainer never calls it.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

# text, category, module
_WARNINGS = (
    # TRL sets and calls by their old names what transformers 5.23 has renamed
    (r"`(is_)?gradient_checkpointing\w*` is deprecated", FutureWarning, r"(transformers|trl)\."),
)
# the logger, and how its remark begins
_RECORDS = {
    # PEFT imports bitsandbytes, also where no weights are quantised
    "bitsandbytes.backends.cpu.ops": r"Failed to load CPU gemm_4bit_forward",
    # where it is installed, also where it is not used
    "DeepSpeed": r"Setting (ds_accelerator to|accelerator to CPU)|\[Rank -1\] \[TorchCheckpointEngine\]",
}
_NOISY = ("trl", "datasets", "accelerate", "peft", "torch.distributed", "huggingface_hub", "bitsandbytes")
_ENTRIES = [("ignore", re.compile(text, re.I), kind, re.compile(module), 0) for text, kind, module in _WARNINGS]


def _dropping(text: str) -> Callable[[logging.LogRecord], bool]:
    pattern = re.compile(text)
    return lambda record: pattern.match(record.getMessage()) is None


_FILTERS = {name: _dropping(text) for name, text in _RECORDS.items()}
_lock = threading.Lock()
_inside = [0]  # how many are in `quiet` now
_extended: list[Any] = []  # the list of filters that was in force at the first of them


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Inside, the remarks above are not shown, on any thread; may be entered again inside."""
    # not `catch_warnings`: at its end it takes back filters that others have set meanwhile, and warnings that were
    # shown once are shown again
    with _lock:
        _inside[0] += 1
        if _inside[0] == 1:
            _extended[:] = [warnings.filters]
            warnings.filters.extend(_ENTRIES)  # type: ignore[attr-defined]  # at the end: the first that fits decides
            for name, without in _FILTERS.items():
                logging.getLogger(name).addFilter(without)
    try:
        yield
    finally:
        with _lock:
            _inside[0] -= 1
            if _inside[0] == 0:
                for entry in _ENTRIES:
                    with contextlib.suppress(ValueError):  # a user has set all filters anew
                        _extended[0].remove(entry)
                for name, without in _FILTERS.items():
                    logging.getLogger(name).removeFilter(without)


def quiet_libraries() -> None:
    """Keep all remarks of the libraries off the console for the rest of the process; this project's own stay."""
    import datasets
    from transformers.utils import logging as transformers_logging

    warnings.filterwarnings("ignore")
    warnings.filterwarnings("default", module=r"grpo_ext(\.|$)")
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("DeepSpeed").addFilter(_errors_alone)  # it sets its level itself, when it is imported
    datasets.disable_progress_bars()


def _errors_alone(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
