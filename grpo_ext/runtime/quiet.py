"""Warnings on which a user of this package cannot act, kept off the console while it works.

Differs from a blanket filter: the warnings are named by their text and module, a user's filters come first, and
everything is put back. `quiet_libraries` is the blanket filter, for commands and recipes; the trainer never calls it.
"""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections.abc import Iterator

# TRL calls by their old names what transformers 5.23 has renamed
_TEXT, _MODULE = (
    re.compile(r"`(is_)?gradient_checkpointing\w*` is deprecated", re.I),
    re.compile(r"(transformers|trl)\."),
)
_NOISY = ("trl", "datasets", "accelerate", "peft", "torch.distributed", "huggingface_hub", "bitsandbytes")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Inside, the warnings above are not shown, on any thread. Contexts may be nested."""
    # not `catch_warnings`: at its end it takes back filters that others have set meanwhile, and warnings that were
    # shown once are shown again
    entry, filters = ("ignore", _TEXT, FutureWarning, _MODULE, 0), warnings.filters
    filters.append(entry)  # type: ignore[attr-defined]  # at the end: the first that fits decides
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # a user has set all filters anew
            filters.remove(entry)  # type: ignore[attr-defined]


def quiet_libraries() -> None:
    """Keep all messages of the libraries off the console for the rest of the process, but not those of this package."""
    import datasets
    from transformers.utils import logging as transformers_logging

    warnings.filterwarnings("ignore")
    warnings.filterwarnings("default", module=r"grpo_ext(\.|$)")
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
    # DeepSpeed sets its level itself, when it is imported
    logging.getLogger("DeepSpeed").addFilter(_is_error)
    datasets.disable_progress_bars()


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
