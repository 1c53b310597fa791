"""What is refused of a model, its adapter and its optimizer before training: above all what depends on the split."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import huggingface_hub
from accelerate.logging import get_logger
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from transformers import PretrainedConfig, PreTrainedTokenizerBase, ProcessorMixin

from ..config import GRPOConfig
from ..errors import ConfigError, ModelError, SplitDependentError
from ..forward.quantised import outlier_thresholds
from ..runtime.quiet import quiet

logger = get_logger(__name__)

_HUB_SECONDS = 10.0
_RANDOM_ATTRIBUTES = ("dropout", "layerdrop", "drop_path", "pdrop", "jitter")

# what these kinds of PEFT adapters do in a forward pass
_SPLIT_DEPENDENT_ADAPTERS = {
    "LILY": "averages its router over the micro-batch",
    "PVERA": "draws noise for each micro-batch",
}


def check_model(model: Any, config: GRPOConfig) -> None:
    """`find_model` of a name, and `check_causal_lm` of an object."""
    if isinstance(model, str):
        load: Any = config.model_init_kwargs or {}
        find_model(model, load, says=config.process_index == 0)
    else:
        check_causal_lm(model)


def check_causal_lm(model: Any) -> None:
    """Refuse what cannot generate and score text.

    Raises:
        ModelError: the object is no module, cannot `generate`, or has no language-model head.
    """
    name = type(model).__name__
    if not isinstance(model, nn.Module):
        raise ModelError(f"model is a {name}; pass a model id, a path, or a transformers causal language model.")
    remedy = "load it with AutoModelForCausalLM (a bare AutoModel has no language-model head)"
    if not callable(getattr(model, "generate", None)):
        raise ModelError(f"{name} has no `generate` method, so it cannot sample completions; {remedy}.")
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is None:
        raise ModelError(f"{name} has no output embeddings, so completions have no log-probabilities; {remedy}.")


def find_model(name: str, load: Mapping[str, Any], says: bool = True) -> None:
    """Print which model is loaded, and from where; the Hub is asked once (by transformers six times for every file).

    Args:
        load: arguments of `from_pretrained`.
        says: this process prints.

    Raises:
        ModelError: there is no such folder, and the Hub has no such model, or cannot be asked.
    """
    say = functools.partial(print, flush=True) if says else lambda line: None
    if Path(name).exists():
        say(f"Loading model {name} ...")
        return
    place: dict[str, Any] = {key: load[key] for key in ("revision", "token") if load.get(key) is not None}
    absent = f"model {name!r} is no folder here (looked in {Path.cwd()})"
    try:
        huggingface_hub.snapshot_download(name, local_files_only=True, cache_dir=load.get("cache_dir"), **place)
        say(f"Loading model {name} from the Hub's cache ...")
        return
    except HFValidationError:
        raise ModelError(
            f"{absent}, and no name of a model of the Hub, which are `owner/name`; check the path."
        ) from None
    except LocalEntryNotFoundError:
        say(f"{name} is no folder here; trying the Hub ...")
    try:
        huggingface_hub.HfApi().model_info(name, timeout=_HUB_SECONDS, **place)
    except RepositoryNotFoundError:
        raise ModelError(
            f"{absent}, and the Hub has no model of this name that is open to you; check the path or the name, and "
            "log in (`hf auth login`) if it is private."
        ) from None
    except OfflineModeIsEnabled:
        raise ModelError(
            f"{absent}, and not in the Hub's cache, which alone is read with HF_HUB_OFFLINE=1; check the path, or "
            "unset HF_HUB_OFFLINE."
        ) from None
    except HfHubHTTPError:  # the Hub is there and says something else: transformers asks again, and explains it
        return
    except Exception as error:  # of the network, by whichever library huggingface_hub talks through
        raise ModelError(
            f"{absent}, and the Hub could not be asked for a model of this name ({type(error).__name__}: {error}); "
            "check the path, or the network."
        ) from None


def check_end_token(processing_class: Any, model: Any) -> None:
    """Refuse a tokenizer without an end token, at which completions end and with which the others are filled up.

    Raises:
        ModelError: names the end token of the model, where that has one.
    """
    tokenizer = processing_class.tokenizer if isinstance(processing_class, ProcessorMixin) else processing_class
    if not isinstance(tokenizer, PreTrainedTokenizerBase) or tokenizer.eos_token_id is not None:
        return
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    first = ends[0] if isinstance(ends, list) and ends else ends
    token = "'<the token>'" if not isinstance(first, int) else repr(tokenizer.convert_ids_to_tokens(first))
    raise ModelError(
        f"the tokenizer ({type(tokenizer).__name__}) has no end token, at which a completion ends; set it before the "
        f"trainer is built, tokenizer.eos_token = {token}, and pass it as processing_class; or save it in the model's "
        "folder."
    )


def refuse_frozen(model: nn.Module) -> None:
    """Refuse to train a model of which no parameter is trained.

    Raises:
        ModelError: an adapter that was loaded for inference, as a rule.
    """
    if not any(p.requires_grad for p in model.parameters()):
        raise ModelError(
            "no parameter of the model is trained (requires_grad is False for all of them); an adapter to go on with "
            "is loaded by PeftModel.from_pretrained(..., is_trainable=True)."
        )


def _is_rate(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def _rates(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Attributes of a module that are rates of random noise, and above zero; PEFT keeps some in a dict per adapter."""
    is_dropout = "dropout" in type(module).__name__.lower()
    for attribute, value in vars(module).items():
        if not any(word in attribute for word in _RANDOM_ATTRIBUTES) and not (is_dropout and attribute == "p"):
            continue
        values = value.values() if isinstance(value, dict) else (value,)
        if any(_is_rate(v) for v in values):
            yield attribute, value


