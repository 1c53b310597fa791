"""Commands and recipes keep the libraries quiet, and those alone."""

from __future__ import annotations

import logging
import warnings

from grpo_ext.runtime.quiet import quiet_libraries


def test_quiet_libraries_leaves_the_warnings_of_this_project():
    names = ("trl", "datasets", "accelerate", "peft", "torch.distributed", "huggingface_hub")
    levels = {name: logging.getLogger(name).level for name in names}
    try:
        with warnings.catch_warnings(record=True) as seen:
            quiet_libraries()
            warnings.warn_explicit("theirs", UserWarning, "trl.py", 1, module="trl.trainer")
            warnings.warn_explicit("ours", UserWarning, "window.py", 1, module="grpo_ext.step.loss")
        assert [str(warning.message) for warning in seen] == ["ours"]
        assert logging.getLogger("grpo_ext.trainer").isEnabledFor(logging.WARNING)
        assert not logging.getLogger("trl").isEnabledFor(logging.WARNING)
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
