"""Merges an adapter into copies of the layers that it adapts, or into a base for good, and checks what comes of it.

Repairs `peft.PeftModel.merge_adapter`, which writes into the model, and `merge_and_unload`, which merges what one of
two tied weights has learned into both, rounds updates away in half precision, and returns a model that computes
something else for some kinds of adapters. Until PEFT fixes them; last seen in 0.21. Used for vLLM and by `export`.
"""

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from ..errors import CheckpointError

_COMPARED = 64  # tokens
_ROUNDING = 1e-4  # relative; float32 leaves 1e-6 to 1e-5
_LOWEST = -1e4  # a head that bans a token gives it less


def merged_copy(layer: Any) -> nn.Module:
    """Copy a layer of PEFT and its base layer, and merge the adapter, whose parameters are shared, into the copy."""
    twin, base = copy.copy(layer), layer.base_layer
    if isinstance(base, BaseTunerLayer):  # the adapters of several parameters of one module
        base = merged_copy(base)
    else:
        base = copy.copy(base)
        base._parameters = {name: _copy_of(parameter) for name, parameter in base._parameters.items()}
    twin._modules = {**layer._modules, "base_layer": base}
    twin.merged_adapters, twin._caches = [], {}
    twin.merge()
    return twin


def _copy_of(parameter: Any) -> Any:
    if type(parameter) is nn.Parameter or hasattr(parameter, "full_tensor"):
        return nn.Parameter(parameter.detach().clone(), requires_grad=False)
    return copy.deepcopy(parameter)  # bitsandbytes' kinds, whose merge assigns a new one


def merged_model(base: Any, adapter: Path, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Merge an adapter, whose `tensors` a folder holds, into a base in float32; a CheckpointError if logits differ."""
    head, embedding = base.get_output_embeddings(), base.get_input_embeddings()
    # in float32: half precision would round small updates away
    with_adapter = PeftModel.from_pretrained(base.float(), str(adapter))
    names, all_names = (get_peft_model_state_dict(with_adapter, save_embedding_layers=b).keys() for b in (False, True))
    check_names(names - tensors.keys(), tensors.keys() - all_names)
    logits = _logits(with_adapter)
    adapted = (base.get_output_embeddings(), base.get_input_embeddings()) != (head, embedding)
    if adapted and head.weight is embedding.weight:
        head.weight = nn.Parameter(head.weight.detach().clone())  # PEFT would merge what one of them learned into both
    merged = with_adapter.merge_and_unload()
    error = (_logits(merged) - logits).norm() / logits.norm()
    if not error <= _ROUNDING:
        raise CheckpointError(
            f"logits of the merged model differ from those of the base with its adapter by {error:.1e} of their norm "
            f"(rounding is up to {_ROUNDING:.0e}): PEFT cannot merge this adapter; export only the adapter."
        )
    return merged


def save_merged(merged: Any, folder: Path) -> None:
    """Save a merged model; a CheckpointError if its class does not read every weight back."""
    merged.save_pretrained(folder)
    written = type(merged).from_pretrained(folder, dtype="auto").state_dict()
    for name, weight in merged.state_dict().items():
        if not torch.equal(weight, written[name].to(weight.dtype)):
            raise CheckpointError(
                f"{type(merged).__name__} does not load {name} as it was merged and written; export only the adapter."
            )


def check_names(missing: Iterable[str], unexpected: Iterable[str] = ()) -> None:
    if names := sorted(missing):
        raise CheckpointError(f"the checkpoint lacks {len(names)} weights of the model, for example {names[0]}.")
    if names := sorted(unexpected):
        raise CheckpointError(f"the model lacks {len(names)} weights of the checkpoint, for example {names[0]}.")


def _logits(model: Any) -> torch.Tensor:
    """Logits of a text with tokens from the whole vocabulary."""
    ids = torch.linspace(0, model.config.get_text_config().vocab_size - 1, _COMPARED).long()
    with torch.no_grad():
        logits = model.eval()(input_ids=ids[None]).logits
    return logits.double().clamp(min=_LOWEST)
