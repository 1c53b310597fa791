"""Settings that cannot be changed once a trainer is built; all others are read when a rollout batch begins.

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
from ..rollouts.images import ImageSource
from ..rollouts.settings import CHANGE_ROWS, own_sampling, suppressed_in, template_of, why_not_by_key
from ..rollouts.source import Rollouts
from ..rollouts.vllm import SENT
from ..runtime.collectives import shards_parameters
from ..view import TrainerView
from .settings import check_ends, check_replay, scores_differ

logger = get_logger(__name__)

# methods of sampling that users override
_SAMPLING_HOOKS = (*CHANGE_ROWS, "_generate_single_turn", "_tokenize_prompts", "_get_tool_suffix_ids")
_PLANNED = ("num_generations", "num_iterations")  # steps are planned with these
_COPIED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # `generation_config` holds copies
_ENGINE = ("use_vllm", "vllm_mode", "use_transformers_continuous_batching", "pad_to_multiple_of")


def built_for(view: TrainerView, images: ImageSource) -> dict[str, Any]:
    engine, prepare = view.vllm_generation, images.prepare
    tokens = [ids.tolist() for ids in suppressed_in(view)] if view.use_vllm is view.args.use_vllm else None
    no_loop, lag = view.async_loop is None, view.args.rollout_lag
    settings = {name: getattr(view, name) for name in (*_PLANNED, *_COPIED, *_ENGINE)} | {
        "sampling_mask or routing_replay": view.args.replay,
        "suppress_tokens or min_new_tokens (with sampling_mask)": tokens,
        "vllm_generation": engine,
        "pad_token_id": view.tokenizer.pad_token_id,
        "names in environment_factories": set(view.environment_factories or ()),
        "processing_class (a processor)": isinstance(view.processing_class, ProcessorMixin),
        "tools (asynchronous)": no_loop and any(map(inspect.iscoroutinefunction, view.standalone_tools)),
        "beta": not view.args.beta and view.ref_model is None and view.beta,
        "args.steps_per_generation": view.args.steps_per_generation,
    }
    if prepare is not None:
        settings["tools (of a model that takes images)"] = bool(view.tools or view.environment_factories)
        settings[f"an override of {' or '.join(CHANGE_ROWS)}"] = any(map(view.override_of, CHANGE_ROWS))
        prompts = view.processing_class, template_of(view)
        settings["processing_class or chat_template"] = prompts != (prepare.processor, prepare.template)
    if lag:  # the thread has a copy of the one, and reads the others while it samples
        settings["ref_model"] = view.ref_model
        if not (view.args.sync_ref_model or shards_parameters(view.accelerator)):
            settings["the weights of ref_model"] = weight_sums(view.ref_model)
        settings |= {f"vllm_generation.{name}": copy.copy(getattr(engine, name, None)) for name in SENT}
    return settings


def refuse_changes(view: TrainerView, rollouts: Rollouts, planned: Mapping[str, Any], warned: set[str]) -> None:
    """Refuse a change since the trainer was built (`planned`) that it cannot follow; `warned` collects warnings."""
    for name, value in built_for(view, rollouts.images).items():
        if value != planned.get(name) and (view.model.training or name not in _PLANNED):
            read_once = ", or change generation_config" if name in _COPIED else ""
            raise ConfigError(
                f"{name} was changed to {shortened(repr(value), 80)}, and the trainer was built with "
                f"{shortened(repr(planned.get(name)), 80)} and cannot follow; set it in GRPOConfig, or pass it to the "
                f"trainer{read_once}."
            )
    columns = {name: len(getattr(view, name)) for name in ("reward_funcs", "reward_func_names", "reward_weights")}
    if len(set(columns.values())) > 1:
        raise ConfigError(f"a change has left {columns}: change these together, to the same length.")
    check_ends(view)
    for sentence in scores_differ(view) - warned:
        logger.warning(sentence)
        warned.add(sentence)
    if view.model.training:
        refuse_overrides(view)
        check_replay(view, rollouts)
        args, sampling = view.args, other_sampling(view, rollouts)
        models = args.bitwise_invariant and any(isinstance(part, nn.Module) for part in view.reward_funcs)
        others = {f"{sampling} (only this trainer's own sampling)": sampling, "a reward model": models}
        for name in ("rollout_lag", "bitwise_invariant"):
            if value := getattr(args, name):
                refuse_combination(f"{name}={value}", others, "Turn one of the two off.")


def refuse_overrides(view: TrainerView) -> None:
    if method := view.overridden("_tool_call_loop"):
        raise ConfigError(
            f"{method} would not be called: this trainer answers tools transcript by transcript. Override "
            "_generate_single_turn (called for every turn) or _generate (makes whole completions) instead."
        )
    if view.args.rollout_lag and (method := view.overridden(*_SAMPLING_HOOKS)):
        raise ConfigError(
            f"rollout_lag={view.args.rollout_lag} and {method}: it would sample with the weights that are trained, "
            "on a thread beside training. Use rollout_lag=0; _calculate_rewards, compute_loss and "
            "_get_per_token_logps_and_entropies may be overridden with a lag too."
        )


def other_sampling(view: TrainerView, rollouts: Rollouts) -> str | None:
    """What replaces vLLM and this trainer's own sampling; None where nothing does."""
    return own_sampling(view) or (None if view.use_vllm else why_not_by_key(view))
