"""A reference that is the policy at its start, whatever the policy was made from, and its moved weights in checkpoints.

Repairs `trl.GRPOTrainer.__init__`, which loads the reference by the model's name, though an object may have none or
have been changed, and takes the model without its adapter for one that starts elsewhere; and
`trl.SyncRefModelCallback`, whose moved weights no checkpoint holds. Until TRL fixes both; last seen in 1.16. Used while
a trainer is built, and by the run's state.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

import torch
import trl
from peft import PeftModel

from ..compat import create_model_from_path
from ..errors import ConfigError, ModelError
from ..forward.fixed_models import is_partitioned, load_arguments
from ..forward.quantised import outlier_thresholds
from ..forward.snapshot import deep_copy, refuse_replaced_forward, sharing_copy
from ..forward.tiled_log_probs import gathered
from ..runtime.collectives import local_part
from ..view import TrainerView

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
    if not isinstance(model, str) and not (name and is_partitioned(model)):
        try:
            with gathered(*model.parameters()):
                start = deep_copy(model).eval()
            return lambda policy: start
        except ModelError:
            if not name:
                raise
    load = load_arguments(args, args.model_init_kwargs)
    if quantization_config is not None:
        load["quantization_config"] = quantization_config
    if not isinstance(model, str):
        load.setdefault("dtype", model.dtype)
        load.setdefault("attn_implementation", model.config._attn_implementation)
    return functools.partial(_loaded, name, load)


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
    if is_partitioned(policy) or outlier_thresholds(policy):
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
        self._start = None if view.sharded else weight_sums(view.ref_model)

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
