"""What `sampling_mask="replay"` and `routing_replay` refuse: what they cannot record, or cannot replay."""

from __future__ import annotations

from typing import Any

from ..errors import refuse_combination
from ..rollouts.build import LOGPS, SCORE, overridden, samples_by_key
from ..rollouts.keyed import setting_of

# settings of transformers' sampling that change scores by what was written before, or at single positions, and values
# without effect
_NOT_REPLAYED: dict[str, Any] = {
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty"), 1.0),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length"), 0),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty")),
    **{name: [] for name in ("sequence_bias", "bad_words_ids", "begin_suppress_tokens")},
}


def check_replay(trainer: Any) -> None:
    """Raise a ConfigError for sampling and forwards that cannot be recorded, or replayed, as the settings ask."""
    if trainer.args.replay.masks:
        _check_masks(trainer)
    if trainer.args.replay.experts:
        _check_routing(trainer)


def _check_masks(trainer: Any) -> None:
    sampling, scoring = overridden(trainer, SCORE, "_generate", "_generate_single_turn"), overridden(trainer, LOGPS)
    others = {
        f"{sampling} (it returns no kept tokens)": sampling is not None,
        f"{scoring} (it gets padded tensors, without the kept tokens)": scoring is not None,
    }
    if not trainer.use_vllm and trainer.rollout_func is None:  # rollouts.vllm_replay checks vLLM's settings
        others["this way of generating (it returns no kept tokens)"] = not samples_by_key(trainer)
        model, config = trainer.accelerator.unwrap_model(trainer.model), trainer.generation_config
        for name, neutral in {**_NOT_REPLAYED, "temperature": trainer.temperature}.items():
            value = setting_of(model, config, name)
            others[f"{name}={value!r} (only {neutral!r} is replayed)"] = value not in (None, neutral)
    remedy = "Leave one of the two out; sampling without top_p, top_k and min_p needs no masks."
    refuse_combination("sampling_mask='replay'", others, remedy)


def _check_routing(trainer: Any) -> None:
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    config = None if trainer.use_vllm else trainer.generation_config
    override = overridden(trainer, SCORE, LOGPS)
    others = {
        f"{override} (it gets padded tensors, without the experts)": override is not None,
        "a model that takes images": trainer._rollouts.images.prepare is not None,
        "torch_compile=True": trainer.args.torch_compile,
        "FSDP's activation_checkpointing (set gradient_checkpointing=True)": getattr(
            plugin, "activation_checkpointing", False
        ),
        "prefill_chunk_size": getattr(config, "prefill_chunk_size", None) is not None,
    }
    refuse_combination("routing_replay=True", others, "Leave one of the two out.")
