"""The models that a run does not train: the reference and the teacher, prepared on every process.

Differs from TRL, which prepares a reference inside its constructor: both get the weights of the main process and this
package's head. Used once, after TRL's constructor; upstream.reference decides what the reference is.
"""

from collections.abc import Callable
from typing import Any

import torch
import trl

from ..compat import SyncRefModelCallback, create_model_from_path, prepare_deepspeed, prepare_fsdp
from ..config import GRPOConfig
from ..errors import ModelError
from ..runtime.collectives import copy_from_main_process
from ..view import TrainerView
from .architecture import base_model_of
from .lm_head import install, refuse_unknown_head
from .quantised import keep_4bit_weights


def load_arguments(args: trl.GRPOConfig, kwargs: Any) -> dict[str, Any]:
    load = {"trust_remote_code": getattr(args, "trust_remote_code", False), **(kwargs or {})}
    if args.distributed_state is not None and args.distributed_state.distributed_type in ("MULTI_GPU", "DEEPSPEED"):
        load["device_map"] = None  # several processes cannot spread a model over the devices
    return load


def is_partitioned(model: Any) -> bool:
    """Whether ZeRO-3 has cut the weights."""
    return any(hasattr(parameter, "ds_id") for parameter in model.parameters())


@torch.no_grad()
def use_fixed_models(load: Callable[[Any], Any] | None, teacher: Any, view: TrainerView, config: GRPOConfig) -> None:
    """Give the trainer its reference, and its teacher (None: that of the settings, if any)."""
    if load is not None:
        reference = _prepared(load(view.model), view)
        view.set_reference(reference, config.beta)
        if config.sync_ref_model:
            view.add_callback(SyncRefModelCallback(reference, view.accelerator))
    if teacher is None and config.teacher_model is not None:
        arguments = load_arguments(view.args, config.teacher_model_init_kwargs)
        teacher = create_model_from_path(config.teacher_model, **arguments)
    if teacher is not None:
        _refuse_teacher(teacher, view)
        teacher = _prepared(teacher.requires_grad_(False).eval(), view)
    view.set_teacher(teacher)


def _refuse_teacher(teacher: Any, view: TrainerView) -> None:
    base = base_model_of(teacher)
    refuse_unknown_head(base)
    if (other := getattr(base.forward, "of_grpo_ext", view.temperature)) != view.temperature:
        raise ModelError(
            f"the teacher belongs to a trainer with temperature={other}, and this one has {view.temperature}; load it "
            "for each of them."
        )
    known, sampled = (base_model_of(model).config.get_text_config().vocab_size for model in (teacher, view.model))
    if known < sampled:
        raise ModelError(
            f"the teacher's vocab_size={known} is less than the policy's {sampled}, so it cannot score every token "
            f"that the policy may sample; call resize_token_embeddings({sampled}) on it, and pass it as teacher_model."
        )
    if view.sharded and getattr(teacher, "is_quantized", False):
        raise ModelError(
            "a teacher with quantised weights under FSDP or DeepSpeed, which would cut them; load it in bfloat16 "
            "(teacher_model_init_kwargs={'dtype': 'bfloat16'}), or train with DDP."
        )


def _prepared(model: Any, view: TrainerView) -> Any:
    """A model with the weights of the main process and this package's head, in the wrapper of an engine."""
    accelerator = view.accelerator
    if not is_partitioned(model):
        copy_from_main_process(model)
    keep_4bit_weights(model)
    install(base_model_of(model), view.temperature, view.args.cast_lm_head_to_fp32)
    if view.is_deepspeed_enabled:
        return prepare_deepspeed(model, accelerator)
    if view.is_fsdp_enabled:
        return prepare_fsdp(model, accelerator)
    return accelerator.prepare_model(model, evaluation_mode=True)
