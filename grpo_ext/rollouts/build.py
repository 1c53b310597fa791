"""The trainer's rollouts: the main thread's worker, and what each rollout batch reads of the trainer.

With rollouts.build_ahead and `vllm_weights.versions_of` all of this room that reads a trainer. Called by the trainer.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.logging import get_logger
from transformers import GenerationConfig, ProcessorMixin

from .. import compat
from ..algorithms.advantages import AdvantageRule
from ..algorithms.losses import RatioRule
from ..batching.micro_batches import Form
from ..forward.architecture import base_model_of
from ..forward.images import PromptProcessor
from ..forward.override import OverridableRunner
from ..forward.routing import Router, routers_of
from ..forward.runner import ForwardRunner
from ..precision.half import as_in_training
from ..rewards.guard import Faults
from ..rewards.runner import RewardFunctions, RewardRunner
from ..rewards.workers import RewardWorkers
from ..runtime.attributes import assigned
from ..runtime.clock import PhaseClock
from ..runtime.collectives import shards_parameters, wait_for_all
from ..runtime.out_of_memory import Halving
from .chat import Chat
from .decoding import end_tokens
from .engine import ContinuousBatching, Engine, EngineSettings, TransformersEngine
from .engine_check import EngineCheck, rounding_bound, surplus_of
from .environments import Environments
from .images import ImageSource
from .keyed import filter_values, not_replayed, setting_of, suppressed_tokens, truncating
from .local import Hooks, Terms
from .overrides import MainWorker
from .rollout_func import checked_rollout, refuse_unequal_shares, why_equal
from .source import Rollouts
from .tools import Toolbox, TurnLimits, context_length
from .vllm import VllmEngine, VllmServer
from .vllm_replay import mask_bound, vllm_filters
from .vllm_weights import Generation, versions_of

logger = get_logger(__name__)

SCORE = "_generate_and_score_completions"
LOGPS = "_get_per_token_logps_and_entropies"
# a user's override of these may change the rows, so each has to carry its images
CHANGE_ROWS = (SCORE, "_generate")
# TRL's methods behind arguments of reward functions
_RECORDERS = {"log_metric": "_log_metric", "log_extra": "_log_completion_extra"}


def build_rollouts(trainer: Any, clock: PhaseClock) -> tuple[OverridableRunner, Rollouts]:
    """The runner of the forwards of a run, and the source of its rollout batches."""
    images, refused = ImageSource(), dict[Form, str]()
    if isinstance(trainer.processing_class, ProcessorMixin):
        image_token = compat.image_token(trainer.model)
        images.prepare = PromptProcessor(trainer.processing_class, template_of(trainer), image_token)
        compat.sample_no_image_tokens(trainer)
        refused["packed"] = "the model takes images; where there are none, pass its tokenizer as processing_class"
        later_images = bool(trainer.tools or trainer.environment_factories)
        if later_images:
            refused["prefix"] = "tools and environments may show images after the prompt"
        images.carry_images = later_images or any(map(trainer._override_of, CHANGE_ROWS))
    override = functools.partial(trainer._override_of, LOGPS)
    suppressed = suppressed_in(trainer)
    forwards = OverridableRunner(trainer.accelerator, trainer.args, refused, suppressed, override=override)
    remedy = "lower rollout_chunk_size (fewer completions at a time), or max_completion_length"
    memory = Halving("generation", remedy, not (forwards.sharded or trainer.args.bitwise_invariant))
    worker = _worker(trainer, images, forwards, memory, clock)
    send = functools.partial(load_weights, trainer)
    return forwards, Rollouts(trainer.accelerator, trainer.args, worker, memory, send, _check(trainer, worker.engine))


def template_of(trainer: Any) -> dict[str, Any]:
    """The chat template and its arguments, as TRL passes them."""
    return {"chat_template": trainer.chat_template, **trainer.chat_template_kwargs}


def _worker(
    trainer: Any, images: ImageSource, forwards: ForwardRunner, memory: Halving, clock: PhaseClock
) -> MainWorker:
    """The worker of the main thread, on the models that are trained."""
    args, settings = trainer.args, _settings(trainer)
    faults = Faults(args.reward_timeout, args.reward_retries, args.reward_on_failure)
    workers = RewardWorkers(args.reward_workers, args.seed) if args.reward_workers else None
    profile, loop = functools.partial(compat.profiling_context, trainer), getattr(trainer, "async_loop", None)

    def show_environments(transcripts: list[Any]) -> None:  # TRL's attributes, which a user may read
        if trainer.environment_factories is not None:
            trainer.environments = [transcript.environment for transcript in transcripts]
            trainer._batch_environments = [transcript.environment_name for transcript in transcripts]

    return MainWorker(
        forwards=forwards,
        models=lambda: (trainer.model, trainer.ref_model),
        engine=_engine(trainer, settings, images, memory),
        rewards=RewardRunner(trainer.accelerator.device, faults, workers, loop, profile),
        images=images,
        clock=clock,
        settings=settings,
        show_environments=show_environments,
    )


def _settings(trainer: Any) -> EngineSettings:
    settings = EngineSettings(
        device=trainer.accelerator.device,
        tokenizer=trainer._tokenizer,
        filler=trainer._tokenizer.eos_token_id,
        pad=trainer._tokenizer.pad_token_id,
        multiple=trainer.pad_to_multiple_of,
        compact=trainer.args.compact_rollouts,
        sharded=shards_parameters(trainer.accelerator),
        replay=trainer.args.replay,
        fp16=trainer.args.fp16,
    )
    if not trainer.use_vllm:
        settings.resize_chunks(trainer.geometry)
    return settings


def _policy(trainer: Any) -> Any:
    return trainer.accelerator.unwrap_model(trainer.model)


def _engine(trainer: Any, settings: EngineSettings, images: ImageSource, memory: Halving) -> Engine:
    model = functools.partial(_policy, trainer)
    if trainer.use_vllm:
        profile = functools.partial(compat.profiling_context, trainer)
        client = compat.client_of(trainer.vllm_generation) if trainer.vllm_mode == "server" else None
        bound = mask_bound(trainer.args, trainer.rollout_func)
        unfiltered = trainer.args.replay.masks and not vllm_filters(trainer.args)
        generation = Generation.of(trainer.vllm_generation, versions_of(trainer, client), bound, unfiltered)
        trainer.vllm_generation = generation
        routers = _returned_routers(trainer)
        if client is not None:
            return VllmServer(generation, client, trainer.args.vllm_seeds, profile)
        return VllmEngine(generation, trainer.args.vllm_seeds, profile, routers)
    if trainer.use_transformers_continuous_batching:
        return ContinuousBatching(trainer.trl_turn, model)

    @contextmanager
    def generating() -> Iterator[Any]:
        with compat.generating(trainer) as policy, as_in_training(policy, trainer.accelerator):
            yield policy

    return TransformersEngine(model, generating, settings, images.of_transcripts, memory)


def _returned_routers(trainer: Any) -> list[Router]:
    """The routers whose experts a colocated engine returns; none where the log-probabilities' forward records them."""
    if not trainer.args.replay.experts or own_sampling(trainer) is not None:
        return []
    if (reason := compat.why_no_experts(trainer.vllm_mode)) is None:
        return routers_of(base_model_of(trainer.model))
    logger.warning(f"routing_replay=True: {reason}, so they are recorded with the log-probabilities of the policy.")
    return []


