"""Copies of the models that hold the weights of an earlier moment, for a thread that samples while the run trains.

Differs from a deep copy: weights that are not trained (the base under an adapter, a fixed reference) are shared, and
`put_in_place` points the copies at saved tensors instead of copying them. Used by rollouts.ahead.
"""

import copy
import threading
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import ModelError
from .architecture import base_model_of

# what TRL, Accelerate and this package set on a model to replace its forward
_REPLACED = ("forward", "_original_forward", "_is_accelerate_prepared")
Tensors = dict[str, torch.Tensor]


class Abandoned(Exception):
    """The run has ended: the thread stops at its next forward."""


@dataclass(frozen=True)
class Weights:
    progress: dict[str, Any]  # of the run, by the names of the Trainer's state
    policy: Tensors  # trained parameters and buffers
    reference: Tensors  # parameters, if they move (`sync_ref_model`), and buffers

    @property
    def step(self) -> int:
        return self.progress["global_step"]


def _saved_buffers(model: nn.Module) -> Tensors:
    """The buffers that may change, such as a router's bias."""
    modules, buffers = dict(model.named_modules()), {}
    for name, buffer in model.named_buffers():
        path, _, attribute = name.rpartition(".")
        if buffer.is_floating_point() and attribute not in modules[path]._non_persistent_buffers_set:
            buffers[name] = buffer
    return buffers


def refuse_replaced_forward(model: nn.Module, by_user: bool = False) -> None:
    """Raise a ModelError for a model whose copy would run the weights of the original.

    `by_user`: the call comes before TRL replaces forwards, so those of the model and its base are a user's, unless an
    earlier trainer of this package replaced them. Otherwise a copy gets the forwards of its class.
    """
    outer = (model, base_model_of(model))
    for path, module in model.named_modules():
        replaced = (forward := vars(module).get("forward")) is not None
        if module in outer:
            replaced = replaced and by_user and not hasattr(forward, "of_grpo_ext")
        else:
            replaced = replaced and getattr(forward, "__self__", None) is not module
        if replaced or hasattr(module, "_hf_hook"):
            raise ModelError(
                f"the forward of {path or type(module).__name__} was replaced (device_map, cast_lm_head_to_fp32, or by "
                "hand), so a copy of the model would run the weights that are trained; rollout_lag, and the reference "
                "of some adapters, need the forwards of the model's class. Use rollout_lag=0, or beta=0."
            )


def deep_copy(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    try:
        return copy.deepcopy(model, memo)
    except (TypeError, RuntimeError) as error:
        raise ModelError(
            f"{type(model).__name__} cannot be copied ({error}), which rollout_lag and the reference of beta > 0 need. "
            "Use rollout_lag=0, and beta=0 or, for the reference, a folder that save_pretrained has written."
        ) from None


def sharing_copy(model: nn.Module, moving: Set[str], device: torch.device) -> nn.Module:
    """A copy on the device that shares all parameters except `moving`, with the forward of its class."""
    refuse_replaced_forward(model)
    memo: dict[int, Any] = {}
    for name, parameter in model.named_parameters():
        if name not in moving and parameter.device != device:
            continue
        if type(parameter) is nn.Parameter:  # a new object, because PEFT turns gradients on and off
            memo[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=False)
        elif name not in moving:  # bitsandbytes' kinds of parameters are shared; another kind that moves is copied
            memo[id(parameter)] = parameter
    twin = deep_copy(model, memo)
    for module in (twin, base_model_of(twin)):
        for name in _REPLACED:
            vars(module).pop(name, None)
    for name, tensor in _tensors(twin).items():
        if name not in moving and tensor.device != device:
            tensor.data = tensor.data.to(device)
    return twin


def _tensors(model: nn.Module) -> Tensors:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


class Snapshot:
    """Copies that hold the weights of one moment, a teacher's are shared; once `abandoned`, a forward raises."""

    def __init__(
        self, policy: nn.Module, reference: Any, reference_moves: bool, device: Any, prepare: Any, teacher: Any = None
    ) -> None:
        self.device, self.abandoned = torch.device(device), threading.Event()
        trained: Tensors = {name: p for name, p in policy.named_parameters() if p.requires_grad}
        self._live: list[Tensors] = [trained | _saved_buffers(policy), {}]
        if reference is not None:
            self._live[1] = (dict(reference.named_parameters()) if reference_moves else {}) | _saved_buffers(reference)
        self._copied: list[Tensors] = []
        self.policy = self._copy(policy, self._live[0].keys(), prepare)
        self.reference = None if reference is None else self._copy(reference, self._live[1].keys(), prepare)
        self.teacher = None if teacher is None else self._copy(teacher, frozenset(), prepare)

    def _copy(self, model: nn.Module, moving: Set[str], prepare: Any) -> Any:
        twin = sharing_copy(model, moving, self.device)
        self._copied.append({name: tensor for name, tensor in _tensors(twin).items() if name in moving})
        base_model_of(twin).register_forward_pre_hook(self._check)  # PEFT generates with the model inside
        return prepare(twin)

    def _check(self, *args: Any) -> None:
        if self.abandoned.is_set():
            raise Abandoned

    def copy_weights(self, progress: dict[str, Any]) -> Weights:
        parts = [{n: p.detach().to(self.device, copy=True) for n, p in moving.items()} for moving in self._live]
        if self.device.type == "cuda":  # another stream reads them
            torch.cuda.current_stream(self.device).synchronize()
        return Weights(progress, *parts)

    def put_in_place(self, weights: Weights) -> None:
        # without a reference, only the policy is copied; a teacher, the last, has no weights of its own
        for tensors, part in zip(self._copied, (weights.policy, weights.reference), strict=False):
            for name, tensor in tensors.items():
                tensor.data = part[name].to(self.device)  # a checkpoint's weights are on the CPU
