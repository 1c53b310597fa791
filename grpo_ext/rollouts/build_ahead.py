"""Sampling ahead: a worker on copies of a trainer's models, and the settings that its rollout batches keep.

Called by `Rollouts`, with `rollout_lag`.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

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
from ..view import TrainerView
from .ahead import RolloutsAhead, RolloutThread
from .chat import Chat
from .engine import TransformersEngine
from .environments import Environments
from .local import RolloutSettings
from .settings import template_of
from .vllm import VllmServer
from .worker import RolloutWorker

if TYPE_CHECKING:
    from .source import Rollouts

logger = get_logger(__name__)

# what reward functions may read of the Trainer's state, as it was when the weights were taken
PROGRESS = ("global_step", "epoch", "num_input_tokens_seen", "total_flos", "best_metric", "best_global_step")


def described(view: TrainerView) -> str | None:
    """The lag of a run and the memory that the weights of earlier steps take, in words; None without a lag."""
    lag, reference = view.args.rollout_lag, view.ref_model
    if not lag:
        return None
    moved = reference.parameters() if reference is not None and view.args.sync_ref_model else ()
    trained = [p for p in view.model.parameters() if p.requires_grad]
    mebibytes = (lag + 1) * sum(p.nbytes for p in (*trained, *moved)) / 2**20
    return f"{lag} rollout batch(es); {mebibytes:,.0f} MiB, the trained weights up to {lag + 1} times"


def settings_ahead(rollouts: Rollouts, ahead: RolloutsAhead, weights: Weights) -> RolloutSettings:
    """The settings of a rollout batch that is submitted now, with the progress of the weights; none changes later."""
    state = copy.copy(rollouts.view.state)
    history = [entry for entry in state.log_history if entry.get("step", 0) <= weights.step]
    vars(state).update({**weights.progress, "log_history": history})
    settings = rollouts.settings_now()
    sampling, rewards = settings.sampling, settings.rewards
    config, processors = copy.deepcopy((sampling.generation_config, rewards.functions.processing_classes))
    shared = sampling.toolbox.environments  # whose instances the main thread uses
    environments = Environments(shared.factories, ahead.pools, shared.retired)
    return dataclasses.replace(
        settings,
        sampling=dataclasses.replace(
            sampling,
            generation_config=config,
            toolbox=dataclasses.replace(sampling.toolbox, environments=environments),
            chat=_own_chat(ahead, sampling.chat),
        ),
        rewards=dataclasses.replace(
            rewards, functions=dataclasses.replace(rewards.functions, processing_classes=processors), state=state
        ),
    )


def _own_chat(ahead: RolloutsAhead, chat: Chat) -> Chat:
    """The chat with a copy of the tokenizer, which threads may not share; copied again after a change."""
    parts = chat.processing_class, chat.tokenizer
    state = parts, [dict(vars(part)) for part in parts], chat.tokenizer.special_tokens_map, len(chat.tokenizer)
    if ahead.own_tokenizer is None or ahead.own_tokenizer[0] != state:
        ahead.own_tokenizer = state, copy.deepcopy(parts)
    processing_class, tokenizer = ahead.own_tokenizer[1]
    return dataclasses.replace(chat, processing_class=processing_class, own_tokenizer=tokenizer)


def build_ahead(rollouts: Rollouts) -> RolloutsAhead:
    """What samples ahead, with the rollout batches that the checkpoint names submitted."""
    view, accelerator = rollouts.view, copy.copy(rollouts.view.accelerator)
    accelerator._models = []  # without the models that are trained
    snapshot = _snapshot(view, accelerator)
    ahead = RolloutsAhead(
        worker=_worker(rollouts, snapshot, accelerator),
        snapshot=snapshot,
        thread=RolloutThread(rollouts.threads, snapshot.device),
        clock=rollouts.worker.clock,
        steps=rollouts.rounds.steps,
        max_steps=view.state.max_steps,
        send=_sender(view, snapshot) if view.use_vllm else None,
    )
    if number := len(rollouts.waiting):
        logger.info(f"Sampling {number} rollout batch(es) that the checkpoint names again, with its weights.")
    try:
        for step, weights in rollouts.waiting:
            ahead.submit(step, weights, settings_ahead(rollouts, ahead, weights))
    except BaseException:
        ahead.close()
        raise
    return ahead


def _snapshot(view: TrainerView, accelerator: Any) -> Snapshot:
    def prepare(model: Any) -> Any:
        install(base_model_of(model), view.temperature, view.args.cast_lm_head_to_fp32)
        return accelerator.prepare_model(model, evaluation_mode=True)

    policy, reference = accelerator.unwrap_model(view.model), view.ref_model
    reference = None if reference is None else accelerator.unwrap_model(reference)
    device = next(policy.parameters()).device
    snapshot = Snapshot(policy, reference, view.args.sync_ref_model, device, prepare)
    if view.args.bitwise_invariant:
        align_memory(*(model for model in (snapshot.policy, snapshot.reference) if model is not None))
    return snapshot


def _sender(view: TrainerView, snapshot: Snapshot) -> Callable[[], None]:
    generation = copy.copy(view.vllm_generation)
    generation.model = snapshot.policy

    def send() -> None:
        wait_for_all(view.accelerator)  # the main process sends, and every process asks
        generation.sync_weights()
        wait_for_all(view.accelerator)
        view.note_weights_sent(-1)  # an evaluation sends the current weights

    return send


def _worker(rollouts: Rollouts, snapshot: Snapshot, accelerator: Any) -> RolloutWorker:
    view, main = rollouts.view, rollouts.worker
    images, rewards, settings = main.images, main.rewards, dataclasses.replace(main.settings)
    if images.prepare is not None:
        processor = copy.deepcopy(view.processing_class)
        prepare = PromptProcessor(processor, template_of(view), images.prepare.image_token)
        images = dataclasses.replace(images, prepare=prepare)

    @contextmanager
    def generating() -> Iterator[Any]:
        kwargs: Any = view.generation_kwargs
        checkpointing: Any = view.args.gradient_checkpointing_kwargs
        ready = compat.unwrapped_for_generation(snapshot.policy, accelerator, checkpointing, generation_kwargs=kwargs)
        with ready as model, as_in_training(model, accelerator):
            yield model

    engine: Any
    if view.use_vllm:
        server: Any = main.engine
        engine = VllmServer(server.generation, server.client, server.seeded)
    else:
        engine = TransformersEngine(
            lambda: snapshot.policy, generating, settings, images.of_transcripts, rollouts.memory
        )
    twins = (view.model, snapshot.policy), (view.ref_model, snapshot.reference)
    return RolloutWorker(
        forwards=main.forwards.copy(accelerator, [pair for pair in twins if pair[0] is not None]),
        models=lambda: (snapshot.policy, snapshot.reference),
        engine=engine,
        rewards=RewardRunner(rewards.device, rewards.faults, rewards.workers, rewards.async_loop),
        images=images,
        clock=PhaseClock(),
        settings=settings,
        retired=main.retired,
    )
