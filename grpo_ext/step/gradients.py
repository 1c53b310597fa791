"""The gradient of a step: backward passes inside Accelerate's `accumulate`, and one sum over all processes.

Differs from DDP's reduction inside the backward pass: it comes after the last backward, so that processes may run
different numbers of micro-batches, find out together whether one of them failed (out of memory), and, in bitwise mode,
add integers. Sharded engines reduce by themselves.

Accelerate's bookkeeping: inside `accumulate` a backward pass synchronises processes where `accelerator.step` reaches a
multiple of `gradient_accumulation_steps`, and `accelerator.backward` divides the loss by that number. The loop outside
sees one batch per optimizer step, so both are set here, before the first micro-batch, and put back after the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from accelerate.utils.memory import clear_device_cache

from ..precision.fixed_point import FixedPointSum
from ..runtime.collectives import max_over_processes, stack_over_processes, sum_in_place, sum_over_processes
from ..runtime.out_of_memory import StepOutOfMemory, is_out_of_memory


def _used_anywhere(used: Sequence[bool], accelerator: Accelerator) -> list[bool]:
    """Which of the parameters have a gradient on any process."""
    mine = torch.tensor(used, dtype=torch.int32, device=accelerator.device)
    return stack_over_processes(mine).amax(0).bool().tolist()


class NativeGradients:
    """Sums in the parameters' own `.grad`: fast, and equal to rounding for every split."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], accelerator: Accelerator) -> None:
        self.parameters, self.accelerator = [p for p in parameters if p.requires_grad], accelerator

    def start(self) -> None:
        """Before the first backward of a step."""

    def stop(self) -> None:
        """After the last backward, also where it failed."""

    def discard(self) -> None:
        """Throw the gradients away."""
        for parameter in self.parameters:
            parameter.grad = None

    def finish(self, terms: int) -> None:
        """Sum over all processes; afterwards `.grad` is that of the step on every process."""
        if self.accelerator.num_processes == 1:
            return
        anywhere = _used_anywhere([p.grad is not None for p in self.parameters], self.accelerator)
        shared = [p for p, used in zip(self.parameters, anywhere) if used]
        for parameter in shared:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        sum_in_place([p.grad for p in shared if p.grad is not None])


class FixedPointGradients(NativeGradients):
    """Sums of 64-bit integers, whose bits do not depend on how the step was cut or assigned (precision.fixed_point).

    Each backward pass fills `.grad` anew; a hook takes it from there, so the memory of one gradient is added to twice
    that of the sums.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        accelerator: Accelerator,
        names: Sequence[str],
    ) -> None:
        super().__init__(parameters, accelerator)
        self.names = [n for n, p in zip(names, parameters) if p.requires_grad]
        self._sums: dict[int, FixedPointSum] = {}
        self._hooks: list[Any] = []

    def start(self) -> None:
        def take(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            total = self._sums.get(id(parameter))
            if total is None:
                total = self._sums[id(parameter)] = FixedPointSum(parameter)
            total.add(parameter.grad)
            parameter.grad = None

        self._sums.clear()
        self._hooks = [p.register_post_accumulate_grad_hook(take) for p in self.parameters]

    def stop(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def discard(self) -> None:
        super().discard()
        self._sums.clear()

    def finish(self, terms: int) -> None:
        """Sum over all processes and hand the gradient over, once.

        Args:
            terms: backward passes of the step, over all processes.

        Raises:
            PrecisionError: on every process, where a term was not finite or out of range on any of them.
        """
        device = self.accelerator.device
        anywhere = _used_anywhere([id(p) in self._sums for p in self.parameters], self.accelerator)
        shared = [(p, name) for p, name, used in zip(self.parameters, self.names, anywhere) if used]
        for parameter, _ in shared:
            if id(parameter) not in self._sums:
                self._sums[id(parameter)] = FixedPointSum(parameter)
        if not shared:
            return
        highest = torch.stack([self._sums[id(p)].largest.to(device) for p, _ in shared])
        everyone = stack_over_processes(highest).nan_to_num(nan=float("inf")).amax(0).tolist()
        for (parameter, name), largest in zip(shared, everyone):
            self._sums[id(parameter)].check(name, terms, largest)
        if self.accelerator.num_processes > 1:
            sum_in_place([self._sums[id(p)].total for p, _ in shared])
        for parameter, _ in shared:
            parameter.grad = self._sums.pop(id(parameter)).value(parameter.dtype)


@contextmanager
def out_of_memory_on_all(accelerator: Accelerator, discard: Callable[[], None] | None) -> Iterator[None]:
    """Make an out-of-memory error inside known to all processes. No collective may run inside.

    Args:
        discard: throws the gradients away, on every process; None where a forward is itself a collective: processes
            that wait in one cannot learn of the failure, so the error is raised as it is.

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
    under DeepSpeed) and the engine averages over processes; the scale undoes both, because the weights are those of the
    whole step.
    """

    def __init__(self, accelerator: Accelerator, model: Any, count: int, by_engine: bool) -> None:
        self.accelerator, self.model = accelerator, model
        deepspeed = by_engine and accelerator.distributed_type == DistributedType.DEEPSPEED
        # `steps` exceeds the count, so no backward synchronises; a power of two, so that dividing by it is exact
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
