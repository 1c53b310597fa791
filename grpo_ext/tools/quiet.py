"""Quiet libraries: what a command or a recipe asks for before it prints anything of its own.
Unlike a bare filter of warnings, this project's own stay. Never called by the library itself: it acts on the process.
Light to import, so that commands which need no model stay fast; `grpo_ext.tools.console` offers it too. Imported before
TRL, it also quiets bitsandbytes, which speaks while it is imported."""

from __future__ import annotations

import logging
import warnings

_NOISY = ("trl", "datasets", "accelerate", "peft", "torch.distributed", "huggingface_hub")

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def quiet_libraries() -> None:
    """Keep the libraries' remarks off the console; this project's own warnings stay."""
    from . import starting  # noqa: F401, isort: skip  (before they are imported)
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


def _errors_alone(entry: logging.LogRecord) -> bool:
    return entry.levelno >= logging.ERROR
