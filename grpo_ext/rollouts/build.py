"""The workers of a run, built from a trainer's parts: one for the main thread, one for the thread that samples ahead.

The only place of this room that reads a trainer; what it makes does not. Called by the trainer.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers import ProcessorMixin

from .. import compat
from ..algorithms.advantages import AdvantageRule
from ..algorithms.importance import RatioRule
from ..batching.micro_batches import Form
from ..errors import ConfigError
from ..forward.images import PromptProcessor
from ..forward.rows import TokenRows
from ..forward.scorer import Scorer
from ..rewards.guard import Faults
from ..rewards.runner import RewardFunctions, RewardRunner
from ..rewards.workers import RewardWorkers
from ..runtime.attributes import assigned
from ..runtime.clock import PhaseClock
from ..runtime.collectives import shards_parameters
from ..runtime.out_of_memory import Halving
from .chat import Chat
from .engine import ContinuousBatching, Engine, EngineSettings, TransformersEngine
from .environments import Environments
from .images import ImageSource
from .join import JoinRules
from .local import Hooks, Parts, Terms
from .overrides import OverriddenWorker
from .rollout_func import checked_rollout, refuse_unequal_shares, why_equal
from .source import Context, Rollouts
from .tools import Toolbox, TurnLimits, context_length
from .vllm import VllmEngine

SCORE = "_generate_and_score_completions"
LOGPS = "_get_per_token_logps_and_entropies"
# a user's override of these may change the rows, so each has to carry its images
_CHANGE_ROWS = (SCORE, "_generate")
# why a model that takes images does not run in a form: always, and where tools or environments may bring some
_REFUSED_WITH_IMAGES: dict[Form, str] = {
    "packed": "the model takes images; where there are none, pass its tokenizer as processing_class"
}
_REFUSED_WITH_LATER_IMAGES: dict[Form, str] = {"prefix": "tools and environments may show images after the prompt"}
_RECORDERS = {"log_metric": "_log_metric", "log_extra": "_log_completion_extra"}  # TRL's, by the argument of functions


def build_rollouts(trainer: Any, clock: PhaseClock) -> tuple[Scorer, Rollouts]:
    """What scores the completions of a run, and what makes its rollout batches."""
    with_images, prepare = isinstance(trainer.processing_class, ProcessorMixin), None
    later_images = with_images and bool(trainer.tools or trainer.environment_factories)
    if with_images:
        template = {"chat_template": trainer.chat_template, **trainer.chat_template_kwargs}
        prepare = PromptProcessor(trainer.processing_class, template, compat.image_token(trainer.model))
        compat.sample_no_image_tokens(trainer)
    refused = (_REFUSED_WITH_IMAGES if with_images else {}) | (_REFUSED_WITH_LATER_IMAGES if later_images else {})
    scorer = Scorer(trainer.accelerator, trainer.args, refused)
    images = ImageSource(prepare, later_images or (with_images and any(map(trainer._override_of, _CHANGE_ROWS))))
    worker, load = build_worker(trainer, images, scorer, clock), functools.partial(load_weights, trainer)
    return scorer, Rollouts(trainer.accelerator, trainer.args, worker, load)


def build_worker(trainer: Any, images: ImageSource, scorer: Scorer, clock: PhaseClock) -> OverriddenWorker:
    """The worker of the main thread, on the models that are trained."""
    args, accelerator = trainer.args, trainer.accelerator
    chat = Chat(
        trainer.processing_class,
        trainer.tools or (),
        trainer._env_tools if trainer.environment_factories is not None else None,
        trainer.chat_template,
        trainer.chat_template_kwargs,
    )
    settings = _settings(trainer, chat.tokenizer)
    remedy = "lower rollout_chunk_size (fewer completions at a time), or max_completion_length"
    memory = Halving("generation", remedy, not (settings.sharded or args.bitwise_invariant))
    factories = trainer.environment_factories
    environments = Environments(factories, None if factories is None else trainer._environment_pool)
    loop = getattr(trainer, "async_loop", None)
    faults = Faults(args.reward_timeout, args.reward_retries, args.reward_on_failure)
    workers = RewardWorkers(args.reward_workers, args.seed) if args.reward_workers else None
    profile = functools.partial(compat.profiling_context, trainer)

    def begun(transcripts: list[Any]) -> None:  # for code of the user's that reads them
        if factories is not None:
            trainer.environments = [transcript.environment for transcript in transcripts]
            trainer._batch_environments = [transcript.environment_name for transcript in transcripts]

    parts = Parts(
        policy=lambda: trainer.model,
        reference=lambda: trainer.ref_model,
        as_reference=lambda: compat.as_reference(accelerator.unwrap_model(trainer.model)),
        logps=log_probabilities(trainer, scorer),
        engine=_engine(trainer, images, memory, settings, profile),
        memory=memory,
        chat=chat,
        environments=environments,
        toolbox=Toolbox(trainer._standalone_tools, environments, loop),
        rewards=RewardRunner(accelerator.device, faults, workers, loop, profile),
        images=images,
        clock=clock,
        settings=settings,
    )
    return OverriddenWorker(parts, accelerator, begun)


# ---- What is read of the trainer for each rollout batch --------------------------------------------------------------


def context_of(trainer: Any) -> Context:
    """For a rollout batch that is made now, on the main thread.

    Raises:
        ConfigError: `num_generations` or `num_iterations` was changed since the trainer was built.
    """
    for name in ("num_generations", "num_iterations"):
        value, planned = getattr(trainer, name), getattr(trainer.geometry, name)
        if trainer.model.training and value != planned:
            raise ConfigError(
                f"{name} was changed to {value} after the trainer was built, and steps and rollout batches are planned "
                f"with {planned}; set it in GRPOConfig."
            )
    mode = "train" if trainer.model.training else "eval"
    images = trainer._rollouts.images
    rule = AdvantageRule(trainer.args.advantage_estimator, trainer.scale_rewards, trainer.multi_objective_aggregation)
    logs_images = images.prepare is not None and trainer.log_multimodal
    return Context(
        terms=terms_of(trainer, hooks_of(trainer)),
        rules=JoinRules(rule, trainer.reward_weights, images, logs_images),
        num_generations=trainer._group_size,
        metrics=trainer._metrics[mode],
        logs=trainer._logs,
    )


def terms_of(trainer: Any, hooks: Hooks | None = None) -> Terms:
    """What the local phase reads of a trainer."""
    args, training = trainer.args, trainer.model.training
    corrects = trainer.use_vllm and trainer.vllm_importance_sampling_correction
    bounds = (trainer.vllm_importance_sampling_clip_min, trainer.vllm_importance_sampling_clip_max) if corrects else ()
    steps = trainer.geometry.steps_per_rollout * trainer.num_iterations  # that one rollout batch is trained for
    engine = trainer.vllm_generation if trainer.use_vllm else None
    context = context_length(trainer.model.config, trainer._rollouts.images.prepare is not None, engine)
    recorders = {name: trainer._override_of(method) for name, method in _RECORDERS.items()}
    return Terms(
        training=training,
        seed=args.seed,
        rewards=RewardFunctions(
            list(trainer.reward_funcs),
            trainer.reward_func_names,
            trainer.reward_processing_classes,
            trainer.chat_template_kwargs,
        ),
        recorders={name: method for name, method in recorders.items() if method is not None},
        pending=(trainer._pending_metrics, trainer._pending_extra_logs),
        state=trainer.state,
        generation_config=None if trainer.use_vllm else trainer.generation_config,
        old_logps=steps > 1 or corrects or (training and bool(args.rollout_lag)),
        reference=trainer.beta != 0.0,
        batch_size=args.per_device_train_batch_size if training else args.per_device_eval_batch_size,
        max_tokens=trainer._step_runner.limits.tokens,
        ends=frozenset((*trainer.eos_token_ids, trainer._rollouts.worker.parts.settings.pad)),
        masks_truncated=trainer.mask_truncated_completions,
        limits=TurnLimits(
            trainer.max_completion_length or sys.maxsize,
            context,
            trainer.max_tool_calling_iterations,
            args.tool_timeout,
        ),
        ratios=RatioRule(trainer.vllm_importance_sampling_mode, *bounds) if corrects else None,
        hooks=hooks or Hooks(),
    )


def hooks_of(trainer: Any) -> Hooks:
    """What the user has put in the place of a part of the local phase."""
    reason = why_equal(trainer.args, trainer._rollouts.sharded)

    def tokenize(prompts: list[Any], names: list[str | None]) -> list[list[int]]:
        with assigned(trainer, _batch_environments=names):  # TRL's method wants as many as there are prompts
            return trainer._tokenize_prompts(prompts)[0]

    def rollout(prompts: list[Any]) -> dict[str, Any]:
        if reason is not None:
            refuse_unequal_shares("rollout_func", len(prompts), reason)
        output = trainer.rollout_func(copy.deepcopy(prompts), trainer)  # whose loop of turns may append to its prompts
        return checked_rollout(output, len(prompts), why_logprobs(trainer.args))

    return Hooks(
        None if trainer._override_of("_tokenize_prompts") is None else tokenize,
        trainer._override_of("_generate"),
        trainer._override_of("_generate_single_turn"),
        None if trainer.rollout_func is None else rollout,
        trainer._override_of("_calculate_rewards"),
        trainer._override_of(SCORE),
    )


def overridden(trainer: Any, *names: str) -> str | None:
    """The name, with that of its class, of the first of these methods that is a user's; None if none is."""
    return next((f"{type(trainer).__name__}.{n}" for n in names if trainer._override_of(n) is not None), None)


