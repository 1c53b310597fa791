"""Sampling ahead for a trainer: a worker on copies of its models, and which rollout batches begin when.

Reads a trainer, as rollouts.build does. Called by the trainer, with `rollout_lag`.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from accelerate.logging import get_logger

from .. import compat
from ..forward.architecture import base_model_of
from ..forward.images import PromptProcessor
from ..forward.lm_head import install
from ..forward.snapshot import Snapshot, Weights
from ..precision.half import as_in_training
from ..rewards.runner import RewardRunner
from ..runtime.clock import PhaseClock
from ..runtime.collectives import wait_for_all
from ..runtime.determinism import align_memory
from .ahead import RolloutsAhead, RolloutThread
from .build import template_of, terms_of
from .chat import Chat
from .engine import TransformersEngine
from .environments import Environments
from .local import Terms
from .vllm import VllmServer
from .worker import RolloutWorker

logger = get_logger(__name__)

# what reward functions may read of the Trainer's state, as it was when the weights were taken
_PROGRESS = ("global_step", "epoch", "num_input_tokens_seen", "total_flos", "best_metric", "best_global_step")


def described(trainer: Any) -> str | None:
    """The lag of a trainer and the memory that the weights of earlier steps take, in words; None without a lag."""
    lag, reference = trainer.args.rollout_lag, trainer.ref_model
    if not lag:
        return None
    moved = reference.parameters() if reference is not None and trainer.args.sync_ref_model else ()
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    mebibytes = (lag + 1) * sum(p.nbytes for p in (*trained, *moved)) / 2**20
    return f"{lag} rollout batch(es); {mebibytes:,.0f} MiB, the trained weights up to {lag + 1} times"


def sample_ahead(trainer: Any, only_due: bool = False) -> None:
    """With `rollout_lag`: submit the rollout batches that the current weights sample.

    With `only_due` that of this step alone, whose further prompts must enter the queue before others.
    """
    rollouts, lag = trainer._rollouts, trainer.args.rollout_lag
    if not lag:
        return
    if rollouts.ahead is None:
        rollouts.ahead, rollouts.waiting = _rollouts_ahead(trainer), ()
    due = rollouts.ahead.steps_to_submit(trainer.state.global_step, rollouts.batch_name, 0 if only_due else lag)
    if due:
        weights = rollouts.ahead.snapshot.take({name: getattr(trainer.state, name) for name in _PROGRESS})
        for step in due:
            rollouts.ahead.submit(step, weights, _terms_by(trainer, rollouts.ahead, weights))


def _terms_by(trainer: Any, ahead: RolloutsAhead, weights: Weights) -> Terms:
    """The terms of a rollout batch that begins now, with the progress of the weights; nothing in them changes later."""
    state = copy.copy(trainer.state)
    history = [entry for entry in state.log_history if entry.get("step", 0) <= weights.step]
    vars(state).update({**weights.progress, "log_history": history})
    terms = terms_of(trainer)
    config, processors = copy.deepcopy((terms.generation_config, terms.rewards.processing_classes))
    rewards = dataclasses.replace(terms.rewards, processing_classes=processors)
    shared = terms.toolbox.environments  # whose instances the main thread uses
    environments = Environments(shared.factories, ahead.pools, shared.retired)
    toolbox = dataclasses.replace(terms.toolbox, environments=environments)
    terms = dataclasses.replace(terms, generation_config=config, rewards=rewards, toolbox=toolbox)
    return dataclasses.replace(terms, state=state, chat=_own_chat(ahead, terms.chat))


def _own_chat(ahead: RolloutsAhead, chat: Chat) -> Chat:
    """The chat with the thread's copy of its tokenizer, because threads may not share one; made anew after a change."""
    parts = chat.processing_class, chat.tokenizer
    state = parts, [dict(vars(part)) for part in parts], chat.tokenizer.special_tokens_map, len(chat.tokenizer)
    if ahead.own_tokenizer is None or ahead.own_tokenizer[0] != state:
        ahead.own_tokenizer = state, copy.deepcopy(parts)
    processing_class, tokenizer = ahead.own_tokenizer[1]
    return dataclasses.replace(chat, processing_class=processing_class, own_tokenizer=tokenizer)


