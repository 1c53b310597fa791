"""What ends completions, and how many of them a call returns, checked before training."""

from __future__ import annotations

from typing import Any

from transformers import StopStringCriteria

from ..errors import ConfigError
from ..rollouts.build import sampling_config
from ..rollouts.decoding import own_generate
from ..rollouts.keyed import setting_of


def check_end_token(processing_class: Any) -> None:
    """Raise a ConfigError for a tokenizer without an end token."""
    if getattr(processing_class, "tokenizer", processing_class).eos_token_id is None:
        raise ConfigError(
            "the tokenizer has no end token (eos_token_id is None), so no completion would end; set "
            "tokenizer.eos_token to the token that ends a completion, and pass it as processing_class."
        )


def check_ends(trainer: Any) -> None:
    """Raise a ConfigError where a call would return several rows of a prompt, or stop strings would not stop."""
    if trainer.rollout_func is not None:
        return
    model, name = trainer.accelerator.unwrap_model(trainer.model), "n" if trainer.use_vllm else "num_return_sequences"
    own = (trainer.args.generation_kwargs or {}).get(name)
    if (count := own if trainer.use_vllm else setting_of(model, trainer.generation_config, name)) not in (None, 1):
        raise ConfigError(
            f"{name}={count} in generation_kwargs, or in the model's generation_config: sampling would return {count} "
            "rows of each prompt, and every completion of a group is a row already; use 1, and num_generations."
        )
    if trainer.use_vllm or own_generate(model) is not None or not (strings := sampling_config(trainer).stop_strings):
        return
    if trainer.use_transformers_continuous_batching:
        raise ConfigError(
            f"stop_strings={strings!r} with use_transformers_continuous_batching=True, which does not know them; use "
            "end tokens (eos_token_id in generation_kwargs), or turn it off."
        )
    StopStringCriteria(trainer._rollouts.worker.settings.tokenizer, strings)  # which says why, if it cannot
