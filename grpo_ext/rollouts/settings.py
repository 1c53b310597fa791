"""Reads the settings of a rollout batch when it begins, because users and callbacks may change them.

Called by `Rollouts`, where a rollout batch begins or is submitted to be sampled ahead; its functions by checks too.
"""

import copy
import sys
from typing import Any

import torch
from transformers import GenerationConfig

from ..algorithms.advantages import AdvantageRule
from ..algorithms.losses import RatioRule
from ..batching.sizes import ChunkSizes
from ..forward.architecture import base_model_of
from ..rewards.runner import RewardFunctions
from ..sampling import keyed
from ..sampling.decoding import end_tokens
from ..sampling.engine_check import EngineCheck
from ..sampling.equal_shares import refuse_unequal_shares, why_equal
from ..sampling.keyed import filter_values, not_replayed, setting_of, suppressed_tokens, truncating
from ..sampling.vllm import vllm_filters
from ..value_checks import check_advantage_k
from ..view import TrainerView
from .chat import Chat
from .local import Hooks, LogprobSettings, RewardSettings, RolloutSettings, SamplingSettings
from .tools import Environments, Toolbox, TurnLimits
from .trl_shapes import checked_rollout
from .worker import RolloutWorker

SCORE = "_generate_and_score_completions"
LOGPS = "_get_per_token_logps_and_entropies"


def read_settings(
    view: TrainerView, worker: RolloutWorker, check: EngineCheck | None, max_tokens: int | None
) -> RolloutSettings:
    """The settings of a rollout batch that begins now; `max_tokens` of a forward fit into memory (None: any number)."""
    sampling = _sampling(view, worker)
    logprobs = _logprobs(view, worker, sampling.hooks, check is not None and not check.done, max_tokens)
    return RolloutSettings(sampling, logprobs, _rewards(view))


def reward_functions(view: TrainerView) -> RewardFunctions:
    functions, names = list(view.reward_funcs), list(view.reward_func_names)
    return RewardFunctions(functions, names, view.reward_processing_classes, dict(view.chat_template_kwargs))


def advantage_rule(view: TrainerView) -> AdvantageRule:
    args, scale, aggregation = view.args, view.scale_rewards, view.multi_objective_aggregation
    check_advantage_k(args.advantage_estimator, args.advantage_k, view.num_generations)  # a callback may have set them
    return AdvantageRule(args.advantage_estimator, scale, aggregation, args.advantage_k, args.eval_pass_threshold)


def _sampling(view: TrainerView, worker: RolloutWorker) -> SamplingSettings:
    environments = Environments(dict(view.environment_factories or {}), view.environment_pools, worker.retired)
    group, batching = view.group_size, worker.forwards.choice.batching(view.model)
    return SamplingSettings(
        training=view.model.training,
        num_generations=group,
        # vLLM batches by itself
        sizes=ChunkSizes(group) if view.use_vllm else view.geometry.chunk_sizes(group, batching),
        seed=view.args.seed,
        generation_config=None if view.use_vllm else sampling_config(view),
        chat=chat_of(view),
        toolbox=Toolbox(list(view.standalone_tools), environments, view.async_loop),
        limits=_turn_limits(view),
        ends=frozenset((*all_end_tokens(view), worker.settings.pad)),
        masks_truncated=view.mask_truncated_completions,
        replay=view.args.replay,
        truncating=truncating_filters(view),
        hooks=_hooks(view, worker.settings.sharded),
    )


def _logprobs(
    view: TrainerView, worker: RolloutWorker, hooks: Hooks, unchecked: bool, max_tokens: int | None
) -> LogprobSettings:
    args, training, ratios = view.args, view.model.training, None
    if view.corrects_sampling:
        bounds = view.vllm_importance_sampling_clip_min, view.vllm_importance_sampling_clip_max
        ratios = RatioRule(view.vllm_importance_sampling_mode, *bounds)
    steps = view.geometry.steps_per_rollout * view.num_iterations  # optimizer steps on one rollout batch
    trained_on = steps > 1 or ratios is not None or (training and bool(args.rollout_lag))
    returns_experts = bool(getattr(worker.engine, "routers", ())) or why_not_by_key(view) is None
    record_experts = args.replay.experts and not (returns_experts and own_sampling(view) is None)
    of_policy = trained_on or record_experts or (unchecked and not hooks.sampling)
    wanted = {"policy": of_policy, "reference": view.beta != 0.0, "teacher": view.teacher_model is not None}
    return LogprobSettings(
        scored_by=tuple(name for name in wanted if wanted[name]),
        trained_on=trained_on,
        record_experts=record_experts,
        batch_size=args.per_device_train_batch_size if training else args.per_device_eval_batch_size,
        max_tokens=max_tokens,
        ratios=ratios,
    )


def _rewards(view: TrainerView) -> RewardSettings:
    return RewardSettings(
        functions=reward_functions(view),
        weights_F=torch.as_tensor(view.reward_weights).float().cpu().clone(),
        rule=advantage_rule(view),
        log_extra=view.override_of("_log_completion_extra"),
        pending_metrics=view.pending_metrics,
        pending_columns=view.pending_columns,
        state=view.state,
    )


