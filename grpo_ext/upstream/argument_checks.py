"""Checks of a trainer's model and settings of sampling before training, and dropout that is off in every module.

Repairs `trl.GRPOTrainer.__init__`, which takes a model that cannot sample, is compiled, has nothing to train or an
adapter that no checkpoint brings back, and unknown settings of `generate`, and fails later or never;
`transformers.utils.cached_file`, which retries for minutes without a network; and
`trl.trainer.utils.disable_dropout_in_model`, which reaches only `nn.Dropout`. Until they fix it; last seen in TRL 1.16
and transformers 5.23.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from accelerate.utils import is_compiled_module
from huggingface_hub import file_exists
from huggingface_hub.errors import HfHubHTTPError
from torch import nn
from transformers import GenerationConfig, PretrainedConfig
from transformers.utils import cached_file

from .. import compat
from ..errors import ConfigError, ModelError, did_you_mean
from ..forward.architecture import base_model_of

# names of vLLM's settings, and transformers'
_OF_VLLM = {"stop": "stop_strings", "stop_token_ids": "eos_token_id", "max_tokens": "max_completion_length"}
_RANDOM_ATTRIBUTES = ("dropout", "layerdrop", "drop_path", "pdrop", "jitter")


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


def rates(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield attributes of a module that are noise rates above zero; PEFT keeps some in a dict by adapter."""
    is_dropout = "dropout" in type(module).__name__.lower()
    for attribute, value in vars(module).items():
        if not any(word in attribute for word in _RANDOM_ATTRIBUTES) and not (is_dropout and attribute == "p"):
            continue
        values = value.values() if isinstance(value, dict) else (value,)
        if any(_is_rate(v) for v in values):
            yield attribute, value


def disable_random_parts(model: nn.Module) -> None:
    """Set every rate to zero, in configurations too."""
    for module in model.modules():
        for attribute, value in list(rates(module)):
            setattr(module, attribute, dict.fromkeys(value, 0.0) if isinstance(value, dict) else 0.0)
        config = getattr(module, "config", None)
        if isinstance(config, PretrainedConfig):
            for attribute, value in list(vars(config).items()):
                if any(word in attribute for word in _RANDOM_ATTRIBUTES) and _is_rate(value):
                    setattr(config, attribute, 0.0)


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


def check_generation_kwargs(config: Any) -> None:
    vllm = getattr(getattr(compat.vllm_generation, "SamplingParams", None), "__struct_fields__", ())
    known, owner = (vllm, "vLLM") if config.use_vllm else (vars(GenerationConfig()), "transformers")
    for name in (config.generation_kwargs or {}).keys() - known if known else ():
        remedy = did_you_mean(name, known, "leave it out.")
        if not config.use_vllm and name in _OF_VLLM:
            remedy = f"it is a setting of vLLM; use {_OF_VLLM[name]}."
        raise ConfigError(f"{name!r} in generation_kwargs is not a setting of {owner}; {remedy}")