def own_sampling(trainer: Any) -> str | None:
    """The name of what a user has put in the place of this trainer's sampling, or of a part of it."""
    return (
        "rollout_func"
        if trainer.rollout_func is not None
        else overridden(trainer, "_generate", "_generate_single_turn")
    )


def samples_by_key(trainer: Any) -> bool:
    """Whether the random number of every token follows from its key."""
    engine = trainer._rollouts.worker.parts.engine
    return isinstance(engine, TransformersEngine) and engine.samples_by_key(trainer.generation_config)


def why_logprobs(args: Any) -> str | None:
    """Why a `rollout_func` has to return log-probabilities, as the rest of a sentence; None if it may not."""
    if not (args.use_vllm and args.vllm_importance_sampling_correction):
        return None
    return "vllm_importance_sampling_correction=True compares them with the trainer's; return them, or set it to False"


# ---- Parts -----------------------------------------------------------------------------------------------------------


def _settings(trainer: Any, tokenizer: Any) -> EngineSettings:
    args, accelerator = trainer.args, trainer.accelerator
    return EngineSettings(
        device=accelerator.device,
        # vLLM's shares are as many for every process, and no whole chunks
        chunk_size=None if args.use_vllm else trainer.geometry.rollout_chunk_size,
        eos_token_ids=trainer.eos_token_ids,
        filler=tokenizer.eos_token_id,
        pad=tokenizer.pad_token_id,
        multiple=trainer.pad_to_multiple_of,
        compact=args.compact_rollouts,
        sharded=shards_parameters(accelerator),
        fp16=args.fp16,
    )


