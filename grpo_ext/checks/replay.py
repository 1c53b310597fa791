"""What `sampling_mask="replay"` and `routing_replay` refuse: what they cannot record, or cannot replay."""

from __future__ import annotations

from typing import Any

from ..errors import refuse_combination
from ..rollouts.build import LOGPS, SCORE, outside_masks, overridden, why_not_by_key


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
    if not trainer.use_vllm and trainer.rollout_func is None:
        foreign = why_not_by_key(trainer)
        others[f"{foreign} (sampling that is not by key returns no kept tokens)"] = foreign is not None
    others |= outside_masks(trainer)
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
