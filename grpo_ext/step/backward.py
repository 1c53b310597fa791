"""Forward and backward over the micro-batches of a step, inside Accelerate's `accumulate`.

Accelerate's bookkeeping: inside `accumulate` a backward pass synchronises processes where `accelerator.step` reaches a
multiple of `gradient_accumulation_steps`, and `accelerator.backward` divides the loss by that number. The loop outside
sees one batch per optimizer step, so both are set here, before the first micro-batch, and put back after the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from accelerate.utils.memory import clear_device_cache

from ..precision.loss_scaler import deepspeed_minimum
from ..runtime.collectives import max_over_processes, sum_over_processes
from ..runtime.out_of_memory import StepOutOfMemory, is_out_of_memory
from .gradients import NativeGradients
from .plan import MicroBatch


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


def run_micro_batches(
    accelerator: Accelerator,
    model: torch.nn.Module,
    gradients: NativeGradients | None,
    micro_batches: Sequence[MicroBatch],
    loss_of: Callable[[MicroBatch], torch.Tensor],
    between: Callable[[], None] = lambda: None,
) -> None:
    """Forward and backward over the micro-batches inside Accelerate's `accumulate`; then one sum over the processes.

    Args:
        gradients: how gradients are added up; None where the engine (FSDP, DeepSpeed) does it, in its last backward.
        between: runs after every micro-batch but the last.

    Raises:
        StepOutOfMemory: on every process, with the gradients thrown away.
        PrecisionError: in bitwise mode, gradients that are not finite or out of range.
    """
    if gradients is None:
        _run_sharded(accelerator, model, micro_batches, loss_of, between)
        return
    # more than there are, so that none synchronises; a power of two, so that dividing by it is exact
    count = 1 << len(micro_batches).bit_length()
    accelerator.gradient_accumulation_steps = count
    accelerator.step = 0
    with out_of_memory_on_all(accelerator, gradients.discard):
        gradients.start()
        try:
            for number, micro_batch in enumerate(micro_batches):
                if number:
                    between()
                with accelerator.accumulate(model):
                    accelerator.backward(loss_of(micro_batch) * count)
        finally:
            gradients.stop()
            accelerator.gradient_accumulation_steps = 1
    terms = torch.tensor(float(len(micro_batches)), device=accelerator.device)
    gradients.finish(int(sum_over_processes(terms)))
    accelerator.sync_gradients = True  # the optimizer may step


def _run_sharded(
    accelerator: Accelerator,
    model: torch.nn.Module,
    micro_batches: Sequence[MicroBatch],
    loss_of: Callable[[MicroBatch], torch.Tensor],
    between: Callable[[], None],
) -> None:
    """The micro-batches of an engine that reduces gradients in the backward pass.

    `accelerator.backward` divides by the number of micro-batches (not under DeepSpeed) and the engine averages over
    processes; the scale takes both back, because the weights already are those of the whole step.
    """
    count = len(micro_batches)
    deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
    scale = accelerator.num_processes * (1 if deepspeed else count)
    options = {"scale_wrt_gas": False} if deepspeed else {}
    accelerator.gradient_accumulation_steps = count
    accelerator.step = 0
    try:
        for number, micro_batch in enumerate(micro_batches):
            if number:
                between()
            with accelerator.accumulate(model), deepspeed_minimum():
                accelerator.backward(loss_of(micro_batch) * scale, **options)
    finally:
        accelerator.gradient_accumulation_steps = 1


def clear_cache_every(steps: int | None, step: int) -> None:
    """Honour `torch_empty_cache_steps`: free the device's cache every so many optimizer steps."""
    if steps is not None and step % steps == 0:
        clear_device_cache()
