"""The backward passes of a step inside Accelerate's `accumulate`, and memory that ends in one of them.

Accelerate's bookkeeping: inside `accumulate` a backward pass synchronises processes where `accelerator.step` reaches a
multiple of `gradient_accumulation_steps`, and `accelerator.backward` divides the loss by that number. The loop outside
sees one batch per optimizer step, so both are set here, before the first micro-batch, and put back after the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from accelerate.utils.memory import clear_device_cache

from ..runtime.collectives import max_over_processes, sum_over_processes
from ..runtime.out_of_memory import StepOutOfMemory, is_out_of_memory
from .gradients import NativeGradients


@contextmanager
def out_of_memory_on_all(accelerator: Accelerator, discard: Callable[[], None] | None) -> Iterator[None]:
    """What runs inside may run out of memory; afterwards all processes know. It must hold no collective.

    Args:
        discard: throws away what was done, on every process; None where a forward is itself a collective, so that the
            others could not be told: there the error goes on as it is.

    Raises:
        StepOutOfMemory: on every process, where one of them failed.
    """
    if discard is None:
        yield
        return
    reason = None
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).splitlines()[0]  # the error itself would keep the tensors of its frames
    if max_over_processes(int(reason is not None), accelerator.device):
        discard()
        raise StepOutOfMemory(reason or "another process ran out of memory")


class Accumulation:
    """The backward passes of one step on this process, which `accumulating` has prepared Accelerate for.

    Where an engine reduces in the backward pass, `accelerator.backward` divides by the number of micro-batches (not
    under DeepSpeed) and the engine averages over processes; the scale takes both back, because the weights already are
    those of the whole step.
    """

    def __init__(self, accelerator: Accelerator, model: Any, count: int, by_engine: bool) -> None:
        self.accelerator, self.model = accelerator, model
        deepspeed = by_engine and accelerator.distributed_type == DistributedType.DEEPSPEED
        # more steps than micro-batches, so that none synchronises; a power of two, so that dividing by it is exact
        self.steps = count if by_engine else 1 << count.bit_length()
        self.scale = (accelerator.num_processes if by_engine else 1) * (1 if deepspeed else self.steps)
        self.options: dict[str, Any] = {"scale_wrt_gas": False} if deepspeed else {}

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        """A context for the forward and the backward pass of a micro-batch."""
        # DDP and FSDP decide in the forward whether the backward synchronises, so both stand inside
        with self.accelerator.accumulate(self.model):
            yield

    def backward(self, loss: torch.Tensor) -> None:
        """The backward pass of a micro-batch's part of the loss of the step."""
        self.accelerator.backward(loss * self.scale, **self.options)


@contextmanager
def accumulating(
    accelerator: Accelerator, model: Any, gradients: NativeGradients | None, count: int
) -> Iterator[Accumulation]:
    """A context for the backward passes of a step; at its end one sum over the processes.

    Args:
        gradients: how gradients are added up; None where the engine (FSDP, DeepSpeed) does it, in its last backward.
        count: micro-batches of this process.

    Raises:
        StepOutOfMemory: on every process, with the gradients thrown away.
        PrecisionError: in bitwise mode, gradients that are not finite or out of range.
    """
    adding = Accumulation(accelerator, model, count, by_engine=gradients is None)
    accelerator.gradient_accumulation_steps = adding.steps
    accelerator.step = 0
    with out_of_memory_on_all(accelerator, None if gradients is None else gradients.discard):
        if gradients is not None:
            gradients.start()
        try:
            yield adding
        finally:
            if gradients is not None:
                gradients.stop()
            accelerator.gradient_accumulation_steps = 1
    if gradients is not None:
        terms = torch.tensor(float(count), device=accelerator.device)
        gradients.finish(int(sum_over_processes(terms)))
        accelerator.sync_gradients = True  # the optimizer may step


def clear_cache_every(steps: int | None, step: int) -> None:
    """Honour `torch_empty_cache_steps`: free the device's cache every so many optimizer steps."""
    if steps is not None and step % steps == 0:
        clear_device_cache()
