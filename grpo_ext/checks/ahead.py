"""Checks of `rollout_lag` before training: models, overrides and data that cannot be sampled ahead on a thread."""

from __future__ import annotations

from typing import Any

from ..config import GRPOConfig
from ..errors import ConfigError, refuse_combination
from ..forward.quantised import outlier_thresholds
from ..forward.snapshot import refuse_no_copy
from ..rollouts.build import overridden, own_sampling, samples_by_key
from ..rollouts.decoding import own_generate
from .model import random_parts

# methods of sampling that users override
_SAMPLING_HOOKS = ("_generate_and_score_completions", "_generate", "_generate_single_turn", "_tokenize_prompts")


def refuse_overrides_ahead(trainer: Any) -> None:
    """With `rollout_lag`: refuse overrides of sampling, which would run the weights that are trained.

    Raises:
        ConfigError: names the override.
    """
    if name := overridden(trainer, *_SAMPLING_HOOKS):
        raise ConfigError(
            f"rollout_lag={trainer.args.rollout_lag} and {name}: it would sample with the weights that are trained, on "
            "a thread beside training. Use rollout_lag=0; _calculate_rewards, compute_loss and "
            "_get_per_token_logps_and_entropies may be overridden with a lag too."
        )


def check_ahead(trainer: Any, config: GRPOConfig) -> None:
    """With `rollout_lag`: refuse models, data and ways to sample that cannot be combined with it.

    Raises:
        ConfigError, ModelError: with the reason and the remedy.
    """
    sampling = own_sampling(trainer) or own_generate(trainer.model)
    foreign = sampling is not None or not (trainer.use_vllm or samples_by_key(trainer))
    noise = list(random_parts(trainer.model)) + (["neftune_noise_alpha"] if config.neftune_noise_alpha else [])
    others = {
        f"{sampling or 'beam search, do_sample=False or a paged cache'} (it would sample with the weights that are "
        "trained; only this trainer's own sampling runs on a copy of them)": foreign,
        f"{''.join(noise[:1])} (two threads would draw from one stream of random numbers; use disable_dropout=True "
        "and no NEFTune)": noise,
        "weights in 8 bits (a copy and the model cannot share their scales, which bitsandbytes hands to the layer that "
        "runs first; use load_in_4bit)": outlier_thresholds(trainer.model),
        "images together with tools or an environment (not implemented)": trainer._rollouts.images.carry_images,
        "a stream (rows are read before their step; use a data set with a length)": not hasattr(
            trainer.train_dataset, "__len__"
        ),
    }
    refuse_combination(f"rollout_lag={config.rollout_lag}", others, "Change that, or use rollout_lag=0.")
    refuse_no_copy(trainer.model)
