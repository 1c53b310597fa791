"""Models with weights in 4 or 8 bits (bitsandbytes): adapters in float32, and layers that must not be repacked.

Differs from TRL, which trains the adapters of such models in bfloat16. Used when a trainer is built, and by the
comparison of forms. Layers are recognised by their attributes, so bitsandbytes is not imported.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..errors import ModelError

EIGHT_BIT_UNIT = 1 / 254  # LLM.int8 rounds activations to 127 steps of the largest one in a row


def outlier_thresholds(model: nn.Module) -> dict[str, float]:
    """Thresholds by LLM.int8 layer; 0: no column is an outlier."""
    states: dict[str, Any] = {path: getattr(module, "state", None) for path, module in model.named_modules()}
    return {path: float(state.threshold) for path, state in states.items() if hasattr(state, "has_fp16_weights")}


def trained_values(model: Any) -> dict[str, torch.Tensor]:
    """The trained parameters of a quantised model object, without a copy; empty for other models."""
    if not getattr(model, "is_quantized", False):
        return {}
    return {name: parameter.data for name, parameter in model.named_parameters() if parameter.requires_grad}


def train_in_float32(model: nn.Module, before: Mapping[str, torch.Tensor]) -> None:
    """`before`: the values of trained parameters before TRL cast them to bfloat16."""
    if not getattr(model, "is_quantized", False):
        return
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype.itemsize < 4:
            parameter.data = before.get(name, parameter.data).to(parameter.device, torch.float32)


def keep_4bit_weights(model: nn.Module) -> None:
    """Keep bitsandbytes from repacking 4-bit weights, which it does on CPUs in the first forward after `eval()`.

    A repacked layer computes in bfloat16 and has no gradient, in training mode too; unpacking rounds again.
    """
    for path, module in model.named_modules():
        if not hasattr(module, "support_avx512bf16_for_cpu"):
            continue
        state: Any = getattr(module.weight, "quant_state", None)
        if getattr(state, "packing_format_for_cpu", False):
            raise ModelError(
                f"bitsandbytes has repacked the 4-bit weights of {path} for inference, as it does on this CPU in the "
                "first forward after model.eval() (or from_pretrained), and such a layer has no gradient; load the "
                "model again, and call model.train() before you run it."
            )
        module.support_avx512bf16_for_cpu = False
