"""Models as they were at some moment, for a thread that runs them while the run trains on.

Differs from a deep copy: what is not trained (the base under an adapter, a reference that stays) is shared, and the
weights of a moment are put in place without being copied again. Used by rollouts.ahead.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import ModelError
from .reference import base_model_of

# by TRL, Accelerate and this package, around the forward of a model
_PUT_AROUND = ("forward", "_original_forward", "_is_accelerate_prepared")
Tensors = dict[str, torch.Tensor]


class Abandoned(Exception):
    """The run has ended: what runs beside it stops at its next forward."""


@dataclass(frozen=True)
class Weights:
    """The weights of a moment, by parameter.

    Attributes:
        progress: of the run, by the names of the Trainer's state.
        policy: its trained parameters, and its buffers.
        reference: the parameters of the reference model, where it moves (`sync_ref_model`), and its buffers.
    """

    progress: dict[str, Any]
    policy: Tensors
    reference: Tensors

    @property
    def step(self) -> int:
        """Optimizer steps made before."""
        return self.progress["global_step"]

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.nbytes for part in (self.policy, self.reference) for tensor in part.values())


def moving_tensors(policy: nn.Module, reference: nn.Module | None, reference_moves: bool) -> tuple[Tensors, Tensors]:
    """What changes during training, by name: trained parameters, those of a reference that moves, and buffers.

    Of the buffers floating point numbers that are saved with a model: a router's bias, for example, which a callback
    moves. Quantised weights of some libraries are buffers too, of integers.
    """
    trained: Tensors = {name: parameter for name, parameter in policy.named_parameters() if parameter.requires_grad}
    moved: Tensors = dict(reference.named_parameters()) if reference is not None and reference_moves else {}
    return trained | _saved_buffers(policy), moved | ({} if reference is None else _saved_buffers(reference))


def refuse_other_names(tensors: Tensors, weights: Tensors) -> None:
    """Refuse weights that are not those of a model.

    Raises:
        ModelError: names what only one of the two has.
    """
    if missing := tensors.keys() ^ weights.keys():
        raise ModelError(f"the weights to sample with and the model have other parameters: {sorted(missing)}")


def _saved_buffers(model: nn.Module) -> Tensors:
    parts = dict(model.named_modules())
    owned = [(name, buffer, name.rpartition(".")) for name, buffer in model.named_buffers()]
    kept = [(n, b) for n, b, (path, _, own) in owned if own not in parts[path]._non_persistent_buffers_set]
    return {name: buffer for name, buffer in kept if buffer.is_floating_point()}


def _tensors(model: nn.Module) -> Tensors:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _copy_of(model: nn.Module, moving: Set[str], device: torch.device) -> nn.Module:
    """A second object of a model, whose `moving` parameters can be exchanged; it shares the others' memory.

    Its forward is that of its class: what TRL, Accelerate and this package put in its place runs the weights of the
    first.
    """
    memo: dict[int, Any] = {}
    for name, parameter in model.named_parameters():
        if name not in moving and parameter.device != device:
            continue
        # the objects are its own, as PEFT turns gradients on and off; but for weights that bitsandbytes holds
        plain = type(parameter) is nn.Parameter
        memo[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=False) if plain else parameter
    try:
        twin = copy.deepcopy(model, memo)
    except (TypeError, RuntimeError) as error:
        raise ModelError(
            f"rollout_lag samples with a copy of the model, and {type(model).__name__} cannot be copied ({error}). Use "
            "rollout_lag=0."
        ) from None
    for part in (twin, base_model_of(twin)):
        for name in _PUT_AROUND:
            vars(part).pop(name, None)
    refuse_replaced_forward(twin)
    return twin if all(p.device == device for p in twin.parameters()) else _moved(twin, moving, device)


def _moved(twin: nn.Module, moving: Set[str], device: torch.device) -> nn.Module:
    for name, parameter in twin.named_parameters():
        if name not in moving and parameter.device != device:  # a copy already
            parameter.data = parameter.data.to(device)
    for buffer in twin.buffers():
        buffer.data = buffer.data.to(device)
    return twin


def refuse_replaced_forward(model: nn.Module, *but: nn.Module) -> None:
    """Refuse a model of which a copy would run the weights of the first.

    Args:
        but: modules whose forward is put back in a copy.

    Raises:
        ModelError: a function stands in the place of the forward of a module; names it.
    """
    for path, module in model.named_modules():
        found = vars(module).get("forward")
        replaced = found is not None and getattr(found, "__self__", None) is not module
        if hasattr(module, "_hf_hook") or (replaced and module not in but):
            raise ModelError(
                f"the forward of {path or type(module).__name__} was replaced (device_map, cast_lm_head_to_fp32, or by "
                "hand), so a copy of the model would run the weights that are trained; rollout_lag needs a model on "
                "one device as its class has it. Use rollout_lag=0."
            )


def refuse_no_copy(model: nn.Module) -> None:
    """Refuse a model that cannot be copied, before anything trains; its parameters take no memory for it.

    Raises:
        ModelError: names what Python says.
    """
    _copy_of(model, set(), next(model.parameters()).device)


class Snapshot:
    """The policy and its reference as objects of their own, holding the weights of one moment at a time.

    Args:
        policy: the model that is trained, as PEFT wraps it; reference: the one beside it, or None.
        reference_moves: the reference is trained along (`sync_ref_model`).
        device: where the copies run.
        prepare: gives a copy what the run has put around the forward of its model.

    Attributes:
        policy, reference: the copies; device: where they are; sent: whose weights a server is sent.
        abandoned: once it is set, their next forward raises.
    """

    def __init__(
        self,
        policy: nn.Module,
        reference: nn.Module | None,
        reference_moves: bool,
        device: Any,
        prepare: Any,
    ) -> None:
        self.device = torch.device(device)
        self._live = trained, moves = moving_tensors(policy, reference, reference_moves)
        self._in_copies: list[Tensors] = []
        self.abandoned = threading.Event()
        self.policy = self.sent = self._copy(policy, trained.keys(), prepare)
        self.reference = None if reference is None else self._copy(reference, moves.keys(), prepare)

    def _copy(self, model: nn.Module, moving: Set[str], prepare: Any) -> Any:
        twin = _copy_of(model, moving, self.device)
        self._in_copies.append({name: tensor for name, tensor in _tensors(twin).items() if name in moving})
        base_model_of(twin).register_forward_pre_hook(self._check)  # PEFT generates with the model inside
        return prepare(twin)

    def _check(self, *args: Any) -> None:
        if self.abandoned.is_set():
            raise Abandoned

    def take(self, progress: dict[str, Any]) -> Weights:
        """The weights of the models as they are now, copied."""
        parts = [{n: p.detach().to(self.device, copy=True) for n, p in moving.items()} for moving in self._live]
        if self.device.type == "cuda":  # another stream reads them
            torch.cuda.current_stream(self.device).synchronize()
        return Weights(progress, *parts)

    def put_in_place(self, weights: Weights) -> None:
        """Let the copies compute with these weights."""
        for tensors, part in zip(self._in_copies, (weights.policy, weights.reference)):
            refuse_other_names(tensors, part)
            for name, tensor in tensors.items():
                tensor.data = part[name].to(self.device)  # those of a checkpoint come from the CPU

    @contextmanager
    def in_place(self, weights: Weights) -> Iterator[None]:
        """Inside, what is `sent` computes with these weights; afterwards too, until others are put in place."""
        self.put_in_place(weights)
        yield

    def whole(self, weights: Weights) -> Weights:
        """The weights as a checkpoint holds them."""
        return weights

    def own(self, weights: Weights) -> Weights:
        """Those that a checkpoint held."""
        return weights