def _engine(
    trainer: Any,
    images: ImageSource,
    memory: Halving,
    settings: EngineSettings,
    profile: Callable[[str], contextlib.AbstractContextManager[Any]],
) -> Engine:
    if trainer.use_vllm:
        return VllmEngine(trainer.vllm_generation, profile)
    if trainer.use_transformers_continuous_batching:
        return ContinuousBatching(trainer.trl_turn, lambda: trainer.accelerator.unwrap_model(trainer.model))

    def model() -> Any:
        return trainer.accelerator.unwrap_model(trainer.model)

    return TransformersEngine(model, lambda: compat.generating(trainer), settings, images.of_transcripts, memory)


def log_probabilities(trainer: Any, scorer: Scorer) -> Callable[[Any, TokenRows, Terms, int], torch.Tensor]:
    """Log-probabilities (S,) of rows of a rollout, through the user's `_get_per_token_logps_and_entropies` if any."""

    def score(model: Any, rows: TokenRows, terms: Terms, num_generations: int) -> torch.Tensor:
        limits = (terms.batch_size, terms.max_tokens, num_generations)
        with scorer.without_gradients(model):
            if (override := trainer._override_of(LOGPS)) is None:
                return scorer.score_rollout(model, rows, *limits)
            ids, mask, width = rows.padded(trainer.pad_to_multiple_of or 1)
            images = {} if rows.images is None else rows.images.as_trl(ids, rows.prompts_B, ids.size(1) - width)
            with scorer.requested(ids, mask, rows, limits):
                logps_BT, _, _ = override(model, ids, mask, width, batch_size=terms.batch_size, **images)
        return torch.cat([row[:n] for row, n in zip(logps_BT, rows.completions_B)])

    return score


def load_weights(trainer: Any) -> None:
    """Give vLLM the weights as they are now, by TRL's rule: once for each step, where completions are sampled."""
    rollouts, step = trainer._rollouts, trainer.state.global_step
    if trainer.use_vllm and rollouts.ahead is not None:  # which holds weights of other steps
        rollouts.ahead.drain()
    if trainer.use_vllm and step != trainer._last_loaded_step:
        with compat.profiling_context(trainer, "sync_weights"):
            trainer.vllm_generation.sync_weights()
        trainer._last_loaded_step = step
