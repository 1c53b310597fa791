"""What `rollout_lag` refuses before training: what cannot be sampled on a thread, or not before it is due."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from ..config import GRPOConfig
from ..errors import ConfigError, ModelError
from ..forward.quantised import outlier_thresholds
from ..forward.reference import base_model_of
from ..forward.snapshot import refuse_no_copy, refuse_replaced_forward
from ..rollouts.build import overridden, own_sampling, samples_by_key
from ..rollouts.decoding import own_generate
from .model import random_parts

# what a user overrides of sampling
_SAMPLING_HOOKS = ("_generate_and_score_completions", "_generate", "_generate_single_turn", "_tokenize_prompts")


def refuse_own_forward(model: Any) -> None:
    """With `rollout_lag`: refuse a model object whose forward somebody has replaced, before TRL puts its own around it.

    This package's head does not count, which an earlier trainer has left.

    Raises:
        ModelError: a copy of the model would lose it, or run the weights of the first.
    """
    parts = (model, base_model_of(model)) if isinstance(model, nn.Module) else ()
    found = [vars(part).get("forward") for part in parts]
    if any(forward is not None and not hasattr(forward, "of_grpo_ext") for forward in found):
        raise ModelError(
            "the model was given a forward of its own by hand, and a copy of the model would run the weights that are "
            "trained; rollout_lag needs the one of its class. Use rollout_lag=0."
        )


def refuse_overrides_ahead(trainer: Any) -> None:
    """With `rollout_lag`: refuse overrides of what samples, which would run on the trainer, not on the thread's copies.

    Raises:
        ConfigError: names the override.
    """
    if own := overridden(trainer, *_SAMPLING_HOOKS):
        raise ConfigError(
            f"rollout_lag={trainer.args.rollout_lag} and {own}: it would sample with the weights that are trained, on "
            "a thread beside training. Use rollout_lag=0; _calculate_rewards, compute_loss and "
            "_get_per_token_logps_and_entropies may be overridden with a lag too."
        )


def check_ahead(trainer: Any, config: GRPOConfig) -> None:
    """Refuse what cannot be sampled on a thread of its own, or not before it is due."""
    lag, dataset = config.rollout_lag, trainer.train_dataset
    own = own_sampling(trainer) or own_generate(trainer.model)
    if own is not None or not (trainer.use_vllm or samples_by_key(trainer)):
        raise ConfigError(
            f"rollout_lag={lag} needs this trainer's own sampling; rollout_func, beam search, do_sample=False, a paged "
            f"cache and a generate of one's own{'' if own is None else f' ({own})'} would run on the weights that are "
            "trained. Use rollout_lag=0."
        )
    _check_model_ahead(trainer, config)
    if trainer._rollouts.images.carry_images:
        raise ConfigError(
            f"rollout_lag={lag} with tools or an environment, and a model that takes images: not built; use "
            "rollout_lag=0, or a model without images."
        )
    if not hasattr(dataset, "__len__"):
        raise ConfigError(
            f"rollout_lag={lag} asks for rows before their step, and a stream gives them in its own order; use a data "
            "set with a length, or rollout_lag=0."
        )


def _check_model_ahead(trainer: Any, config: GRPOConfig) -> None:
    """Refuse models that cannot sample beside training, in a copy or by the weights that processes share."""
    lag = config.rollout_lag
    noise = list(random_parts(trainer.model)) + (["neftune_noise_alpha"] if config.neftune_noise_alpha else [])
    if noise:
        raise ConfigError(
            f"rollout_lag={lag} and {noise[0]}: two threads draw from one stream of random numbers, so speed would "
            "decide who gets which. Use disable_dropout=True, no NEFTune, or rollout_lag=0."
        )
    if outlier_thresholds(trainer.model):
        raise ConfigError(
            f"rollout_lag={lag} and weights in 8 bits: bitsandbytes hands their scales to the layer that runs first, "
            "so a copy and the model cannot share them. Use load_in_4bit, or rollout_lag=0."
        )
    if not trainer._scorer.sharded:
        refuse_replaced_forward(trainer.model, trainer.model, base_model_of(trainer.model))
        refuse_no_copy(trainer.model)
    elif trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2:
        raise ConfigError(f"rollout_lag={lag} and FSDP 1: use FSDP 2 (fsdp_version: 2), or rollout_lag=0.")
    elif is_deepspeed_zero3_enabled() and any(isinstance(func, nn.Module) for func in trainer.reward_funcs):
        raise ConfigError(
            f"rollout_lag={lag} and a reward model under ZeRO-3, which processes share: it would run its collectives "
            "beside those of training. Use ZeRO-2, FSDP2, a function that asks a server, or rollout_lag=0."
        )
    elif trainer.is_deepspeed_enabled and (parts := _other_parts(trainer.accelerator)):
        raise ConfigError(f"rollout_lag={lag} and {parts} of DeepSpeed: not built; leave it out, or use rollout_lag=0.")


def _other_parts(accelerator: Any) -> str:
    """Settings of ZeRO-3 by which weights lie elsewhere, too, than in a process's part of them."""
    zero = accelerator.state.deepspeed_plugin.deepspeed_config.get("zero_optimization", {})
    nvme = (zero.get("offload_param") or {}).get("device") == "nvme"
    found = {"zero_hpz_partition_size": zero.get("zero_hpz_partition_size", 1) > 1, "offload_param to NVMe": nvme}
    return " and ".join(name for name, is_set in found.items() if is_set)
