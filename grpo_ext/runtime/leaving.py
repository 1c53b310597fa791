"""The end of a process that has run collectives."""

from __future__ import annotations

import atexit
import functools
import time

import torch.distributed as dist


@functools.cache
def leave_in_order(seconds: float = 0.2) -> None:
    """Let gloo's threads finish with the last collective before the interpreter is torn down.

    They release tensors after it has returned, which takes the GIL; CPython ends a thread that asks for the GIL during
    shutdown, and the process aborts (torch 2.13, CPython 3.11). `destroy_process_group` does not wait for them.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_backend() == "gloo":
        atexit.register(time.sleep, seconds)
