"""Rotary positions whose frequencies depend on the longest sequence of a forward (`longrope`, `dynamic`).

Differs from TRL, where the log-probabilities of a completion then depend on its micro-batch: here the frequencies are
set once, to those of the longest sequence of the run, in policy and reference alike.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..runtime.attributes import temporarily_set_each
from ..runtime.messages import logger


def rope_parameters(config: Any) -> dict[str | None, dict[str, Any]]:
    """Settings by layer type (None where all layers share one); empty without rotary positions."""
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    if "rope_type" in parameters:
        return {None: parameters}
    return {kind: values for kind, values in parameters.items() if isinstance(values, dict)}


def covered_length(config: Any) -> int | None:
    """The longest sequence, in tokens, scaling included; None without a limit."""
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit <= 0:
        return None
    lengths = [limit]
    for values in rope_parameters(config).values():
        if "dynamic" in str(values.get("rope_type")):
            return None  # dynamic scaling covers any length
        factor = values.get("factor")
        if isinstance(factor, (int, float)):
            lengths.append(int(factor * (values.get("original_max_position_embeddings") or limit)))
    return max(lengths)


def _length_dependent(model: nn.Module) -> Iterator[tuple[str, Any, str | None, int]]:
    """Yields rotary modules whose frequencies change with the length of a forward, once for each layer type.

    Each as text, module, layer type, and the longest sequence that does not change the frequencies, in tokens.
    """
    for path, module in model.named_modules():
        config: Any = getattr(module, "config", None)
        if config is None or "rotary" not in type(module).__name__.lower():
            continue
        for kind, values in rope_parameters(config).items():
            scaling = str(values.get("rope_type"))
            if scaling == "longrope" or "dynamic" in scaling:
                switch = values["original_max_position_embeddings"] if scaling == "longrope" else None
                text = f"{path} ({type(module).__name__}, {scaling})"
                yield text, module, kind, switch or config.max_position_embeddings


def _pin(module: Any, kind: str | None, length: int) -> None:
    compute = ROPE_INIT_FUNCTIONS[rope_parameters(module.config)[kind]["rope_type"]]
    prefix, extra = ("", {}) if kind is None else (f"{kind}_", {"layer_type": kind})
    frequencies, _ = compute(module.config, None, seq_len=length, **extra)
    getattr(module, f"{prefix}inv_freq").copy_(frequencies)
    # transformers updates the frequencies of other kinds in every forward
    module.rope_type = "default" if kind is None else {**module.rope_type, kind: "default"}


def _is_pinned(module: Any, kind: str | None) -> bool:
    scaling = getattr(module, "rope_type", None)
    return (scaling.get(kind) if isinstance(scaling, dict) else scaling) == "default"


def rope_of_pack(model: nn.Module, last: int) -> AbstractContextManager[None]:
    """Inside, frequencies follow the largest position of a pack, `last`, also on a process that holds other tokens."""
    modules = [module for _, module, _, _ in _length_dependent(model)]
    return temporarily_set_each((m, {"forward": functools.partial(_with_last, m.forward, last)}) for m in modules)


def _with_last(
    below: Callable[..., Any], last: int, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Run with one more position, whose result is left out."""
    more = torch.cat([position_ids, position_ids.new_full((*position_ids.shape[:-1], 1), last)], dim=-1)
    return tuple(values[:, :-1] for values in below(x, more, *args, **kwargs))


def fix_rope_frequencies(models: list[Any], longest: Callable[[], int | None]) -> str | None:
    """Give all forwards of a run the same frequencies; returns what still depends on the micro-batch, as a sentence.

    `longest` returns the tokens of the run's longest prompt with its completion, or None; it is called only if needed.
    """
    rotaries = [rotary for model in models for rotary in _length_dependent(model)]
    if not rotaries:
        return None
    (first, _, _, first_switch), depends = rotaries[0], "depend on the longest sequence of a"
    length = longest()
    if length is None:
        return (
            f"the rotary positions of {first} {depends} micro-batch, and the longest of this run is not "
            "known (a stream, a transform, an environment, or max_completion_length=None); use a data set with a "
            "length and set max_completion_length, or a rope_type that does not depend on it"
        )
    for text, module, kind, switch in rotaries:
        if length <= switch and not _is_pinned(module, kind):
            continue
        if "short_mscale" not in rope_parameters(module.config)[kind]:
            _pin(module, kind, length)
        else:  # Phi-MoE changes the scale too, in every forward
            return (
                f"the rotary positions of {text} {depends} micro-batch, and sequences of this run reach "
                f"{length} tokens, beyond where they change; shorten prompts or max_completion_length, or use another "
                "rope_type"
            )
    if length > first_switch:
        logger.warning(
            f"The rotary positions of {first} {depends} forward; all forwards of this run use those of "
            f"{length} tokens, the longest prompt and max_completion_length."
        )
    return None
