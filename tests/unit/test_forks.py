"""The processes that tests launch by a fork begin as fresh interpreters do."""

import json

from tests.support import forks

TELL = """
import json, logging, sys, threading, warnings
from accelerate.state import AcceleratorState, GradientState, PartialState
import torch

print(json.dumps({
    "accelerate": [state._shared_state for state in (PartialState, AcceleratorState, GradientState)],
    "threads": [thread.name for thread in threading.enumerate()],
    "handlers": len(logging.root.handlers),
    "modules": {type(part).__module__.split(".")[0] for part in (*sys.meta_path, sys.stdout, sys.stderr)}
    & {"pytest", "_pytest", "execnet"} != set(),
    "hooks": [sys.excepthook is sys.__excepthook__, sys.unraisablehook is sys.__unraisablehook__],
    "filter": warnings.filters[0][0],
    "gradients": torch.is_grad_enabled(),
    "algorithms": torch.are_deterministic_algorithms_enabled(),
    "precision": str(torch.get_default_dtype()),
    "tests": [name for name in sys.modules if name.startswith("tests.") and not name.startswith("tests.support")],
    "argv": sys.argv,
}))
"""


def test_a_launched_process_has_nothing_of_the_tests(tmp_path):
    script = tmp_path / "tell.py"
    script.write_text(TELL)
    done = forks.python(script, "an argument")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "accelerate": [{}, {}, {}],
        "threads": ["MainThread"],
        "handlers": 0,
        "modules": False,
        "hooks": [True, True],
        "filter": "ignore",
        "gradients": True,
        "algorithms": False,
        "precision": "torch.float32",
        "tests": [],  # which may have read the environment of pytest when they were collected
        "argv": [str(script), "an argument"],
    }
