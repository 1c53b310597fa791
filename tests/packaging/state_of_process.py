"""What a library may change behind one's back, as JSON: run with statements to execute, one after the other."""

import json
import logging
import os
import random
import signal
import sys
import warnings


def state(with_libraries: bool) -> dict[str, object]:
    """Environment, logging, warnings, signals, random numbers, hooks; with libraries also torch's settings."""
    root = logging.getLogger()
    settings: dict[str, object] = {
        "environment": dict(os.environ),
        "root logger": [root.level, [repr(handler) for handler in root.handlers], logging.root.manager.disable],
        "warnings": [repr(entry) for entry in warnings.filters],
        "signals": {str(number): repr(signal.getsignal(number)) for number in signal.valid_signals()},
        "random": repr(random.getstate()),
        "hooks": [repr(hook) for hook in (sys.excepthook, sys.displayhook, sys.stdout, sys.stderr)],
        "path": list(sys.path),
    }
    if with_libraries:
        settings |= library_state()
    return settings


def library_state() -> dict[str, object]:
    """The settings of torch, numpy and the libraries' loggers."""
    import numpy
    import torch
    from transformers.utils import logging as transformers_logging

    noisy = ("transformers", "trl", "datasets", "accelerate", "torch", "grpo_ext")
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return {
        "dtype": str(torch.get_default_dtype()),
        "device": str(torch.get_default_device()),
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "deterministic": [torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark],
        "precision": [torch.get_float32_matmul_precision(), cuda.allow_tf32, cudnn.allow_tf32],
        "gradients": [torch.is_grad_enabled(), torch.is_anomaly_enabled()],
        "fill": torch.utils.deterministic.fill_uninitialized_memory,
        "torch random": torch.get_rng_state().tolist(),
        "numpy random": repr(numpy.random.get_state()),
        "levels": {name: logging.getLogger(name).level for name in noisy},
        "verbosity": transformers_logging.get_verbosity(),
    }


if __name__ == "__main__":
    states = [state(with_libraries=False)]
    for statements in sys.argv[1:]:
        exec(statements)
        states.append(state(with_libraries="torch" in sys.modules))
    print(json.dumps(states))
