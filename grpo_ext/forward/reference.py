"""The reference model: built on every process after TRL's constructor, from a name or from the weights in memory.

Differs from TRL, which loads it by name alone: a model object needs no name, and takes its precision and attention with
it on every version of TRL. Used once, while the trainer is built.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass, field
from typing import Any

import trl
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import extract_model_from_parallel
from peft import PeftModel
from torch import nn
from transformers import AutoConfig

from ..compat import SyncRefModelCallback, create_model_from_path, prepare_deepspeed, prepare_fsdp
from ..errors import ModelError
from ..runtime.collectives import any_process, broadcast_tensor
from .lm_head import gathered, install

logger = get_logger(__name__)


def base_model_of(model: Any) -> Any:
    """The transformers model inside what an engine and PEFT wrap it in."""
    model = extract_model_from_parallel(model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


@dataclass(frozen=True)
class ReferenceSource:
    """What the reference model is made of; read before TRL's constructor changes the policy.

    Attributes:
        name: it is loaded by this name, with `load` as keyword arguments.
        copy: or it is this copy of the model object as it was given.
    """

    name: str | None = None
    load: dict[str, Any] = field(default_factory=dict)
    copy: Any = None


def reference_source(
    model: Any, args: trl.GRPOConfig, peft_config: Any, quantization_config: Any
) -> ReferenceSource | None:
    """Where the reference of `model` (a name or an object) comes from; None where the run needs none.

    With `beta` zero there is none, and with an adapter it is the model without it, or TRL's copy of the adapter.

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
        return ReferenceSource(model, load)
    name = str(getattr(model.config, "_name_or_path", ""))
    loadable = bool(name) and _is_known(name, load["trust_remote_code"])
    # all processes take the same source, or their references could differ
    if not any_process(not loadable, args.device):
        load.setdefault("dtype", model.dtype)
        load.setdefault("attn_implementation", model.config._attn_implementation)
        return ReferenceSource(name, load)
    if name:
        logger.warning(
            f"The model object is named {name!r}, and no model can be found there; the reference model of beta="
            f"{args.beta} is a copy of the object's weights as they are now."
        )
    return ReferenceSource(copy=copied(model))


def _is_known(name: str, trust_remote_code: bool) -> bool:
    try:
        AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError):  # no such place, or no model there
        return False
    return True


def copied(model: nn.Module) -> nn.Module:
    """An independent copy of a model object, in evaluation mode; ties between weights are kept.

    Raises:
        ModelError: something in the object cannot be copied.
    """
    try:
        with gathered(*model.parameters()):
            twin = copy.deepcopy(model)
    except (TypeError, RuntimeError) as error:
        raise ModelError(
            f"{type(model).__name__} has no name to load the reference model of beta > 0 from, and the object cannot "
            f"be copied ({error}); save it with save_pretrained and pass the folder, or set beta=0."
        ) from None
    return twin.eval()


def _take_from_main_process(model: nn.Module, accelerator: Accelerator) -> None:
    """Give a copy the weights it has on the main process, as DDP, FSDP and ZeRO do with the policy."""
    if accelerator.num_processes == 1:
        return
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        tensor.data.copy_(broadcast_tensor(tensor.data.to(accelerator.device).contiguous()))


def build_reference(source: ReferenceSource, trainer: Any) -> Any:
    """The reference model of `trainer`, prepared for its accelerator as TRL prepares its own."""
    if source.name is None:
        model: Any = source.copy
        _take_from_main_process(model, trainer.accelerator)
    else:
        model = create_model_from_path(source.name, **source.load)
    install(model, trainer.temperature, trainer.args.cast_lm_head_to_fp32)
    if trainer.is_deepspeed_enabled:
        return prepare_deepspeed(model, trainer.accelerator)
    if trainer.is_fsdp_enabled:
        return prepare_fsdp(model, trainer.accelerator)
    return trainer.accelerator.prepare_model(model, evaluation_mode=True)


def use_reference(source: ReferenceSource, trainer: Any, config: trl.GRPOConfig) -> None:
    """Give `trainer` the reference model, and the KL settings, that TRL's constructor was told not to have."""
    trainer.beta = trainer.args.beta = config.beta
    trainer.args.sync_ref_model = config.sync_ref_model
    trainer.ref_model = build_reference(source, trainer)
    if config.sync_ref_model:
        trainer.add_callback(SyncRefModelCallback(trainer.ref_model, trainer.accelerator))
