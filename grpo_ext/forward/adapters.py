"""What PEFT's adapters ask of a forward pass: which batches they can run."""

from __future__ import annotations

from typing import Any


def is_prompt_learning(model: Any) -> bool:
    """Whether a PEFT adapter puts virtual tokens before the input (prompt tuning, p-tuning, prefix tuning)."""
    config = getattr(model, "active_peft_config", None)
    return bool(getattr(config, "is_prompt_learning", False))


def needs_whole_rows(model: Any) -> str | None:
    """Why the adapter of a model wants every prompt whole in a row of its own, as a sentence; None if it does not."""
    if is_prompt_learning(model):
        return "prompt-learning adapters add tokens"
    configs = getattr(model, "peft_config", {}).values()
    if any(getattr(config, "alora_invocation_tokens", None) for config in configs):
        return "its adapter looks for tokens in every row of a batch"
    return None