# ---- Prompts --------------------------------------------------------------------------------------------------------


def template_of(view: TrainerView) -> dict[str, Any]:
    return {"chat_template": view.chat_template, **view.chat_template_kwargs}


def chat_of(view: TrainerView) -> Chat:
    embedding = base_model_of(view.model).get_input_embeddings()
    # an image's token may have no row
    embedded = None if view.takes_images else getattr(embedding, "num_embeddings", None)
    return Chat(
        view.processing_class,
        list(view.tools or ()),
        None if view.environment_factories is None else dict(view.environment_tools),
        view.chat_template,
        dict(view.chat_template_kwargs),
        embedded,
        view.tokenizer,
        _placeholders(view),
    )


def _placeholders(view: TrainerView) -> list[str]:
    """The texts of the tokens that stand for an image, a video or a sound."""
    config, kinds = view.policy.config, ("image", "video", "audio") if view.takes_images else ()
    ids = [getattr(config, f"{kind}_token_id", None) for kind in kinds]
    tokens = view.tokenizer.convert_ids_to_tokens([token for token in ids if isinstance(token, int)])
    return [token for token in tokens if token is not None]  # of ids beyond the vocabulary


def _turn_limits(view: TrainerView) -> TurnLimits:
    config = view.model.config.text_config if view.takes_images else view.model.config
    context = getattr(config, "max_position_embeddings", None) or sys.maxsize
    if view.use_vllm and view.vllm_mode == "colocate":
        context = view.vllm_generation.llm.llm_engine.model_config.max_model_len
    return TurnLimits(
        max_completion_length=view.max_completion_length or sys.maxsize,
        context=context,
        max_turns=view.max_tool_calling_iterations,
        seconds=view.args.tool_timeout,
        message_ends=frozenset(view.eos_token_ids),
    )


# ---- Sampling -------------------------------------------------------------------------------------------------------


def all_end_tokens(view: TrainerView) -> list[int]:
    """The tokens that end a completion: those of tokenizer and model (`eos_token_ids`), and of `generation_kwargs`."""
    if view.use_vllm:
        further = view.generation_settings.get("stop_token_ids") or []
    else:
        further = end_tokens(view.generation_config)
    return list(dict.fromkeys([*view.eos_token_ids, *further]))


def sampling_config(view: TrainerView) -> GenerationConfig:
    """transformers' settings for the next tokens, with all that ends a row, the model's own stop strings too."""
    config = copy.deepcopy(view.generation_config)
    config.eos_token_id = all_end_tokens(view)
    config.stop_strings = setting_of(view.policy, config, "stop_strings") or None
    return config


def outside_masks(view: TrainerView) -> dict[str, bool]:
    """Settings of sampling that replayed masks do not describe, for `refuse_excluded`."""
    if view.use_vllm or view.rollout_func is not None:  # sampling.vllm checks vLLM's
        return {}
    return not_replayed(view.policy, view.generation_config, view.temperature)


def suppressed_in(view: TrainerView) -> list[torch.Tensor]:
    if view.use_vllm or not view.args.replay.masks:
        return []
    return suppressed_tokens(view.policy, view.generation_config, all_end_tokens(view))


def truncating_filters(view: TrainerView) -> dict[str, Any]:
    if view.use_vllm:
        return vllm_filters(view.args)
    return truncating(filter_values(view.policy, view.generation_config))


def why_not_by_key(view: TrainerView) -> str | None:
    """What keeps the random number of a token from following from its key; None where nothing does."""
    if view.use_vllm:
        return "vLLM"
    if view.use_transformers_continuous_batching:
        return "transformers' continuous batching"
    return keyed.why_not_by_key(view.policy, view.generation_config)


# ---- The user's overrides -------------------------------------------------------------------------------------------


def own_sampling(view: TrainerView) -> str | None:
    if view.rollout_func is not None:
        return "rollout_func"
    return view.overridden("_generate_single_turn")


def _hooks(view: TrainerView, sharded: bool) -> Hooks:
    args = view.args
    reason = why_equal(args, sharded, rollout_func=True)
    needs_logps = None
    if view.corrects_sampling:
        needs_logps = (
            "vllm_importance_sampling_correction=True compares them with the trainer's; return them, or set it to False"
        )

    def rollout(prompts: list[Any]) -> dict[str, Any]:
        if reason is not None:
            refuse_unequal_shares("rollout_func", len(prompts), reason)
        output = view.call_rollout_func(copy.deepcopy(prompts))  # its loop of turns may append to its prompts
        return checked_rollout(output, len(prompts), needs_logps, args.replay.masks)

    return Hooks(
        turn=view.override_of("_generate_single_turn"),
        rollout=None if view.rollout_func is None else rollout,
        rewards=view.override_of("_calculate_rewards"),
        score=view.override_of(SCORE),
    )