def _rollouts_ahead(trainer: Any) -> RolloutsAhead:
    rollouts, accelerator = trainer._rollouts, copy.copy(trainer.accelerator)
    accelerator._models = []  # without the models that are trained
    snapshot = _snapshot(trainer, accelerator)
    ahead = RolloutsAhead(
        worker=_worker(trainer, snapshot, accelerator),
        snapshot=snapshot,
        thread=RolloutThread(rollouts.threads, snapshot.device),
        clock=trainer._clock,
        steps=rollouts.steps,
        max_steps=trainer.state.max_steps,
        send=_sender(trainer, snapshot) if trainer.use_vllm else None,
    )
    if number := len(rollouts.waiting):
        logger.info(f"{number} rollout batch(es) that the checkpoint names: sampled again by its weights.")
    try:
        for step, weights in rollouts.waiting:
            ahead.submit(step, weights, _terms_by(trainer, ahead, weights))
    except BaseException:
        ahead.close()
        raise
    return ahead


def _snapshot(trainer: Any, accelerator: Any) -> Snapshot:
    """Copies of the models that run as the trained ones do."""

    def prepare(model: Any) -> Any:
        install(base_model_of(model), trainer.temperature, trainer.args.cast_lm_head_to_fp32)
        return accelerator.prepare_model(model, evaluation_mode=True)

    policy, reference = accelerator.unwrap_model(trainer.model), trainer.ref_model
    reference = None if reference is None else accelerator.unwrap_model(reference)
    device = next(policy.parameters()).device
    snapshot = Snapshot(policy, reference, trainer.args.sync_ref_model, device, prepare)
    if trainer.args.bitwise_invariant:
        align_memory(*(model for model in (snapshot.policy, snapshot.reference) if model is not None))
    return snapshot


def _sender(trainer: Any, snapshot: Snapshot) -> Callable[[], None]:
    """A function that sends the weights of the snapshot to the vLLM server."""
    generation = copy.copy(trainer.vllm_generation)
    generation.model = snapshot.policy

    def send() -> None:
        wait_for_all(trainer.accelerator)  # the main process sends, and every process asks
        generation.sync_weights()
        wait_for_all(trainer.accelerator)
        trainer._last_loaded_step = -1  # an evaluation sends the current weights

    return send


def _worker(trainer: Any, snapshot: Snapshot, accelerator: Any) -> RolloutWorker:
    """The thread's worker: on copies of the models, with tokenizers, environments and a clock of its own."""
    main, memory = trainer._rollouts.worker, trainer._rollouts.memory
    images, rewards, settings = main.images, main.rewards, dataclasses.replace(main.settings)
    if images.prepare is not None:
        processor = copy.deepcopy(trainer.processing_class)
        prepare = PromptProcessor(processor, template_of(trainer), images.prepare.image_token)
        images = dataclasses.replace(images, prepare=prepare)

    @contextmanager
    def generating() -> Iterator[Any]:
        kwargs, checkpointing = trainer.generation_kwargs, trainer.args.gradient_checkpointing_kwargs
        ready = compat.unwrapped_for_generation(snapshot.policy, accelerator, checkpointing, generation_kwargs=kwargs)
        with ready as model, as_in_training(model, accelerator):
            yield model

    if trainer.use_vllm:
        engine: Any = VllmServer(main.engine.generation, main.engine.client, main.engine.seeded)
    else:
        engine = TransformersEngine(lambda: snapshot.policy, generating, settings, images.of_transcripts, memory)
    return RolloutWorker(
        forwards=trainer._forwards.copy(accelerator),
        models=lambda: (snapshot.policy, snapshot.reference),
        engine=engine,
        rewards=RewardRunner(rewards.device, rewards.faults, rewards.workers, rewards.async_loop),
        images=images,
        clock=PhaseClock(),
        settings=settings,
        retired=main.retired,
    )
