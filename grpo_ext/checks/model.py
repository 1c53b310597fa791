"""Checks of a model, its adapter and its optimizer before training, above all for what depends on the split."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger
from accelerate.utils import is_compiled_module
from huggingface_hub import file_exists
from huggingface_hub.errors import HfHubHTTPError
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from transformers import PretrainedConfig
from transformers.utils import cached_file

from ..errors import ConfigError, ModelError
from ..forward.architecture import base_model_of
from ..forward.dropout import is_keyed
from ..forward.quantised import outlier_thresholds
from ..step.gradients import refuse_gradient_hooks

logger = get_logger(__name__)

_RANDOM_ATTRIBUTES = ("dropout", "layerdrop", "drop_path", "pdrop", "jitter")

# what these kinds of PEFT adapters do in a forward pass
_SPLIT_DEPENDENT_ADAPTERS = {
    "LILY": "averages its router over the micro-batch",
    "PVERA": "draws noise for each micro-batch",
}


def check_causal_lm(model: Any) -> None:
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is None or not callable(getattr(model, "generate", None)):
        raise ModelError(
            f"the model is a {type(model).__name__} and cannot both sample and score text; pass a model id, a path, or "
            "a model that was loaded with AutoModelForCausalLM."
        )


def refuse_compiled(model: nn.Module) -> None:
    if parts := [path or "the model" for path, module in model.named_modules() if is_compiled_module(module)]:
        raise ModelError(
            f"torch.compile wraps {', '.join(parts[:3])}, so checkpoints would put _orig_mod into the names of "
            "weights, and no model would load them. Pass the model inside with torch_compile=True, or compile modules "
            "in place (module.compile())."
        )


def find_reward_model(name: str, load: Mapping[str, Any]) -> None:
    """Refuse a reward model that cannot be found; it may be an adapter."""
    try:
        find_model(name, load, "adapter_config.json")
    except ModelError:
        find_model(name, load, what="reward model")


def find_model(name: str, load: Mapping[str, Any], file: str = "config.json", what: str = "model") -> None:
    """Refuse a model that cannot be found; without a network at once, where transformers would retry."""
    place = {key: load[key] for key in ("revision", "token", "cache_dir") if load.get(key) is not None}
    reached = True
    try:
        if not Path(name).is_dir():
            file_exists(name, file, revision=load.get("revision"), token=load.get("token"))  # no retries
    except Exception as error:  # without a connection the HTTP library's, which depends on huggingface_hub's version
        reached = isinstance(error, HfHubHTTPError)
    try:
        cached_file(name, file, **place, local_files_only=not reached)
    except OSError as error:
        path = Path(name).expanduser()
        if not path.exists() and (name.startswith((".", "/", "~")) or len(path.parts) > 2):
            raise ModelError(f"there is no folder {name!r} with a {what}; check the path.") from None
        raise ModelError(f"{what} {name!r} cannot be loaded; check the path or the name. {error}") from None


def refuse_frozen(model: nn.Module) -> None:
    if not any(p.requires_grad for p in model.parameters()):
        raise ModelError(
            "no parameter of the model is trained (requires_grad is False for all of them); to continue training an "
            "adapter, load it with PeftModel.from_pretrained(..., is_trainable=True)."
        )


def _is_rate(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def _rates(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield attributes of a module that are noise rates above zero; PEFT keeps some in a dict by adapter."""
    is_dropout = "dropout" in type(module).__name__.lower()
    for attribute, value in vars(module).items():
        if not any(word in attribute for word in _RANDOM_ATTRIBUTES) and not (is_dropout and attribute == "p"):
            continue
        values = value.values() if isinstance(value, dict) else (value,)
        if any(_is_rate(v) for v in values):
            yield attribute, value


def random_parts(model: nn.Module, keyed: bool = False) -> Iterator[str]:
    """Describe noise that belongs to a batch, and with `keyed` dropout that belongs to tokens here."""
    of_tokens = {module for module in base_model_of(model).modules() if is_keyed(module) and not keyed}
    for path, module in model.named_modules():
        if module in of_tokens:
            continue
        for attribute, value in _rates(module):
            yield f"{path or 'model'} ({type(module).__name__}): {attribute}={value}"


def disable_random_parts(model: nn.Module) -> None:
    """Set every rate to zero, in configurations too: TRL's `disable_dropout` reaches only `nn.Dropout` modules."""
    for module in model.modules():
        for attribute, value in list(_rates(module)):
            setattr(module, attribute, dict.fromkeys(value, 0.0) if isinstance(value, dict) else 0.0)
        config = getattr(module, "config", None)
        if isinstance(config, PretrainedConfig):
            for attribute, value in list(vars(config).items()):
                if any(word in attribute for word in _RANDOM_ATTRIBUTES) and _is_rate(value):
                    setattr(config, attribute, 0.0)


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


def refuse_adapters(policy: nn.Module) -> None:
    base, adapters = base_model_of(policy), getattr(policy, "peft_config", None) or {}
    if getattr(base, "_hf_peft_config_loaded", False):
        raise ModelError(
            "the adapter was added by transformers' add_adapter or load_adapter, whose checkpoints cannot be resumed; "
            "pass the base with peft_config=..., or the result of peft.get_peft_model or "
            "PeftModel.from_pretrained(..., is_trainable=True)."
        )
    for name, config in adapters.items():
        if getattr(config, "is_prompt_learning", False):
            kind = str(getattr(config.peft_type, "value", config.peft_type))
            raise ModelError(
                f"adapter {name!r} ({kind}) puts virtual tokens before the prompt, which packs, shared prefixes and "
                "padded batches do not support; train another kind of adapter, for example LoRA."
            )
    ends = [f".{name}." for name in adapters]
    if any(getattr(config, "bias", "none") != "none" for config in adapters.values()):
        ends.append(".bias.")
    trained = [name for name, parameter in policy.named_parameters() if parameter.requires_grad and adapters]
    lost = [name for name in trained if not any(end in f"{name}." for end in ends)]
    if lost or (adapters and len(policy.active_adapters) > 1):  # type: ignore[arg-type]
        raise ModelError(
            f"only one active adapter can be resumed, and no weights beside it (here: {lost[:1] or [*adapters]}); put "
            "other modules into modules_to_save, and merge a second adapter into the base (merge_and_unload)."
        )
