"""Checks of a model and its optimizer before training, for what depends on the split."""

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import ConfigError, ModelError
from ..forward.architecture import base_model_of
from ..forward.dropout import is_keyed
from ..forward.quantised import outlier_thresholds
from ..runtime.messages import logger
from ..step.gradients import refuse_gradient_hooks
from ..upstream.argument_checks import rates

# what these kinds of PEFT adapters do in a forward pass
_SPLIT_DEPENDENT_ADAPTERS = {
    "LILY": "averages its router over the micro-batch",
    "PVERA": "draws noise for each micro-batch",
}


def random_parts(model: nn.Module, keyed: bool = False) -> Iterator[str]:
    """Describe noise that belongs to a batch, and with `keyed` dropout that belongs to tokens here."""
    of_tokens = {module for module in base_model_of(model).modules() if is_keyed(module) and not keyed}
    for path, module in model.named_modules():
        if module in of_tokens:
            continue
        for attribute, value in rates(module):
            yield f"{path or 'model'} ({type(module).__name__}): {attribute}={value}"


def split_dependence(model: nn.Module, neftune_noise_alpha: float | None) -> list[str]:
    reasons = []
    parts = list(random_parts(model))
    if parts:
        shown = "; ".join(parts[:3]) + (f"; and {len(parts) - 3} more" if len(parts) > 3 else "")
        reasons.append(
            f"dropout is on ({shown}): its noise is drawn per micro-batch; set that rate to 0, or "
            "disable_dropout=True, which zeroes every rate, LoRA's too"
        )
    norms = [f"{path} ({type(m).__name__})" for path, m in model.named_modules() if isinstance(m, _BatchNorm)]
    if norms:
        reasons.append(
            f"batch normalisation ({norms[0]}, {len(norms)} in all) takes statistics over the micro-batch; use a "
            "model with layer or group normalisation"
        )
    for adapter, config in (getattr(model, "peft_config", None) or {}).items():
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if kind in _SPLIT_DEPENDENT_ADAPTERS:
            reasons.append(
                f"adapter {adapter!r} ({kind}) {_SPLIT_DEPENDENT_ADAPTERS[kind]}; use another kind, e.g. LoRA"
            )
    outliers = {path: size for path, size in outlier_thresholds(model).items() if size}
    if outliers:
        path, size = next(iter(outliers.items()))
        reasons.append(
            f"8-bit layers ({path}, {len(outliers)} in all; llm_int8_threshold={size:g}) pick outlier columns over the "
            "rows of a forward; load the model with quantization_config={'load_in_8bit': True, 'llm_int8_threshold': "
            "0.0} in model_init_kwargs (BitsAndBytesConfig takes the same), or in 4 bits"
        )
    if getattr(getattr(model, "config", None), "model_type", None) == "cpmant":
        reasons.append("CpmAnt puts a prompt before the padding, so padding shifts the input; use another model")
    if neftune_noise_alpha:
        reasons.append(f"neftune_noise_alpha={neftune_noise_alpha} adds noise per micro-batch; remove it")
    return reasons


def check_optimizer(optimizer: Any, model: nn.Module, sharded: bool) -> None:
    refuse_gradient_hooks(model, sharded)
    if hasattr(optimizer, "fused_backward"):
        raise ConfigError(
            f"the optimizer {type(optimizer).__name__} updates the model during the backward pass, before the step's "
            "gradient is complete; use one that acts in its step(), for example optim='adamw_torch'."
        )


def check_half_weights(model: Any, fp16: bool) -> None:
    trained = {name: p.dtype for name, p in model.named_parameters() if p.requires_grad}
    half = {name: str(dtype).removeprefix("torch.") for name, dtype in trained.items() if dtype.itemsize < 4}
    if not half:
        return
    name, dtype = next(iter(half.items()))
    if fp16:
        raise ModelError(
            f"fp16=True trains float32 weights and computes in float16, but {name} (one of {len(half)}) is {dtype}; "
            "load the model with dtype='float32' (for a name: model_init_kwargs={'dtype': 'float32'})."
        )
    logger.warning(
        f"{len(half)} of {len(trained)} trained tensors are {dtype}, which loses small updates to rounding, "
        "differently for every split. Load the model with dtype=torch.float32; bf16=True still computes in bfloat16."
    )