def _check(trainer: Any, engine: Any) -> EngineCheck | None:
    if not (trainer.use_vllm and trainer.args.vllm_check):
        return None

    def surplus() -> float | None:
        if engine.generation.mask_bound is not None:
            return 0.0  # both are over the tokens that were kept
        mode = "processed_logprobs"  # as TRL starts an engine
        if isinstance(engine, VllmServer):
            about = compat.server_info(engine.client)["vllm_config"].get("model_config", {})
            mode = about.get("logprobs_mode", "unknown")
        return surplus_of(engine.generation, mode)

    layers = trainer.model.config.get_text_config().num_hidden_layers
    return EngineCheck(functools.cache(surplus), rounding_bound(layers))


def load_weights(trainer: Any) -> None:
    """Send the current weights to vLLM; by TRL's rule once for each step that samples."""
    if not trainer.use_vllm:
        return
    ahead, step = trainer._rollouts.ahead, trainer.state.global_step
    if ahead is not None:  # the server may still sample with other weights
        ahead.drain()
        wait_for_all(trainer.accelerator)
    if step != trainer._last_loaded_step:
        with compat.profiling_context(trainer, "sync_weights"):
            trainer.vllm_generation.sync_weights()
        wait_for_all(trainer.accelerator)  # the main process sends to a server, which every process asks
        trainer._last_loaded_step = step


