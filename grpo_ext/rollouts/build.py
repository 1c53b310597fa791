"""The workers of a run, built from a trainer's parts: one for the main thread, one for the thread that samples ahead.

The only place of this room that reads a trainer; what it makes does not. Called by the trainer.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import ProcessorMixin

from .. import compat
from ..algorithms.advantages import AdvantageRule
from ..algorithms.importance import RatioRule
from ..algorithms.keyed_random import TRAIN_STREAM
from ..batching.micro_batches import Form
from ..batching.prompt_order import StepRows
from ..errors import ConfigError
from ..forward.images import PromptProcessor
from ..forward.lm_head import install
from ..forward.reference import base_model_of
from ..forward.rows import TokenRows
from ..forward.scorer import Scorer
from ..forward.shards import ShardedSnapshot
from ..forward.snapshot import Snapshot, Weights
from ..rewards.guard import Faults
from ..rewards.runner import RewardFunctions, RewardRunner
from ..rewards.workers import RewardWorkers
from ..runtime.attributes import assigned
from ..runtime.clock import PhaseClock
from ..runtime.collectives import shards_parameters, wait_for_all
from ..runtime.determinism import align_memory
from ..runtime.out_of_memory import Halving
from .ahead import RolloutsAhead, Sampled, Worker
from .chat import Chat
from .engine import ContinuousBatching, Engine, EngineSettings, TransformersEngine
from .environments import Environments
from .images import ImageSource
from .join import JoinRules
from .keyed import request_keys
from .local import Hooks, Parts, Terms
from .rollout_func import checked_rollout
from .source import Context, Rollouts
from .tools import Toolbox
from .turns import TurnLimits
from .turns import context_of as context_of_model
from .vllm import VllmEngine, VllmServer
from .worker import RolloutWorker

SCORE = "_generate_and_score_completions"
LOGPS = "_get_per_token_logps_and_entropies"
# a user's override of these may change the rows, so images have to travel with them
_OWN_ROWS = (SCORE, "_generate")
# why a model that takes images does not run in a form: always, and where tools or environments may bring some
_PLACES: dict[Form, str] = {
    "packed": "the model takes images; where there are none, pass its tokenizer as processing_class"
}
_LATER: dict[Form, str] = {"prefix": "tools and environments may show images after the prompt"}
_RECORDERS = {"log_metric": "_log_metric", "log_extra": "_log_completion_extra"}  # TRL's, by the argument of functions
# what reward functions may read of the Trainer's state, as it was when the weights were taken
_PROGRESS = ("global_step", "epoch", "num_input_tokens_seen", "total_flos", "best_metric", "best_global_step")


def build_rollouts(trainer: Any, clock: PhaseClock) -> tuple[Scorer, Rollouts]:
    """What scores the completions of a run, and what makes its rollout batches."""
    with_images, prepare = isinstance(trainer.processing_class, ProcessorMixin), None
    travelling = with_images and bool(trainer.tools or trainer.environment_factories)
    if with_images:
        template = {"chat_template": trainer.chat_template, **trainer.chat_template_kwargs}
        prepare = PromptProcessor(trainer.processing_class, template, compat.image_token(trainer.model))
        compat.sample_no_image_tokens(trainer)
    refused = (_PLACES if with_images else {}) | (_LATER if travelling else {})
    scorer = Scorer(trainer.accelerator, trainer.args, refused)
    images = ImageSource(prepare, travelling or (with_images and any(map(trainer._override_of, _OWN_ROWS))))
    worker, load = build_worker(trainer, images, scorer, clock), functools.partial(load_weights, trainer)
    return scorer, Rollouts(trainer.accelerator, trainer.args, worker, images, load)


def build_worker(trainer: Any, images: ImageSource, scorer: Scorer, clock: PhaseClock) -> RolloutWorker:
    """The worker of the main thread, on the models that are trained."""
    args, accelerator = trainer.args, trainer.accelerator
    sharded = shards_parameters(accelerator)
    remedy = "lower rollout_chunk_size (fewer completions at a time), or max_completion_length"
    memory = Halving("generation", remedy, not (sharded or args.bitwise_invariant))
    chat = Chat(
        trainer.processing_class,
        trainer.tools or (),
        trainer._env_tools if trainer.environment_factories is not None else None,
        trainer.chat_template,
        trainer.chat_template_kwargs,
    )
    factories = trainer.environment_factories
    environments = Environments(
        factories,
        isinstance(factories, dict) and None not in factories,
        None if factories is None else trainer._environment_pool,
    )
    loop = getattr(trainer, "async_loop", None)
    faults = Faults(args.reward_timeout, args.reward_retries, args.reward_on_failure)
    workers = RewardWorkers(args.reward_workers, args.seed) if args.reward_workers else None

    def profile(name: str) -> contextlib.AbstractContextManager[Any]:
        return compat.profiling_context(trainer, name)

    def begun(transcripts: list[Any]) -> None:  # for code of the user's that reads them
        if trainer.environment_factories is not None:
            trainer.environments = [transcript.environment for transcript in transcripts]
            trainer._batch_environments = [transcript.environment_name for transcript in transcripts]

    ends = frozenset((*trainer.eos_token_ids, trainer._tokenizer.pad_token_id))
    parts = Parts(
        policy=lambda: trainer.model,
        reference=lambda: trainer.ref_model,
        as_reference=lambda: compat.as_reference(accelerator.unwrap_model(trainer.model)),
        logps=log_probabilities(trainer, scorer),
        engine=_engine(trainer, images, memory, profile),
        memory=memory,
        chat=chat,
        environments=environments,
        toolbox=Toolbox(trainer._standalone_tools, environments, loop),
        rewards=RewardRunner(accelerator.device, faults, workers, loop, profile),
        images=images,
        clock=clock,
        device=accelerator.device,
        sharded=sharded,
        # vLLM's shares are as many for every process, and no whole chunks
        chunk=None if args.use_vllm else trainer.geometry.rollout_chunk_size,
        ends=ends,
        filler=trainer._tokenizer.eos_token_id,
        pad=trainer._tokenizer.pad_token_id,
        multiple=trainer.pad_to_multiple_of,
    )
    return RolloutWorker(parts, begun)


def build_worker_ahead(
    trainer: Any, worker: RolloutWorker, snapshot: Snapshot | ShardedSnapshot, accelerator: Any, scorer: Scorer
) -> RolloutWorker:
    """A second worker, for a thread: on copies of the models, with tokenizers, environments and a clock of its own."""
    parts = worker.parts
    chat, environments = parts.chat.copy(), parts.environments.copy()
    images = parts.images
    if images.prepare is not None:
        own = PromptProcessor(chat.processing_class, images.prepare.template, images.prepare.image_token)
        images = dataclasses.replace(images, prepare=own)
    if trainer.use_vllm:
        generation = trainer.vllm_generation
        engine: Engine = VllmServer(generation, compat.client_of(generation))
    else:
        generating = _generating_alone(trainer, snapshot.policy, accelerator)
        assert isinstance(parts.engine, TransformersEngine)
        settings = dataclasses.replace(parts.engine.settings, device=accelerator.device)
        engine = TransformersEngine(lambda: snapshot.policy, generating, settings, images.of_transcripts, parts.memory)
    ahead = dataclasses.replace(
        parts,
        policy=lambda: snapshot.policy,
        reference=lambda: snapshot.reference,
        as_reference=lambda: compat.as_reference(snapshot.policy),
        logps=log_probabilities(trainer, scorer),
        engine=engine,
        chat=chat,
        environments=environments,
        toolbox=Toolbox(parts.toolbox.tools, environments, parts.toolbox.loop),
        rewards=RewardRunner(accelerator.device, parts.rewards.faults, parts.rewards.workers, parts.rewards.async_loop),
        images=images,
        clock=PhaseClock(),
        device=accelerator.device,
    )
    return RolloutWorker(ahead, scores=not parts.sharded)


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
    images, ends = trainer._rollouts.images, trainer._rollouts.worker.parts.ends
    rule = AdvantageRule(trainer.args.advantage_estimator, trainer.scale_rewards, trainer.multi_objective_aggregation)
    reads = images.prepare is not None and not images.travelling
    shows = images.prepare is not None and trainer.log_multimodal
    return Context(
        terms=terms_of(trainer, hooks_of(trainer)),
        rules=JoinRules(rule, trainer.reward_weights, ends, reads, images.travelling, shows),
        num_generations=trainer._group_size,
        names=trainer.reward_func_names,
        state=trainer.state,
        metrics=trainer._metrics[mode],
        logs=trainer._logs,
        score=trainer._override_of(SCORE),
        rewards=trainer._override_of("_calculate_rewards"),
    )


def terms_of(trainer: Any, hooks: Hooks | None = None) -> Terms:
    """What the local phase reads of a trainer."""
    args, training = trainer.args, trainer.model.training
    corrects = trainer.use_vllm and trainer.vllm_importance_sampling_correction
    bounds = (trainer.vllm_importance_sampling_clip_min, trainer.vllm_importance_sampling_clip_max) if corrects else ()
    steps = trainer.geometry.steps_per_rollout * trainer.num_iterations  # that one rollout batch is trained for
    engine = trainer.vllm_generation if trainer.use_vllm else None
    context = context_of_model(trainer.model.config, trainer._rollouts.images.prepare is not None, engine)
    recorders = {name: trainer._override_of(method) for name, method in _RECORDERS.items()}
    return Terms(
        training=training,
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
    rollouts, group = trainer._rollouts, trainer._group_size

    def tokenize(prompts: list[Any], names: list[str | None]) -> list[list[int]]:
        with assigned(trainer, _batch_environments=names):  # TRL's method wants as many as there are prompts
            return trainer._tokenize_prompts(prompts)[0]

    def rollout(prompts: list[Any]) -> dict[str, Any]:
        rollouts.refuse_unequal_prompts(len(prompts))
        # a copy: a loop of turns appends to its prompts
        return checked_rollout(trainer.rollout_func, copy.deepcopy(prompts), trainer, why_logprobs(trainer.args))

    turn, generate = trainer._override_of("_generate_single_turn"), trainer._override_of("_generate")
    return Hooks(
        None if trainer._override_of("_tokenize_prompts") is None else tokenize,
        None if generate is None else functools.partial(rollouts.generate_by_user, generate),
        None if turn is None else functools.partial(rollouts.turn_by_user, turn, group),
        None if trainer.rollout_func is None else rollout,
        trainer._override_of("_calculate_rewards") is not None,
        trainer._override_of(SCORE) is not None,
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


def _engine(
    trainer: Any,
    images: ImageSource,
    memory: Halving,
    profile: Callable[[str], contextlib.AbstractContextManager[Any]],
) -> Engine:
    args, accelerator = trainer.args, trainer.accelerator
    if trainer.use_vllm:
        return VllmEngine(trainer.vllm_generation, profile)
    if trainer.use_transformers_continuous_batching:
        return ContinuousBatching(trainer.trl_turn)
    sharded = shards_parameters(accelerator)
    settings = EngineSettings(
        device=accelerator.device,
        chunk_size=trainer.geometry.rollout_chunk_size,
        eos_token_ids=trainer.eos_token_ids,
        filler=trainer._tokenizer.eos_token_id,
        multiple=trainer.pad_to_multiple_of,
        compact=args.compact_rollouts,
        sharded=sharded,
        fp16=args.fp16,
    )

    def model() -> Any:
        return accelerator.unwrap_model(trainer.model)

    return TransformersEngine(model, lambda: compat.generating(trainer), settings, images.of_transcripts, memory)


def _generating_alone(
    trainer: Any, model: Any, accelerator: Any
) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """The contexts of generation with a copy of the model."""

    @contextlib.contextmanager
    def generating() -> Iterator[Any]:
        checkpointing, kwargs = trainer.args.gradient_checkpointing_kwargs, trainer.generation_kwargs
        with (
            compat.unwrapped_for_generation(model, accelerator, checkpointing, generation_kwargs=kwargs) as inner,
            torch.no_grad(),
        ):
            yield inner

    return generating


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


def accelerator_alone(accelerator: Any, device: torch.device) -> Any:
    """An accelerator for a thread that works by itself: it prepares no model of the first, on a device of its own."""
    alone = copy.copy(accelerator)
    alone._models, alone.state = [], copy.copy(accelerator.state)
    alone.state.device = device
    return alone


# ---- Sampling ahead --------------------------------------------------------------------------------------------------


def described(trainer: Any) -> str | None:
    """How far a trainer samples ahead and what it holds for that, in words; None where it does not."""
    lag, reference = trainer.args.rollout_lag, trainer.ref_model
    if not lag:
        return None
    moved = reference.parameters() if reference is not None and trainer.args.sync_ref_model else ()
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    mebibytes = (lag + 1) * sum(p.nbytes for p in (*trained, *moved)) / 2**20
    size = "this process's part of" if trainer._scorer.sharded else f"{mebibytes:,.0f} MiB,"
    return f"{lag} rollout batch(es); {size} the trained weights up to {lag + 1} times"


def sample_ahead(trainer: Any, only_due: bool = False) -> None:
    """With `rollout_lag`: begin with the rollout batches that the weights as they are now have to sample.

    Args:
        only_due: begin with that of this step alone, which may want further prompts before others have their turn.
    """
    rollouts, lag = trainer._rollouts, trainer.args.rollout_lag
    if not lag:
        return
    if rollouts.ahead is None:
        if number := len(rollouts.waiting):
            which = "1 rollout batch that was" if number == 1 else f"{number} rollout batches that were"
            trainer._keeper.say(f"{which} on the way when the checkpoint was written: sampled again by its weights.")
        rollouts.ahead, rollouts.waiting = _begin_ahead(trainer), ()
    progress = {name: getattr(trainer.state, name) for name in _PROGRESS}
    rollouts.ahead.begin(progress, rollouts.held, 0 if only_due else lag)


def _begin_ahead(trainer: Any) -> RolloutsAhead:
    device = torch.device(trainer.args.rollout_device or trainer.accelerator.device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    accelerator = accelerator_alone(trainer.accelerator, device)
    snapshot = _snapshot(trainer, accelerator, device)
    scorer = trainer._scorer.copy(accelerator)
    worker = build_worker_ahead(trainer, trainer._rollouts.worker, snapshot, accelerator, scorer)

    def terms(weights: Weights) -> Terms:
        state = copy.copy(trainer.state)
        history = [entry for entry in state.log_history if entry.get("step", 0) <= weights.step]
        vars(state).update({**weights.progress, "log_history": history})
        config = copy.deepcopy(getattr(trainer, "generation_config", None))
        hooks = Hooks(rewards=trainer._override_of("_calculate_rewards") is not None)
        now = dataclasses.replace(terms_of(trainer, hooks), training=True, state=state, generation_config=config)
        processors = copy.deepcopy(now.rewards.processing_classes)
        return dataclasses.replace(now, rewards=dataclasses.replace(now.rewards, processing_classes=processors))

    def sample(rows: StepRows, weights: Weights, terms: Terms, idle: float) -> Sampled:
        snapshot.put_in_place(weights)
        if terms.hooks.rewards:  # environments are asked for rewards by the main thread, when others are begun with
            worker.parts.environments.pools = {name: [] for name in worker.parts.environments.factories}
        keys = request_keys(rows.request, trainer.args.seed, TRAIN_STREAM).tolist()
        local = worker.sample(rows.request, rows.rows, keys, rows.numbers, terms)
        models = () if scorer.sharded else (snapshot.policy, snapshot.reference)
        forms = tuple(scorer.form(model) for model in models if model is not None)
        return Sampled(local, forms, worker.parts.clock.take(), idle)

    send = _sender(trainer, snapshot) if trainer.use_vllm else None
    steps, last, watch = trainer._rollouts.steps, trainer.state.max_steps, trainer._keeper.watch
    thread = Worker(trainer._rollouts.threads, device)
    ahead = RolloutsAhead(steps, last, snapshot, thread, sample, terms, lambda: watch.requested, send)
    try:
        ahead.resume(trainer._rollouts.waiting)
    except BaseException:
        ahead.close()
        raise
    return ahead


def _snapshot(trainer: Any, accelerator: Any, device: torch.device) -> Snapshot | ShardedSnapshot:
    policy = trainer.accelerator.unwrap_model(trainer.model)
    reference = None if trainer.ref_model is None else trainer.accelerator.unwrap_model(trainer.ref_model)
    if trainer._scorer.sharded:
        return ShardedSnapshot(policy, reference, trainer.args.sync_ref_model, trainer.args.should_save)

    def prepare(model: Any) -> Any:
        install(base_model_of(model), trainer.temperature, trainer.args.cast_lm_head_to_fp32)
        return accelerator.prepare_model(model, evaluation_mode=True)

    snapshot = Snapshot(policy, reference, trainer.args.sync_ref_model, device, prepare, not trainer.use_vllm)
    if trainer.args.bitwise_invariant:
        align_memory(*(model for model in (snapshot.policy, snapshot.reference) if model is not None))
    return snapshot


def load_weights(trainer: Any) -> None:
    """Give vLLM the weights as they are now, by TRL's rule: once for each step, where completions are sampled."""
    rollouts, step = trainer._rollouts, trainer.state.global_step
    if trainer.use_vllm and rollouts.ahead is not None:  # which holds weights of other steps
        rollouts.ahead.drain()
    if trainer.use_vllm and step != trainer._last_loaded_step:
        with compat.profiling_context(trainer, "sync_weights"):
            trainer.vllm_generation.sync_weights()
        trainer._last_loaded_step = step


def _sender(trainer: Any, snapshot: Snapshot | ShardedSnapshot) -> Callable[[], None]:
    """What sends the weights that are in place to the vLLM server."""
    generation = copy.copy(trainer.vllm_generation)
    generation.model = snapshot.sent

    def send() -> None:
        generation.sync_weights()
        wait_for_all(trainer.accelerator)  # the main process sends, and every process asks
        trainer._last_loaded_step = -1  # an evaluation sends those of its own moment

    return send