def random_parts(model: nn.Module) -> Iterator[str]:
    """Names of the parts of a model that draw random numbers in training, with their rates."""
    for path, module in model.named_modules():
        for attribute, value in _rates(module):
            yield f"{path or 'model'} ({type(module).__name__}): {attribute}={value}"


def disable_random_parts(model: nn.Module) -> None:
    """Set every rate that `random_parts` finds to zero; TRL's `disable_dropout` reaches only `nn.Dropout` modules.

    Some models read a rate from their configuration in every forward, so it is set to zero there too.
    """
    for module in model.modules():
        for attribute, value in list(_rates(module)):
            setattr(module, attribute, dict.fromkeys(value, 0.0) if isinstance(value, dict) else 0.0)
        config = getattr(module, "config", None)
        if isinstance(config, PretrainedConfig):
            for attribute, value in list(vars(config).items()):
                if any(word in attribute for word in _RANDOM_ATTRIBUTES) and _is_rate(value):
                    setattr(config, attribute, 0.0)


def split_dependence(model: nn.Module, neftune_noise_alpha: float | None) -> list[str]:
    """Everything in the model or settings that makes the update depend on the split, as sentences with remedies."""
    found = []
    parts = list(random_parts(model))
    if parts:
        shown = "; ".join(parts[:3]) + (f"; and {len(parts) - 3} more" if len(parts) > 3 else "")
        found.append(f"dropout is on ({shown}): its noise is drawn per micro-batch; set disable_dropout=True")
    norms = [f"{path} ({type(m).__name__})" for path, m in model.named_modules() if isinstance(m, _BatchNorm)]
    if norms:
        found.append(
            f"batch normalisation ({norms[0]}, {len(norms)} in all) computes statistics of the micro-batch; use a"
            " model with layer or group normalisation"
        )
    for adapter, config in (getattr(model, "peft_config", None) or {}).items():
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if kind in _SPLIT_DEPENDENT_ADAPTERS:
            found.append(f"adapter {adapter!r} ({kind}) {_SPLIT_DEPENDENT_ADAPTERS[kind]}; use another kind, e.g. LoRA")
    outliers = {path: size for path, size in outlier_thresholds(model).items() if size}
    if outliers:
        path, size = next(iter(outliers.items()))
        found.append(
            f"8-bit layers ({path}, {len(outliers)} in all; llm_int8_threshold={size:g}) pick outlier columns over the "
            "rows of a forward; load the model with quantization_config={'load_in_8bit': True, 'llm_int8_threshold': "
            "0.0} in model_init_kwargs (BitsAndBytesConfig takes the same), or in 4 bits"
        )
    if getattr(getattr(model, "config", None), "model_type", None) == "cpmant":
        found.append("CpmAnt puts its own prompt before the padding, which so moves the input; use another model")
    if neftune_noise_alpha:
        found.append(f"neftune_noise_alpha={neftune_noise_alpha} adds noise per micro-batch; remove it")
    return found


def refuse(found: list[str], allow: bool) -> list[str]:
    """Raise for what makes the update depend on the split, or return it as it is where that is allowed.

    Raises:
        SplitDependentError: there is something and `allow` is false.
    """
    if found and not allow:
        raise SplitDependentError(
            "the update would depend on the batch split: " + ". ".join(found) + ". To train all the same, set "
            "allow_split_dependent=True."
        )
    return found


