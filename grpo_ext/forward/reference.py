"""The reference model: built on every process after TRL's constructor, from a name or from the weights in memory.

Differs from TRL, which loads it by name alone: a model object needs no name, and the reference has its precision and
attention on every version of TRL. Used once, while the trainer is built.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import trl
from accelerate.logging import get_logger
from accelerate.utils import extract_model_from_parallel
from peft import PeftModel
from torch import nn
from transformers import AutoConfig

from ..compat import SyncRefModelCallback, create_model_from_path, prepare_deepspeed, prepare_fsdp
from ..errors import ModelError
from ..runtime.collectives import any_process, copy_from_main_process
from .lm_head import gathered, install

logger = get_logger(__name__)


def base_model_of(model: Any) -> Any:
    """The transformers model without the wrappers of an engine and PEFT."""
    model = extract_model_from_parallel(model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def reference_loader(
    model: Any, args: trl.GRPOConfig, peft_config: Any, quantization_config: Any
) -> Callable[[], Any] | None:
    """What returns the reference of `model` (a name or an object); None where the run needs no further model.

    With `beta` zero there is none, and with an adapter it is the model without it, or TRL's copy of the adapter. Called
    before TRL's constructor changes the policy.

    Raises:
        ModelError: a model object without a name cannot be copied.
    """
    if args.beta == 0.0 or peft_config is not None or isinstance(model, PeftModel):
        return None
    load: dict[str, Any] = dict(args.model_init_kwargs or {})  # type: ignore[arg-type]
    if quantization_config is not None:
        load["quantization_config"] = quantization_config
    if args.distributed_state is not None and args.distributed_state.distributed_type in ("MULTI_GPU", "DEEPSPEED"):
        load["device_map"] = None  # several processes cannot spread a model over the devices
    load.setdefault("trust_remote_code", getattr(args, "trust_remote_code", False))
    if isinstance(model, str):
        return functools.partial(create_model_from_path, model, **load)
    name = str(getattr(model.config, "_name_or_path", ""))
    loadable = bool(name) and _is_known(name, load["trust_remote_code"])
    # all processes take the same source, or their references could differ
    if not any_process(not loadable, args.device):
        load.setdefault("dtype", model.dtype)
        load.setdefault("attn_implementation", model.config._attn_implementation)
        return functools.partial(create_model_from_path, name, **load)
    if name:
        logger.warning(
            f"The model object is named {name!r}, and no model can be found there; the reference model of beta="
            f"{args.beta} is a copy of the object's weights as they are now."
        )
    return functools.partial(copy_from_main_process, _copied(model), args.device)


def _is_known(name: str, trust_remote_code: bool) -> bool:
    try:
        AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError):  # no such place, or no model there
        return False
    return True


def _copied(model: nn.Module) -> nn.Module:
    """An independent copy of a model object, in evaluation mode; ties between weights are kept."""
    try:
        with gathered(*model.parameters()):
            return copy.deepcopy(model).eval()
    except (TypeError, RuntimeError) as error:
        raise ModelError(
            f"{type(model).__name__} has no name to load the reference model of beta > 0 from, and the object cannot "
            f"be copied ({error}); save it with save_pretrained and pass the folder, or set beta=0."
        ) from None


def use_reference(load: Callable[[], Any], trainer: Any, config: trl.GRPOConfig) -> None:
    """Give `trainer` the reference model, and the KL settings that were hidden from TRL's constructor."""
    trainer.beta = trainer.args.beta = config.beta
    trainer.args.sync_ref_model = config.sync_ref_model
    model, accelerator = load(), trainer.accelerator
    install(model, trainer.temperature, trainer.args.cast_lm_head_to_fp32)
    if trainer.is_deepspeed_enabled:
        trainer.ref_model = prepare_deepspeed(model, accelerator)
    elif trainer.is_fsdp_enabled:
        trainer.ref_model = prepare_fsdp(model, accelerator)
    else:
        trainer.ref_model = accelerator.prepare_model(model, evaluation_mode=True)
    if config.sync_ref_model:
        trainer.add_callback(SyncRefModelCallback(trainer.ref_model, accelerator))
