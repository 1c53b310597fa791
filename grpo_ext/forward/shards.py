"""Models whose weights processes share (FSDP2, ZeRO), with the weights of some moment in them for a while.

Differs from `Snapshot`: a forward of theirs is a collective, which the main thread alone may run, so a second object
would compute nothing beside training. What is kept of a moment is each process's part. Used by rollouts.ahead.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from .lm_head import gathered
from .snapshot import Tensors, Weights, moving_tensors, refuse_other_names


class ShardedSnapshot:
    """As `Snapshot`, of models whose weights processes share; for the main thread of all processes together.

    Args:
        policy, reference, reference_moves: as those of a `Snapshot`.
        keeps_whole: this process wants weights as a checkpoint holds them.

    Attributes:
        policy, reference: what the thread sees, which runs no forward: an empty module with settings of the policy.
        sent: whose weights a server is sent, while they are `in_place`.
        abandoned: the run has ended.
    """

    def __init__(self, policy: Any, reference: Any, reference_moves: bool, keeps_whole: bool) -> None:
        self._models = [model for model in (policy, reference) if model is not None]
        self._cut_again()
        self._moving = moving_tensors(policy, reference, reference_moves)
        self._keeps_whole = keeps_whole
        settings: Any = nn.Module()
        settings.config, settings.is_gradient_checkpointing = copy.deepcopy(policy.config), False
        self.policy, self.reference, self.sent = settings, None, policy
        self.abandoned = threading.Event()

    def take(self, progress: dict[str, Any]) -> Weights:
        """This process's parts of the weights as they are now, copied."""
        self._cut_again()
        return Weights(progress, *({name: part.clone() for name, part in parts.items()} for parts in self._parts()))

    def put_in_place(self, weights: Weights) -> None:
        """Nothing: the thread runs no forward."""

    @contextmanager
    def in_place(self, weights: Weights) -> Iterator[None]:
        """Inside, the models compute with these weights, and afterwards with their own again."""
        now = self.take(weights.progress)
        self._put(weights)
        try:
            yield
        finally:
            self._put(now)

    def whole(self, weights: Weights) -> Weights:
        """The weights as a checkpoint holds them: put together, in the memory of the CPU; empty where none are kept."""
        parts: list[Tensors] = []
        with self.in_place(weights):
            for parameters in self._moving:
                part: Tensors = {}
                for name, parameter in parameters.items():
                    with gathered(parameter), torch.no_grad():
                        full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
                        if self._keeps_whole:
                            part[name] = full.detach().to("cpu", copy=True)
                parts.append(part)
        return Weights(weights.progress, *parts)

    def own(self, weights: Weights) -> Weights:
        """This process's parts of weights that a checkpoint held."""
        parts = []
        for parameters, whole in zip(self._moving, (weights.policy, weights.reference)):
            refuse_other_names(parameters, whole)
            parts.append({name: _cut(parameter, whole[name]) for name, parameter in parameters.items()})
        return Weights(weights.progress, *parts)

    def _parts(self) -> list[Tensors]:
        return [{name: _part(p) for name, p in parameters.items()} for parameters in self._moving]

    def _put(self, weights: Weights) -> None:
        with torch.no_grad():
            for parts, others in zip(self._parts(), (weights.policy, weights.reference)):
                for name, part in parts.items():
                    part.copy_(others[name])
        self._cut_again()

    def _cut_again(self) -> None:
        """Reshard parameters a forward left gathered."""
        for model in self._models:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
            parameters: list[Any] = list(model.parameters())
            status = [getattr(getattr(p, "ds_status", None), "name", "") for p in parameters]
            if whole := [p for p, is_there in zip(parameters, status) if is_there == "AVAILABLE"]:
                # ZeRO-3 leaves small ones whole between steps
                whole[0].partition(whole)
                whole[0].all_gather(whole)


def _part(parameter: torch.Tensor) -> torch.Tensor:
    """What this process holds of a parameter; all of it where processes share the optimizer's state alone."""
    if isinstance(parameter, DTensor):
        return parameter.to_local().detach()
    return getattr(parameter, "ds_tensor", parameter).detach()


def _cut(parameter: Any, whole: torch.Tensor) -> torch.Tensor:
    """This process's part of a parameter that is put together."""
    part = _part(parameter)
    if isinstance(parameter, DTensor):
        mesh, places = parameter.device_mesh, parameter.placements
        placed: Any = distribute_tensor(whole.to(part.device), mesh, places, src_data_rank=None)
        return placed.to_local()
    if hasattr(parameter, "ds_tensor"):
        import deepspeed.comm

        size, rank = part.numel(), deepspeed.comm.get_rank(group=parameter.ds_process_group)
        filled = nn.functional.pad(whole.flatten(), (0, max(0, size * (rank + 1) - whole.numel())))
        return filled[size * rank : size * (rank + 1)].to(part)
    return whole.to(part)
