"""What a user may not change once a trainer is built; all other settings are read when a rollout batch begins.

Called when a rollout batch begins, and so after a subclass's `__init__` and after callbacks.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

from accelerate.logging import get_logger
from torch import nn
from transformers import ProcessorMixin

from ..errors import ConfigError, refuse_combination, shortened
from ..forward.reference import weight_sums
from ..rollouts.build import CHANGE_ROWS, overridden, own_sampling, suppressed_in, template_of, why_not_by_key
from ..rollouts.vllm import SENT
from .settings import check_ends, check_replay, scores_differ

logger = get_logger(__name__)

# methods of sampling that users override
_SAMPLING_HOOKS = (*CHANGE_ROWS, "_generate_single_turn", "_tokenize_prompts", "_get_tool_suffix_ids")
_PLANNED = ("num_generations", "num_iterations")  # steps are planned with these
_COPIED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # `generation_config` holds copies
_ENGINE = ("use_vllm", "vllm_mode", "use_transformers_continuous_batching", "pad_to_multiple_of")


def built_for(trainer: Any) -> dict[str, Any]:
    """The settings that components are built for, by name."""
    engine, prepare = getattr(trainer, "vllm_generation", None), trainer._rollouts.images.prepare
    tokens = [ids.tolist() for ids in suppressed_in(trainer)] if trainer.use_vllm is trainer.args.use_vllm else None
    no_loop, lag = getattr(trainer, "async_loop", None) is None, trainer.args.rollout_lag
    settings = {name: getattr(trainer, name) for name in (*_PLANNED, *_COPIED, *_ENGINE)} | {
        "sampling_mask or routing_replay": trainer.args.replay,
        "suppress_tokens or min_new_tokens (with sampling_mask)": tokens,
        "vllm_generation": engine,
        "pad_token_id": trainer._tokenizer.pad_token_id,
        "names in environment_factories": set(trainer.environment_factories or ()),
        "processing_class (a processor)": isinstance(trainer.processing_class, ProcessorMixin),
        "tools (asynchronous)": no_loop and any(map(inspect.iscoroutinefunction, trainer._standalone_tools)),
        "beta": not trainer.args.beta and trainer.ref_model is None and trainer.beta,
        "args.steps_per_generation": trainer.args.steps_per_generation,
    }
    if prepare is not None:
        settings["tools (of a model that takes images)"] = bool(trainer.tools or trainer.environment_factories)
        settings[f"an override of {' or '.join(CHANGE_ROWS)}"] = any(map(trainer._override_of, CHANGE_ROWS))
        prompts = trainer.processing_class, template_of(trainer)
        settings["processing_class or chat_template"] = prompts != (prepare.processor, prepare.template)
    if lag:  # the thread has a copy of the one, and reads the others while it samples
        settings["ref_model"] = trainer.ref_model
        if not (trainer.args.sync_ref_model or trainer._rollouts.worker.settings.sharded):
            settings["the weights of ref_model"] = weight_sums(trainer.ref_model)
        settings |= {f"vllm_generation.{name}": copy.copy(getattr(engine, name, None)) for name in SENT}
    return settings


def refuse_changes(trainer: Any, planned: Mapping[str, Any], warned: set[str]) -> None:
    """Raise a ConfigError for a change since the trainer was built (`planned`: `built_for`) that cannot be followed.

    Args:
        warned: sentences of `scores_differ` that were said.
    """
    for name, value in built_for(trainer).items():
        if value != planned.get(name) and (trainer.model.training or name not in _PLANNED):
            read_once = ", or change generation_config" if name in _COPIED else ""
            raise ConfigError(
                f"{name} was changed to {shortened(repr(value), 80)}, and the trainer was built with "
                f"{shortened(repr(planned.get(name)), 80)} and cannot follow; set it in GRPOConfig, or pass it to the "
                f"trainer{read_once}."
            )
    columns = {name: len(getattr(trainer, name)) for name in ("reward_funcs", "reward_func_names", "reward_weights")}
    if len(set(columns.values())) > 1:
        raise ConfigError(f"a change has left {columns}: change these together, to one length.")
    check_ends(trainer)
    for sentence in scores_differ(trainer) - warned:
        logger.warning(sentence)
        warned.add(sentence)
    if trainer.model.training:
        refuse_overrides(trainer)
        check_replay(trainer)
        args, sampling = trainer.args, other_sampling(trainer)
        models = args.bitwise_invariant and any(isinstance(part, nn.Module) for part in trainer.reward_funcs)
        others = {f"{sampling} (only this trainer's own sampling)": sampling, "a reward model": models}
        for name in ("rollout_lag", "bitwise_invariant"):
            if value := getattr(args, name):
                refuse_combination(f"{name}={value}", others, "Turn one of the two off.")


def refuse_overrides(trainer: Any) -> None:
    """Raise a ConfigError for overrides that would not be called, or not with the weights that sample."""
    if method := overridden(trainer, "_tool_call_loop"):
        raise ConfigError(
            f"{method} would not be called: this trainer answers tools transcript by transcript. Override "
            "_generate_single_turn (called for every turn) or _generate (makes whole completions) instead."
        )
    if trainer.args.rollout_lag and (method := overridden(trainer, *_SAMPLING_HOOKS)):
        raise ConfigError(
            f"rollout_lag={trainer.args.rollout_lag} and {method}: it would sample with the weights that are trained, "
            "on a thread beside training. Use rollout_lag=0; _calculate_rewards, compute_loss and "
            "_get_per_token_logps_and_entropies may be overridden with a lag too."
        )


def other_sampling(trainer: Any) -> str | None:
    """What samples in the place of vLLM and of this trainer's own sampling; None where nothing does."""
    return own_sampling(trainer) or (None if trainer.use_vllm else why_not_by_key(trainer))
