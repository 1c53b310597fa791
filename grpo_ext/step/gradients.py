"""The gradient of a step: added up over micro-batches on each process, then once over all processes.

Differs from DDP's reduction inside the backward pass: it comes after the last backward, so that processes may run
different numbers of micro-batches, find out together whether one of them failed (out of memory), and, in bitwise mode,
add integers. Used by optimizer_step.py where every process holds the whole model; sharded engines reduce by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator

from ..precision.fixed_point import FixedPointSum
from ..runtime.collectives import stack_over_processes, sum_in_place


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
        """Throw away what was added."""
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
