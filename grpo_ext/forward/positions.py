"""Rotary positions whose frequencies depend on the longest sequence of a forward (`longrope`, `dynamic`, and others).

Differs from TRL, where the same completion then has other log-probabilities in another micro-batch: the frequencies are
set once, to those of the longest sequence the run can have, in policy and reference alike. Used once, while the trainer
is built.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_FAR = 2**20  # a length in tokens beyond every switch
_TEMPLATE_TOKENS = 512


def rope_parameters(config: Any) -> dict[str | None, dict[str, Any]]:
    """The rotary settings by layer type (None where all layers share one); empty without rotary positions."""
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    if "rope_type" in parameters:
        return {None: parameters}
    return {kind: values for kind, values in parameters.items() if isinstance(values, dict)}


def covered_length(config: Any) -> int | None:
    """Tokens that a model with rotary positions was made for, scaling included; None where there is no limit."""
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


def _rotary(model: nn.Module) -> Iterator[tuple[str, Any, str | None]]:
    """Every rotary module of a model with its path, once for each layer type it serves."""
    for path, module in model.named_modules():
        if "rotary" in type(module).__name__.lower():
            kinds = getattr(module, "rope_type", None)
            yield from ((path, module, kind) for kind in (kinds if isinstance(kinds, dict) else (None,)))


def _declared(module: Any, kind: str | None) -> str:
    """The name of a module's kind of scaling, also after it was pinned."""
    rope_type = getattr(module, "rope_type_before", getattr(module, "rope_type", "default"))
    return str(rope_type[kind] if isinstance(rope_type, dict) else rope_type)


def _angles(module: Any, kind: str | None, length: int) -> torch.Tensor:
    """Cosines and sines of the first two positions in a forward over `length` tokens."""
    device = next((b.device for b in module.buffers()), torch.device("cpu"))
    positions = torch.tensor([[0, 1, length - 1]], device=device)
    extra = {} if kind is None else {"layer_type": kind}
    # `forward`, because a call would run an engine's hooks
    angles = module.forward(torch.zeros(1, 3, 1, device=device), positions, **extra)
    return torch.stack([part.float() for part in angles])[..., :2, :]


def _depends(module: Any, kind: str | None, length: int) -> bool:
    """Whether the frequencies of a forward over `length` tokens are others than those of a short one."""
    try:
        far = _angles(module, kind, length)
        # the short length last, which resets what the long one has changed
        return not torch.equal(far, _angles(module, kind, 2))
    except (TypeError, ValueError, RuntimeError, IndexError):  # takes other arguments: its type is decided by its name
        return _declared(module, kind) == "longrope" or "dynamic" in _declared(module, kind)


def depends_on_length(model: nn.Module, length: int = _FAR) -> str | None:
    """Name of the first rotary module whose angles depend on the longest of up to `length` tokens; None if none do."""
    for path, module, kind in _rotary(model):
        if _depends(module, kind, length):
            return f"{path} ({type(module).__name__}, {_declared(module, kind)})"
    return None


def _pin(model: nn.Module, length: int) -> None:
    """Set the frequencies to those of a forward over `length` tokens, for every forward from now on."""
    for _, module, kind in _rotary(model):
        rope_type, prefix = _declared(module, kind), "" if kind is None else f"{kind}_"
        if not hasattr(module, f"{prefix}original_inv_freq") or rope_type not in ROPE_INIT_FUNCTIONS:
            continue
        if rope_type != "longrope" and "dynamic" not in rope_type:
            continue
        if not hasattr(module, "rope_type_before"):
            module.rope_type_before = module.rope_type
        extra = {} if kind is None else {"layer_type": kind}
        frequencies, _ = ROPE_INIT_FUNCTIONS[rope_type](module.config, None, seq_len=length, **extra)
        getattr(module, f"{prefix}inv_freq").copy_(frequencies)
        # transformers updates the frequencies of other kinds in every forward
        module.rope_type = "default" if kind is None else {**module.rope_type, kind: "default"}


