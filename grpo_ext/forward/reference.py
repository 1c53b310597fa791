"""The reference, which is the policy at its start, and the teacher: built on every process after TRL's constructor.

Differs from TRL, which loads a reference by name, or takes the base of an adapter for it: a model object needs no name
and may have been changed, and an adapter may start anywhere. Used once, while the trainer is built.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

import torch
import trl
from peft import PeftModel

from ..compat import SyncRefModelCallback, create_model_from_path, prepare_deepspeed, prepare_fsdp
from ..config import GRPOConfig
from ..errors import ConfigError, ModelError
from ..runtime.collectives import copy_from_main_process, local_part, shards_parameters
from ..view import TrainerView
from .architecture import base_model_of
from .lm_head import install, refuse_unknown_head
from .quantised import keep_4bit_weights, outlier_thresholds
from .snapshot import deep_copy, refuse_replaced_forward, sharing_copy
from .tiled_log_probs import gathered

# PEFT's kinds of adapters that change nothing before they are trained, with the initialisations below
_NEUTRAL = {"LORA", "IA3", "OFT", "VERA", "LOHA", "LOKR"}


def reference_loader(
    model: Any, args: trl.GRPOConfig, peft_config: Any, quantization_config: Any
) -> Callable[[Any], Any] | None:
    """What returns the reference of a model (a name or an object), given the policy that TRL makes of it afterwards.

    None where the run needs no further model: `beta` is zero, or an adapter holds its start.
    """
    if args.beta == 0.0:
        return None
    if peft_config is not None or isinstance(model, PeftModel):
        if args.sync_ref_model:
            raise ConfigError("sync_ref_model=True moves a reference whose base the policy shares; set it to False.")
        if _holds_its_start(model, peft_config):
            return None
        if not isinstance(model, str):
            refuse_replaced_forward(model, by_user=True)
        return _adapter_copy
    name = model if isinstance(model, str) else model.config._name_or_path
    # a copy of what ZeRO-3 has partitioned would be whole on every process
    if not isinstance(model, str) and not (name and _is_partitioned(model)):
        try:
            with gathered(*model.parameters()):
                start = deep_copy(model).eval()
            return lambda policy: start
        except ModelError:
            if not name:
                raise
    load = _load_arguments(args, args.model_init_kwargs)
    if quantization_config is not None:
        load["quantization_config"] = quantization_config
    if not isinstance(model, str):
        load.setdefault("dtype", model.dtype)
        load.setdefault("attn_implementation", model.config._attn_implementation)
    return functools.partial(_loaded, name, load)


def _load_arguments(args: trl.GRPOConfig, kwargs: Any) -> dict[str, Any]:
    load = {"trust_remote_code": getattr(args, "trust_remote_code", False), **(kwargs or {})}
    if args.distributed_state is not None and args.distributed_state.distributed_type in ("MULTI_GPU", "DEEPSPEED"):
        load["device_map"] = None  # several processes cannot spread a model over the devices
    return load


def _holds_its_start(model: Any, peft_config: Any) -> bool:
    """Whether an adapter starts as the model without it, or as what TRL copies: one loaded LoRA named "default"."""
    config = peft_config or model.peft_config.get("default")
    kind = str(getattr(peft_type := getattr(config, "peft_type", None), "value", peft_type))
    if kind not in _NEUTRAL or getattr(config, "bias", "none") != "none":  # biases belong to the base
        return False
    start = next(value for name, value in vars(config).items() if re.fullmatch(r"init_(\w+_)?weights", name))
    if peft_config is not None:
        return start is True or start == "gaussian"
    copied = all(".default." in name for name, parameter in model.named_parameters() if parameter.requires_grad)
    # PEFT makes that copy by the adapter's settings, which must not change the base a second time
    plain = kind == "LORA" and start in (True, False, "gaussian") and not config.layer_replication
    return plain and copied and len(model.peft_config) == 1


def _adapter_copy(policy: Any) -> Any:
    if _is_partitioned(policy) or outlier_thresholds(policy):
        raise ModelError(
            "the start of this adapter is not the model without it, and not copied under ZeRO-3 or beside weights in 8 "
            "bits. Use FSDP2, ZeRO-2 or 4 bits, a peft_config=LoraConfig(...) with the defaults of "
            "init_lora_weights and bias, or beta=0."
        )
    trained = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    twin = sharing_copy(policy, trained, next(policy.parameters()).device)
    for parameter in map(twin.get_parameter, trained):
        parameter.data = parameter.data.clone()
    return twin.eval()


def _loaded(name: str, load: dict[str, Any], policy: Any) -> Any:
    """A model with the policy's weights: those that the files lack are drawn anew at each load."""
    model = create_model_from_path(name, **load)
    own, start = ({n: local_part(p) for n, p in m.named_parameters()} for m in (model, policy))
    for key, tensor in own.items():
        if key not in start or tensor.shape != start[key].shape:
            raise ModelError(
                f"{key} of the model is not that of {name!r}, from which the reference of beta > 0 is loaded where it "
                "cannot be a copy; pass a folder that the model was saved to with save_pretrained, or set beta=0."
            )
        if tensor.is_floating_point():
            tensor.copy_(start[key])
    return model


class MovedReference:
    """The weights of a reference that callbacks have moved; an engine that shards weights saves none."""

    def __init__(self, view: TrainerView) -> None:
        self.view = view
        self._start = None if shards_parameters(view.accelerator) else weight_sums(view.ref_model)

    def state_dict(self) -> dict[str, Any]:
        if self._start in (None, weight_sums(self.view.ref_model)):
            return {}
        return dict(self.view.accelerator.unwrap_model(self.view.ref_model).state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state and self.view.ref_model is not None:
            self.view.accelerator.unwrap_model(self.view.ref_model).load_state_dict(state)


def weight_sums(model: Any, ends: bool = False) -> list[float]:
    """A sum for each parameter, or for the first and the last, by which a change shows; empty without a model."""
    parameters = [] if model is None else list(model.parameters())
    parameters = parameters[:: len(parameters) - 1 or 1] if ends else parameters
    return [float(parameter.detach().sum(dtype=torch.float64)) for parameter in parameters]  # of several devices


def _is_partitioned(model: Any) -> bool:
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
        arguments = _load_arguments(view.args, config.teacher_model_init_kwargs)
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
    if shards_parameters(view.accelerator) and getattr(teacher, "is_quantized", False):
        raise ModelError(
            "a teacher with quantised weights under FSDP or DeepSpeed, which would cut them; load it in bfloat16 "
            "(teacher_model_init_kwargs={'dtype': 'bfloat16'}), or train with DDP."
        )


def _prepared(model: Any, view: TrainerView) -> Any:
    """A model with the weights of the main process and this package's head, in the wrapper of an engine."""
    accelerator = view.accelerator
    if not _is_partitioned(model):
        copy_from_main_process(model, accelerator.device)
    keep_4bit_weights(model)
    install(base_model_of(model), view.temperature, view.args.cast_lm_head_to_fp32)
    if view.is_deepspeed_enabled:
        return prepare_deepspeed(model, accelerator)
    if view.is_fsdp_enabled:
        return prepare_fsdp(model, accelerator)
    return accelerator.prepare_model(model, evaluation_mode=True)
