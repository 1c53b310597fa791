"""Models with weights in 4 or 8 bits (bitsandbytes): thresholds of layers, and layers that must not be repacked.

Used when a trainer is built, and by the comparison of forms. Layers are recognised by their attributes, so bitsandbytes
is not imported.
"""

from typing import Any

from torch import nn

from ..errors import ModelError

EIGHT_BIT_UNIT = 1 / 254  # LLM.int8 rounds activations to 127 steps of the largest one in a row


def outlier_thresholds(model: nn.Module) -> dict[str, float]:
    """Thresholds by LLM.int8 layer; 0: no column is an outlier."""
    states: dict[str, Any] = {path: getattr(module, "state", None) for path, module in model.named_modules()}
    return {path: float(state.threshold) for path, state in states.items() if hasattr(state, "has_fp16_weights")}


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