# ---- What is read from the trainer for each rollout batch ------------------------------------------------------------


def terms_of(trainer: Any) -> Terms:
    """The terms of a rollout batch that begins now; a ConfigError for a changed setting that cannot be followed."""
    args, training, rollouts = trainer.args, trainer.model.training, trainer._rollouts
    if (prepare := rollouts.images.prepare) is not None and rollouts.scored_by is rollouts.ahead is None:
        prepare.processor, prepare.template = trainer.processing_class, template_of(trainer)  # nothing is sampled yet
    rollouts.recheck()
    ratios = None
    if trainer.use_vllm and trainer.vllm_importance_sampling_correction:
        bounds = trainer.vllm_importance_sampling_clip_min, trainer.vllm_importance_sampling_clip_max
        ratios = RatioRule(trainer.vllm_importance_sampling_mode, *bounds)
    steps = trainer.geometry.steps_per_rollout * trainer.num_iterations  # optimizer steps on one rollout batch
    return Terms(
        training=training,
        num_generations=trainer._group_size,
        seed=args.seed,
        rewards=RewardFunctions(
            list(trainer.reward_funcs),
            list(trainer.reward_func_names),
            trainer.reward_processing_classes,
            dict(trainer.chat_template_kwargs),
        ),
        weights_F=torch.as_tensor(trainer.reward_weights).float().cpu().clone(),
        rule=AdvantageRule(args.advantage_estimator, trainer.scale_rewards, trainer.multi_objective_aggregation),
        recorders={n: hook for n, name in _RECORDERS.items() if (hook := trainer._override_of(name)) is not None},
        metrics=trainer._metrics["train" if training else "eval"],
        table=trainer._logs,
        pending=(trainer._pending_metrics, trainer._pending_extra_logs),
        state=trainer.state,
        generation_config=None if trainer.use_vllm else sampling_config(trainer),
        old_logps=steps > 1 or ratios is not None or (training and bool(args.rollout_lag)),
        reference=trainer.beta != 0.0,
        unchecked=rollouts.check is not None and not rollouts.check.done,
        batch_size=args.per_device_train_batch_size if training else args.per_device_eval_batch_size,
        max_tokens=trainer._step_planner.limits.tokens,
        chat=chat_of(trainer),
        toolbox=_toolbox(trainer),
        ends=frozenset((*all_end_tokens(trainer), rollouts.worker.settings.pad)),
        masks_truncated=trainer.mask_truncated_completions,
        logs_images=prepare is not None and trainer.log_multimodal,
        limits=_turn_limits(trainer),
        replay=args.replay,
        record_experts=args.replay.experts and not _samples_experts(trainer),
        truncating=truncating_filters(trainer),
        ratios=ratios,
        hooks=_hooks(trainer, ratios is not None),
    )


def all_end_tokens(trainer: Any) -> list[int]:
    """The tokens that end a completion: those of tokenizer and model (`eos_token_ids`), and of `generation_kwargs`."""
    if trainer.use_vllm:
        further = (trainer.args.generation_kwargs or {}).get("stop_token_ids") or []
    else:
        further = end_tokens(trainer.generation_config)
    return list(dict.fromkeys([*trainer.eos_token_ids, *further]))


def sampling_config(trainer: Any) -> GenerationConfig:
    """transformers' settings for the next tokens, with all that ends a row, the model's own stop strings too."""
    config = copy.deepcopy(trainer.generation_config)
    config.eos_token_id = all_end_tokens(trainer)
    config.stop_strings = setting_of(_policy(trainer), config, "stop_strings") or None
    return config


def _turn_limits(trainer: Any) -> TurnLimits:
    with_images = trainer._rollouts.images.prepare is not None
    context = context_length(trainer.model.config, with_images, trainer.vllm_generation if trainer.use_vllm else None)
    longest = trainer.max_completion_length or sys.maxsize
    further = (trainer.max_tool_calling_iterations, trainer.args.tool_timeout, frozenset(trainer.eos_token_ids))
    return TurnLimits(longest, context, *further)


