"""Silences other libraries, for commands and recipes; the trainer never does."""

import logging
import warnings

_NOISY = ("trl", "datasets", "accelerate", "peft", "torch.distributed", "huggingface_hub", "bitsandbytes")


def quiet_libraries() -> None:
    """Silence other libraries on the console for the rest of the process."""
    import datasets
    from transformers.utils import logging as transformers_logging

    warnings.filterwarnings("ignore")
    warnings.filterwarnings("default", module=r"grpo_ext(\.|$)")
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
    # DeepSpeed sets its level itself, when it is imported
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)
    datasets.disable_progress_bars()
