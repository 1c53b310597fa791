"""Weights that bitsandbytes holds in 4 or 8 bits: what its layers do in a forward that training has to know.

Differs from TRL, which trains such models as they are. Used while a trainer is built, and by the form check. The
layers are known by their attributes, so bitsandbytes is not imported.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ..errors import ModelError

EIGHT_BIT_UNIT = 1 / 254  # LLM.int8 rounds activations to 127 steps of the largest one in a row


def outlier_thresholds(model: nn.Module) -> dict[str, float]:
    """The layers of LLM.int8, by name, and the size of an activation that makes its column an outlier; 0: none does."""
    states: dict[str, Any] = {path: getattr(module, "state", None) for path, module in model.named_modules()}
    return {path: float(state.threshold) for path, state in states.items() if hasattr(state, "has_fp16_weights")}


def keep_4bit_weights(model: nn.Module) -> None:
    """Keep bitsandbytes from repacking 4-bit weights in the first forward in evaluation mode, on CPUs with bfloat16.

    Repacked, a layer computes in bfloat16 and passes no gradient on, also in training mode; unpacking rounds it anew.

    Raises:
        ModelError: a layer is repacked already.
    """
    for path, module in model.named_modules():
        if not hasattr(module, "support_avx512bf16_for_cpu"):
            continue
        state: Any = getattr(module.weight, "quant_state", None)
        if getattr(state, "packing_format_for_cpu", False):
            raise ModelError(
                f"bitsandbytes has repacked the 4-bit weights of {path} for inference, as it does on this CPU in the "
                "first forward after model.eval() (or from_pretrained), and such a layer passes no gradient on; load "
                "the model again, and call model.train() before you run it."
            )
        module.support_avx512bf16_for_cpu = False
