"""Messages of other libraries on which a user of this package cannot act, kept off the console while it works.

Differs from a blanket filter: each message is named by its source and its text, a user's filters of warnings come
first, and everything is put back. Light to import, because it wraps the imports of those libraries too.
`quiet_libraries` is the blanket filter, for commands and recipes; the trainer never calls it.
"""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections.abc import Callable, Iterator

# TRL calls by their old names what transformers 5.23 has renamed
_WARNING = (r"`(is_)?gradient_checkpointing\w*` is deprecated", FutureWarning, r"(transformers|trl)\.")
# the logger, and how its message begins
_RECORDS = {
    # PEFT imports bitsandbytes, also where no weights are quantised
    "bitsandbytes.backends.cpu.ops": r"Failed to load CPU gemm_4bit_forward",
    # where it is installed, also where it is not used
    "DeepSpeed": r"Setting (ds_accelerator to|accelerator to CPU)|\[Rank -1\] \[TorchCheckpointEngine\]",
}
_NOISY = ("trl", "datasets", "accelerate", "peft", "torch.distributed", "huggingface_hub", "bitsandbytes")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Inside, the messages above are not shown, on any thread. Contexts may be nested."""
    # not `catch_warnings`: at its end it takes back filters that others have set meanwhile, and warnings that were
    # shown once are shown again
    text, category, module = _WARNING
    entry, filters = ("ignore", re.compile(text, re.I), category, re.compile(module), 0), warnings.filters
    filters.append(entry)  # type: ignore[attr-defined]  # at the end: the first that fits decides
    droppers = {name: _dropper(text) for name, text in _RECORDS.items()}
    for name, dropper in droppers.items():
        logging.getLogger(name).addFilter(dropper)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # a user has set all filters anew
            filters.remove(entry)  # type: ignore[attr-defined]
        for name, dropper in droppers.items():
            logging.getLogger(name).removeFilter(dropper)


def _dropper(text: str) -> Callable[[logging.LogRecord], bool]:
    """A filter of its own for each context, because a logger holds equal filters once."""
    return lambda record: re.match(text, record.getMessage()) is None


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