def _pinned(model: nn.Module) -> str | None:
    """Name of the first rotary module that an earlier run of the same object has set."""
    paths = (path for path, module, _ in _rotary(model) if hasattr(module, "rope_type_before"))
    return next(paths, None)


def longest_prompt(prompts: Iterable[Any], lengths_of: Callable[[list[Any]], list[int]], batch: int = 256) -> int:
    """Tokens of the longest of these prompts; those that are too short in bytes to be it are not tokenised.

    Args:
        lengths_of: function from a list of prompts to their lengths in tokens.
    """
    best, margin, waiting = 0, _TEMPLATE_TOKENS, []
    for prompt in prompts:
        if not best:
            best = lengths_of([prompt])[0]
            margin = max(margin, best)  # what a chat template and tools add is in the first one too
        if len(str(prompt).encode()) + margin > best:  # a token is at least one byte
            waiting.append(prompt)
        if len(waiting) == batch:
            best, waiting = max(best, *lengths_of(waiting)), []
    return max([best, *lengths_of(waiting)]) if waiting else best


def settle_rope(models: list[Any], longest: Callable[[], int | None]) -> tuple[str | None, str | None]:
    """Give every forward of a run the same rotary frequencies.

    Args:
        models: the policy, and the reference where there is one.
        longest: tokens of the longest prompt and completion the run can have, or None; asked only where it matters.

    Returns:
        What was done, and what still depends on the micro-batch; as sentences, None where there is nothing to say.
    """
    name = depends_on_length(models[0]) or _pinned(models[0])
    if name is None:
        return None, None
    length = longest()
    if length is None:
        return None, (
            f"the rotary positions of {name} depend on the longest sequence of a micro-batch, and the longest of this "
            "run is not known (a stream, a transform, an environment, or max_completion_length=None); use a data set "
            "with a length and set max_completion_length, or a rope_type that does not depend on it"
        )
    if all(depends_on_length(model, length) is None and _pinned(model) is None for model in models):
        return None, None  # the whole run stays below the switch
    for model in models:
        _pin(model, length)
    left = next(filter(None, (depends_on_length(model) for model in models)), None)
    if left is not None:
        return None, (
            f"the rotary positions of {left} depend on the longest sequence of a micro-batch, and sequences of this "
            f"run reach {length} tokens, beyond where they change; shorten prompts or max_completion_length, or use "
            "another rope_type"
        )
    return (
        f"The rotary positions of {name} depend on the longest sequence of a forward; all forwards of this run use "
        f"those of {length} tokens, the longest prompt and max_completion_length."
    ), None


def accepts_positions(model: Any) -> bool:
    """Whether the model's forward takes `position_ids`."""
    return "position_ids" in inspect.signature(model.forward).parameters


def positions_of(
    model: Any, ids_BL: torch.Tensor, mask_BL: torch.Tensor, images: dict[str, torch.Tensor]
) -> torch.Tensor | None:
    """The `position_ids` of a batch in TRL's layout: (B, L), or (3, B, L) where images have rows and columns.

    Args:
        images: what the model is given of images; the pixels need not be among them.

    Returns:
        None for a model that takes none.
    """
    if not accepts_positions(model):
        return None
    counted_BL = position_ids(mask_BL)
    index: Callable[..., Any] | None = getattr(getattr(model, "base_model", model), "get_rope_index", None)
    if index is None:
        return counted_BL
    known = {name: value for name, value in images.items() if name in inspect.signature(index).parameters}
    if "image_grid_thw" not in known:
        return counted_BL.expand(3, *counted_BL.shape)
    return index(ids_BL, attention_mask=mask_BL, **known)[0]


def position_ids(attention_mask_BT: torch.Tensor) -> torch.Tensor:
    """Positions that count real tokens only, so that padding does not move a row (B, T), int64."""
    return attention_mask_BT.long().cumsum(-1).sub(1).clamp(min=0)