def chat_of(trainer: Any) -> Chat:
    """The chat template and the tools of a rollout batch that begins now."""
    embedding = base_model_of(trainer.model).get_input_embeddings()
    # an image's token may have no row
    embedded = None if trainer._rollouts.images.prepare else getattr(embedding, "num_embeddings", None)
    return Chat(
        trainer.processing_class,
        list(trainer.tools or ()),
        None if trainer.environment_factories is None else dict(getattr(trainer, "_env_tools", {})),
        trainer.chat_template,
        dict(trainer.chat_template_kwargs),
        embedded,
        trainer._tokenizer,
        trainer._override_of("_get_tool_suffix_ids"),
    )


def _toolbox(trainer: Any) -> Toolbox:
    pools, retired = getattr(trainer, "_environment_pool", None), trainer._rollouts.worker.retired
    environments = Environments(trainer.environment_factories, pools, retired)
    return Toolbox(list(trainer._standalone_tools), environments, getattr(trainer, "async_loop", None))


def outside_masks(trainer: Any) -> dict[str, bool]:
    """Settings of this trainer's sampling that replayed masks do not describe, for `refuse_combination`."""
    if trainer.use_vllm or trainer.rollout_func is not None:  # rollouts.vllm_replay checks vLLM's
        return {}
    return not_replayed(_policy(trainer), trainer.generation_config, trainer.temperature)


def suppressed_in(trainer: Any) -> list[torch.Tensor]:
    """The sets of tokens that this trainer's sampling suppresses."""
    if trainer.use_vllm or not trainer.args.replay.masks:
        return []
    return suppressed_tokens(_policy(trainer), trainer.generation_config, all_end_tokens(trainer))


def _hooks(trainer: Any, corrects: bool) -> Hooks:
    """The user's overrides of TRL's sampling; `corrects`: log-probabilities of vLLM correct the loss."""
    args = trainer.args
    reason = why_equal(args, trainer._rollouts.worker.settings.sharded, rollout_func=True)
    needs_logps = None
    if corrects:
        needs_logps = (
            "vllm_importance_sampling_correction=True compares them with the trainer's; return them, or set it to False"
        )

    def tokenize(prompts: list[Any], names: list[str | None]) -> list[list[int]]:
        with assigned(trainer, _batch_environments=names):  # TRL's method wants as many as there are prompts
            return trainer._tokenize_prompts(prompts)[0]

    def rollout(prompts: list[Any]) -> dict[str, Any]:
        if reason is not None:
            refuse_unequal_shares("rollout_func", len(prompts), reason)
        output = trainer.rollout_func(copy.deepcopy(prompts), trainer)  # whose loop of turns may append to its prompts
        return checked_rollout(output, len(prompts), needs_logps, args.replay.masks)

    return Hooks(
        tokenize=None if trainer._override_of("_tokenize_prompts") is None else tokenize,
        generate=trainer._override_of("_generate"),
        turn=trainer._override_of("_generate_single_turn"),
        rollout=None if trainer.rollout_func is None else rollout,
        rewards=trainer._override_of("_calculate_rewards"),
        score=trainer._override_of(SCORE),
    )


def overridden(trainer: Any, *names: str) -> str | None:
    """The first of these methods that a user overrides, with the name of the class; None if none is overridden."""
    return next((f"{type(trainer).__name__}.{n}" for n in names if trainer._override_of(n) is not None), None)


def own_sampling(trainer: Any) -> str | None:
    """The name of a user's override of this trainer's sampling, or of a part of it; None without one."""
    if trainer.rollout_func is not None:
        return "rollout_func"
    return overridden(trainer, "_generate", "_generate_single_turn")


def why_not_by_key(trainer: Any) -> str | None:
    """What keeps the random number of a token from following from its key; None where nothing does."""
    engine = trainer._rollouts.worker.engine
    if isinstance(engine, TransformersEngine):
        return engine.why_not_by_key(trainer.generation_config)
    return "vLLM" if trainer.use_vllm else "transformers' continuous batching"


def _samples_experts(trainer: Any) -> bool:
    """Whether completions come with the experts of their tokens."""
    returned = getattr(trainer._rollouts.worker.engine, "routers", ()) or why_not_by_key(trainer) is None
    return bool(returned) and own_sampling(trainer) is None


def truncating_filters(trainer: Any) -> dict[str, Any]:
    """The settings of this trainer's sampling that leave out tokens."""
    if trainer.use_vllm:
        return vllm_filters(trainer.args)
    return truncating(filter_values(_policy(trainer), trainer.generation_config))