def check_optimizer(optimizer: Any, model: nn.Module) -> None:
    """Refuse what updates the model during the backward pass; that of one micro-batch is not that of the step.

    Args:
        optimizer: as the user gave it, or None.

    Raises:
        ConfigError: names the optimizer, or the parameter that steps by itself.
    """
    reason = None
    if type(optimizer).__name__ == "LayerWiseDummyOptimizer" or hasattr(optimizer, "fused_backward"):
        reason = f"the optimizer {type(optimizer).__name__} updates"
    for name, parameter in model.named_parameters():
        if getattr(parameter, "_post_accumulate_grad_hooks", None) or hasattr(parameter, "_in_backward_optimizers"):
            reason = f"a hook on the gradient of {name} (of a layerwise optimizer, for example) works on"
            break
    if reason is not None:
        raise ConfigError(
            f"{reason} the model during the backward pass, before the step's gradient is complete; use an optimizer "
            "that acts in its step(), for example optim='adamw_torch', and remove such hooks."
        )


def check_half_weights(model: Any, fp16: bool) -> None:
    """Refuse trained weights in half precision in fp16, whose scaler takes none; otherwise warn of their rounding.

    Not for DeepSpeed, which trains float32 copies of its own.

    Raises:
        ModelError: names one.
    """
    trained = {name: p.dtype for name, p in model.named_parameters() if p.requires_grad}
    half = {name: str(dtype).removeprefix("torch.") for name, dtype in trained.items() if dtype.itemsize < 4}
    if not half:
        return
    name, dtype = next(iter(half.items()))
    if fp16:
        raise ModelError(
            f"fp16=True trains float32 weights and computes in float16, but {name} (one of {len(half)}) is {dtype}; "
            "load the model with dtype='float32' (for a name: model_init_kwargs={'dtype': 'float32'}; for the adapter "
            "of a quantised model: float32_adapters=True)."
        )
    if not getattr(model, "is_quantized", False):  # float32_adapters sets the precision of an adapter there
        logger.warning(
            f"{len(half)} of {len(trained)} trained tensors are {dtype}, which rounds small updates away, and rounds "
            "them otherwise for another split. Load the model with dtype=torch.float32; bf16=True computes in bfloat16 "
            "all the same."
        )


@contextmanager
def loading() -> Iterator[None]:
    """Inside, what transformers says of quantised weights and of GGUF files of an unknown kind is one of our errors.

    Raises:
        ConfigError, ModelError: in place of transformers' ImportError and ValueError.
    """
    try:
        with quiet():
            yield
    except ImportError as error:
        if "quantiz" not in str(error) and "GGUF" not in str(error):
            raise
        raise ConfigError(f"the weights cannot be read without another library: {error}") from error
    except ValueError as error:
        if "fine-tuning on purely quantized models" in str(error):
            raise ConfigError(
                "weights in 4 or 8 bits are not trained themselves; train an adapter on them: --use_peft True, or "
                "peft_config=LoraConfig(...)."
            ) from error
        if not str(error).startswith("GGUF model with architecture"):
            raise
        raise ModelError(
            f"{str(error).rstrip('.')} by transformers; pass the original model's folder in place of the GGUF file."
        ) from error


def refuse_dora_in_8_bits(policy: nn.Module) -> None:
    """Refuse DoRA adapters on weights of LLM.int8.

    Raises:
        ConfigError: says what to use.
    """
    configs = getattr(policy, "peft_config", None) or {}
    if outlier_thresholds(policy) and any(getattr(config, "use_dora", False) for config in configs.values()):
        raise ConfigError(
            "use_dora=True on 8-bit weights, which PEFT reads before bitsandbytes has put them in place: the second "
            "forward fails; load the model in 4 bits, or set use_dora=False."
        )


def refuse_prompt_learning(policy: nn.Module) -> None:
    """Refuse adapters that put virtual tokens before the prompt (prompt tuning, p-tuning, prefix tuning).

    Raises:
        ModelError: names the adapter.
    """
    for name, config in (getattr(policy, "peft_config", None) or {}).items():
        if getattr(config, "is_prompt_learning", False):
            kind = str(getattr(config.peft_type, "value", config.peft_type))
            raise ModelError(
                f"adapter {name!r} ({kind}) puts virtual tokens before the prompt, which packs, shared prefixes and "
                "padded batches do not hold; train another kind of adapter, for example LoRA."
            )
