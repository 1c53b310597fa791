"""Builds the trainer's rollouts: the runner of forwards, and the main thread's worker with its engine.

Called by the trainer, once.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from accelerate.logging import get_logger

from .. import compat
from ..batching.micro_batches import Form
from ..forward.architecture import base_model_of
from ..forward.form_check import probe_rows
from ..forward.images import PromptProcessor
from ..forward.routing import Router, routers_of
from ..forward.runner import ForwardRunner
from ..precision.half import as_in_training
from ..rewards.guard import Faults
from ..rewards.runner import RewardRunner
from ..rewards.workers import RewardWorkers
from ..runtime.clock import PhaseClock
from ..runtime.collectives import shards_parameters
from ..runtime.out_of_memory import Halving, MicroBatchLimits
from ..view import TrainerView
from .engine import ContinuousBatching, Engine, EngineSettings, TransformersEngine
from .engine_check import EngineCheck, rounding_bound, surplus_of
from .images import ImageSource
from .log import RolloutLog
from .rounds import ScoredBatch
from .settings import LOGPS, own_sampling, suppressed_in, template_of
from .source import Rollouts
from .vllm import VllmEngine, VllmServer, mask_bound, vllm_filters
from .vllm_weights import Generation, versions_of
from .worker import Models, RolloutWorker

logger = get_logger(__name__)


def build_rollouts(
    view: TrainerView, clock: PhaseClock, limits: MicroBatchLimits, note: Callable[[int, int, ScoredBatch], None]
) -> tuple[ForwardRunner, Rollouts]:
    images, refused = ImageSource(), dict[Form, str]()
    if view.takes_images:
        image_token = compat.image_token(view.model)
        images.prepare = PromptProcessor(view.processing_class, template_of(view), image_token)
        compat.sample_no_image_tokens(view)
        refused["packed"] = "the model takes images; where there are none, pass its tokenizer as processing_class"
        if view.tools or view.environment_factories:
            refused["prefix"] = "tools and environments may show images after the prompt"
    override = functools.partial(view.override_of, LOGPS)
    make_rows = functools.partial(probe_rows, tokenizer=view.tokenizer, processor=images.prepare)
    forms = refused, suppressed_in(view), make_rows
    forwards = ForwardRunner(view.accelerator, view.args, *forms, override=override)
    remedy = "lower rollout_chunk_size (fewer completions at a time), or max_completion_length"
    memory = Halving("generation", remedy, not (forwards.sharded or view.args.bitwise_invariant))
    worker = _worker(view, images, forwards, memory, clock)
    return forwards, Rollouts(view, worker, _check(view, worker.engine), RolloutLog(view), memory, limits, note)


def _worker(
    view: TrainerView, images: ImageSource, forwards: ForwardRunner, memory: Halving, clock: PhaseClock
) -> RolloutWorker:
    args = view.args
    settings = EngineSettings(
        device=view.accelerator.device,
        tokenizer=view.tokenizer,
        filler=view.tokenizer.eos_token_id,
        pad=view.tokenizer.pad_token_id,
        multiple=view.pad_to_multiple_of,
        compact=args.compact_rollouts,
        sharded=shards_parameters(view.accelerator),
        replay=args.replay,
        fp16=args.fp16,
    )
    faults = Faults(args.reward_timeout, args.reward_retries, args.reward_on_failure)
    workers = RewardWorkers(args.reward_workers, args.seed) if args.reward_workers else None
    return RolloutWorker(
        forwards=forwards,
        models=lambda: Models(view.model, view.ref_model, view.teacher_model),
        engine=_engine(view, settings, images, memory),
        rewards=RewardRunner(view.accelerator.device, faults, workers, view.async_loop, view.profile),
        images=images,
        clock=clock,
        settings=settings,
        show_environments=view.show_environments,
    )


def _engine(view: TrainerView, settings: EngineSettings, images: ImageSource, memory: Halving) -> Engine:
    if view.use_vllm:
        client = compat.client_of(view.vllm_generation) if view.vllm_mode == "server" else None
        bound = mask_bound(view.args, view.rollout_func)
        unfiltered = view.args.replay.masks and not vllm_filters(view.args)
        generation = Generation.of(view.vllm_generation, versions_of(view, client), bound, unfiltered)
        view.use_generation(generation)
        routers = _returned_routers(view)
        if client is not None:
            return VllmServer(generation, client, view.args.vllm_seeds, view.profile)
        return VllmEngine(generation, view.args.vllm_seeds, view.profile, routers)
    if view.use_transformers_continuous_batching:
        return ContinuousBatching(view.turn_of_trl, lambda: view.policy)

    @contextmanager
    def generating() -> Iterator[Any]:
        with view.generating() as policy, as_in_training(policy, view.accelerator):
            yield policy

    return TransformersEngine(lambda: view.policy, generating, settings, images.of_transcripts, memory)


def _returned_routers(view: TrainerView) -> list[Router]:
    """The routers whose experts a colocated engine returns; none where the log-probabilities' forward records them."""
    if not view.args.replay.experts or own_sampling(view) is not None:
        return []
    if (reason := compat.why_no_experts(view.vllm_mode)) is None:
        return routers_of(base_model_of(view.model))
    logger.warning(f"routing_replay=True: {reason}, so they are recorded with the log-probabilities of the policy.")
    return []


def _check(view: TrainerView, engine: Any) -> EngineCheck | None:
    if not (view.use_vllm and view.args.vllm_check):
        return None

    def surplus() -> float | None:
        if engine.generation.mask_bound is not None:
            return 0.0  # both are over the tokens that were kept
        mode = "processed_logprobs"  # as TRL starts an engine
        if isinstance(engine, VllmServer):
            about = compat.server_info(engine.client)["vllm_config"].get("model_config", {})
            mode = about.get("logprobs_mode", "unknown")
        return surplus_of(engine.generation, mode)

    layers = view.model.config.get_text_config().num_hidden_layers
    return EngineCheck(functools.cache(surplus), rounding_bound(layers))
