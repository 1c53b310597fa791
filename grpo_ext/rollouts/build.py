"""Builds the trainer's rollouts: the runner of forwards, and the main thread's worker with its engine.

Called by the trainer, once.
"""

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from .. import compat
from ..batching.micro_batches import Form
from ..forward.architecture import base_model_of
from ..forward.form_check import probe_rows
from ..forward.images import PromptProcessor
from ..forward.lm_head import install
from ..forward.routing import Router, routers_of
from ..forward.runner import ForwardRunner
from ..forward.snapshot import Snapshot
from ..precision.half import as_in_training
from ..rewards.guard import Faults
from ..rewards.runner import RewardRunner
from ..rewards.workers import RewardWorkers
from ..runtime.clock import PhaseClock
from ..runtime.collectives import raise_on_all, wait_for_all
from ..runtime.determinism import align_memory
from ..runtime.messages import logger
from ..runtime.out_of_memory import Halving, MicroBatchLimits
from ..sampling.engine import ContinuousBatching, Engine, EngineSettings, TransformersEngine
from ..sampling.engine_check import EngineCheck, rounding_bound, surplus_of
from ..sampling.sampler import suppressed_in
from ..sampling.vllm import VllmEngine, VllmServer, mask_bound, vllm_filters
from ..sampling.vllm_weights import Generation, versions_of
from ..view import TrainerView
from .ahead import RolloutsAhead, RolloutThread
from .images import ImageSource
from .log import RolloutLog
from .rounds import ScoredBatch
from .settings import LOGPS, template_of
from .source import Rollouts
from .worker import Models, RolloutWorker


def build_rollouts(view: TrainerView, note: Callable[[int, int, ScoredBatch], None]) -> Rollouts:
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
    forwards = ForwardRunner(view.accelerator, view.args, refused, suppressed_in(view), make_rows, override)
    args = view.args
    remedy = "lower rollout_chunk_size (fewer completions at a time), or max_completion_length"
    memory = Halving("generation", remedy, not (forwards.sharded or args.bitwise_invariant))
    settings = EngineSettings(
        device=view.accelerator.device,
        tokenizer=view.tokenizer,
        filler=view.tokenizer.eos_token_id,
        pad=view.tokenizer.pad_token_id,
        multiple=view.pad_to_multiple_of,
        sharded=forwards.sharded,
        replay=args.replay,
        fp16=args.fp16,
    )
    faults = Faults(args.reward_timeout, args.reward_retries, args.reward_on_failure)
    workers = RewardWorkers(args.reward_workers, args.seed) if args.reward_workers else None
    worker = RolloutWorker(
        forwards=forwards,
        models=lambda: Models(view.model, view.ref_model, view.teacher_model),
        engine=_engine(view, settings, images, memory),
        rewards=RewardRunner(view.accelerator.device, faults, workers, view.async_loop, view.profile),
        images=images,
        clock=PhaseClock(),
        settings=settings,
        show_environments=view.show_environments,
    )
    check = _check(view, worker.engine)
    limits = MicroBatchLimits(args.per_device_train_batch_size, args.micro_batch_tokens)
    return Rollouts(view, worker, check, RolloutLog(view), memory, limits, note, build_ahead)


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
    own = view.rollout_func is None and view.overridden("_generate_single_turn") is None
    if not (view.args.replay.experts and own):
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


# ---- Sampling ahead -------------------------------------------------------------------------------------------------


def build_ahead(rollouts: Rollouts) -> RolloutsAhead:
    view, accelerator = rollouts.view, copy.copy(rollouts.view.accelerator)
    accelerator._models = []  # without the models that are trained
    snapshot = _snapshot(view, accelerator)
    ahead = RolloutsAhead(
        view=view,
        settings_now=rollouts.settings_now,
        worker=_worker_ahead(rollouts, snapshot, accelerator),
        snapshot=snapshot,
        thread=RolloutThread(rollouts.threads, snapshot.device),
        clock=rollouts.worker.clock,
        steps=rollouts.steps,
        send=_sender(view, snapshot) if view.use_vllm else None,
    )
    if number := len(rollouts.waiting):
        logger.info(f"Sampling {number} rollout batch(es) that the checkpoint names again, with its weights.")
    try:
        for step, weights in rollouts.waiting:
            ahead.submit(step, weights)
    except BaseException:
        ahead.close()
        raise
    return ahead


def _snapshot(view: TrainerView, accelerator: Any) -> Snapshot:
    def prepare(model: Any) -> Any:
        install(base_model_of(model), view.temperature, view.args.cast_lm_head_to_fp32)
        return accelerator.prepare_model(model, evaluation_mode=True)

    policy, others = view.policy, (view.ref_model, view.teacher_model)
    reference, teacher = (None if model is None else accelerator.unwrap_model(model) for model in others)
    device = next(policy.parameters()).device
    snapshot = Snapshot(policy, reference, view.args.sync_ref_model, device, prepare, teacher)
    if view.args.bitwise_invariant:
        align_memory(*(m for m in (snapshot.policy, snapshot.reference, snapshot.teacher) if m is not None))
    return snapshot


def _sender(view: TrainerView, snapshot: Snapshot) -> Callable[[], None]:
    generation = copy.copy(view.vllm_generation)
    generation.model = snapshot.policy

    def send() -> None:
        wait_for_all()  # the main process sends, and every process asks
        with raise_on_all("sending weights"):
            generation.sync_weights()
        view.note_weights_sent(-1)  # an evaluation sends the current weights

    return send


def _worker_ahead(rollouts: Rollouts, snapshot: Snapshot, accelerator: Any) -> RolloutWorker:
    view, main = rollouts.view, rollouts.worker
    images = main.images
    if images.prepare is not None:
        processor = copy.deepcopy(view.processing_class)
        prepare = PromptProcessor(processor, template_of(view), images.prepare.image_token)
        images = replace(images, prepare=prepare)

    @contextmanager
    def generating() -> Iterator[Any]:
        kwargs: Any = view.generation_kwargs
        ready = compat.unwrapped_for_generation(snapshot.policy, accelerator, generation_kwargs=kwargs)
        with ready as model, as_in_training(model, accelerator):
            yield model

    engine: Any = main.engine
    if view.use_vllm:
        engine = replace(engine, profile=nullcontext)
    else:
        engine = replace(engine, model=lambda: snapshot.policy, generating=generating, images_of=images.of_transcripts)
    models = Models(snapshot.policy, snapshot.reference, snapshot.teacher)
    twins = zip((view.model, view.ref_model, view.teacher_model), models, strict=True)
    return replace(
        main,
        forwards=main.forwards.copy(accelerator, [pair for pair in twins if pair[0] is not None]),
        models=lambda: models,
        engine=engine,
        rewards=replace(main.rewards, profile=nullcontext),
        images=images,
        clock=PhaseClock(),
        show_environments=lambda transcripts: None,
    )
