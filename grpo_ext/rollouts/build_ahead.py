"""Sampling ahead, built from a trainer's parts: a worker on copies of the models, and when rollout batches begin.

Reads a trainer, as rollouts.build does; what it builds does not. Called by the trainer, with `rollout_lag`.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .. import compat
from ..batching.prompt_order import StepRows
from ..forward.images import PromptProcessor
from ..forward.lm_head import install
from ..forward.reference import base_model_of
from ..forward.runner import ForwardRunner
from ..forward.snapshot import Snapshot, Weights
from ..rewards.runner import RewardRunner
from ..runtime.clock import PhaseClock
from ..runtime.collectives import wait_for_all
from ..runtime.determinism import align_memory
from .ahead import RolloutsAhead, RolloutThread, SampledAhead
from .build import log_probabilities, terms_of
from .engine import Engine, TransformersEngine
from .local import Hooks, Terms
from .tools import Toolbox
from .vllm import VllmServer
from .worker import RolloutWorker

# what reward functions may read of the Trainer's state, as it was when the weights were taken
_PROGRESS = ("global_step", "epoch", "num_input_tokens_seen", "total_flos", "best_metric", "best_global_step")


def described(trainer: Any) -> str | None:
    """How far a trainer samples ahead and the memory of the weights for that, in words; None without a lag."""
    lag, reference = trainer.args.rollout_lag, trainer.ref_model
    if not lag:
        return None
    moved = reference.parameters() if reference is not None and trainer.args.sync_ref_model else ()
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    mebibytes = (lag + 1) * sum(p.nbytes for p in (*trained, *moved)) / 2**20
    return f"{lag} rollout batch(es); {mebibytes:,.0f} MiB, the trained weights up to {lag + 1} times"


def sample_ahead(trainer: Any, only_due: bool = False) -> None:
    """With `rollout_lag`: submit the rollout batches that the current weights sample.

    Args:
        only_due: submit the rollout batch of this step alone. Its further prompts must enter the queue before others.
    """
    rollouts, lag = trainer._rollouts, trainer.args.rollout_lag
    if not lag:
        return
    if rollouts.ahead is None:
        rollouts.ahead, rollouts.waiting = _rollouts_ahead(trainer), ()
    due = rollouts.ahead.steps_to_submit(trainer.state.global_step, rollouts.held, 0 if only_due else lag)
    if due:
        weights = rollouts.ahead.snapshot.take({name: getattr(trainer.state, name) for name in _PROGRESS})
        for step in due:
            rollouts.ahead.submit(step, weights, _terms_by(trainer, weights))


def _terms_by(trainer: Any, weights: Weights) -> Terms:
    """The terms of a local phase that begins now, with the progress of the weights, in objects of the thread's own."""
    state = copy.copy(trainer.state)
    history = [entry for entry in state.log_history if entry.get("step", 0) <= weights.step]
    vars(state).update({**weights.progress, "log_history": history})
    now = terms_of(trainer, Hooks(rewards=trainer._override_of("_calculate_rewards")))
    config, processors = copy.deepcopy((now.generation_config, now.rewards.processing_classes))
    rewards = dataclasses.replace(now.rewards, processing_classes=processors)
    return dataclasses.replace(now, training=True, state=state, generation_config=config, rewards=rewards)


def _rollouts_ahead(trainer: Any) -> RolloutsAhead:
    rollouts = trainer._rollouts
    device = torch.device(trainer.args.rollout_device or trainer.accelerator.device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    accelerator = _accelerator_on(trainer.accelerator, device)
    snapshot, forwards = _snapshot(trainer, accelerator, device), trainer._forwards.copy(accelerator)
    worker = _worker(trainer, snapshot, accelerator, forwards)

    def sample(rows: StepRows, weights: Weights, terms: Terms, idle: float) -> SampledAhead:
        snapshot.put_in_place(weights)
        if terms.hooks.rewards:  # the main thread reads these environments while the thread resets others
            worker.parts.environments.pools = {name: [] for name in worker.parts.environments.factories}
        local = worker.sample(rows, terms)
        models = [model for model in (snapshot.policy, snapshot.reference) if model is not None]
        return SampledAhead(local, tuple(map(forwards.choice.form, models)), worker.parts.clock.take(), idle)

    ahead = RolloutsAhead(
        rollouts.steps,
        trainer.state.max_steps,
        snapshot,
        RolloutThread(rollouts.threads, device),
        sample,
        stopping=lambda: trainer._keeper.watch.requested,
        send=_sender(trainer, snapshot) if trainer.use_vllm else None,
    )
    if number := len(rollouts.waiting):
        trainer._keeper.say(f"{number} rollout batch(es) that the checkpoint names: sampled again by its weights.")
    try:
        for step, weights in rollouts.waiting:
            ahead.submit(step, weights, _terms_by(trainer, weights))
    except BaseException:
        ahead.close()
        raise
    return ahead


def _accelerator_on(accelerator: Any, device: torch.device) -> Any:
    """A copy of the accelerator for the thread: on the device, without the models that are trained."""
    other = copy.copy(accelerator)
    other._models, other.state = [], copy.copy(accelerator.state)
    other.state.device = device
    return other


def _snapshot(trainer: Any, accelerator: Any, device: torch.device) -> Snapshot:
    def prepare(model: Any) -> Any:
        install(base_model_of(model), trainer.temperature, trainer.args.cast_lm_head_to_fp32)
        return accelerator.prepare_model(model, evaluation_mode=True)

    policy = trainer.accelerator.unwrap_model(trainer.model)
    reference = None if trainer.ref_model is None else trainer.accelerator.unwrap_model(trainer.ref_model)
    snapshot = Snapshot(policy, reference, trainer.args.sync_ref_model, device, prepare)
    if trainer.args.bitwise_invariant:
        align_memory(*(model for model in (snapshot.policy, snapshot.reference) if model is not None))
    return snapshot


def _sender(trainer: Any, snapshot: Snapshot) -> Callable[[], None]:
    """A function that sends the weights of the snapshot to the vLLM server."""
    generation = copy.copy(trainer.vllm_generation)
    generation.model = snapshot.policy

    def send() -> None:
        generation.sync_weights()
        wait_for_all(trainer.accelerator)  # the main process sends, and every process asks
        trainer._last_loaded_step = -1  # an evaluation sends the current weights

    return send


# ---- The worker ------------------------------------------------------------------------------------------------------


def _worker(trainer: Any, snapshot: Snapshot, accelerator: Any, forwards: ForwardRunner) -> RolloutWorker:
    """The thread's worker: on copies of the models, with tokenizers, environments and a clock of its own."""
    parts = trainer._rollouts.worker.parts
    chat, environments, images = parts.chat.copy(), parts.environments.copy(), parts.images
    if images.prepare is not None:
        prepare = PromptProcessor(chat.processing_class, images.prepare.template, images.prepare.image_token)
        images = dataclasses.replace(images, prepare=prepare)
    settings = dataclasses.replace(parts.settings, device=accelerator.device)

    @contextlib.contextmanager
    def generating() -> Iterator[Any]:
        checkpointing, kwargs = trainer.args.gradient_checkpointing_kwargs, trainer.generation_kwargs
        unwrapped = compat.unwrapped_for_generation(
            snapshot.policy, accelerator, checkpointing, generation_kwargs=kwargs
        )
        with unwrapped as model, torch.no_grad():
            yield model

    if trainer.use_vllm:
        engine: Engine = VllmServer(trainer.vllm_generation, compat.client_of(trainer.vllm_generation))
    else:
        engine = TransformersEngine(lambda: snapshot.policy, generating, settings, images.of_transcripts, parts.memory)
    ahead = dataclasses.replace(
        parts,
        policy=lambda: snapshot.policy,
        reference=lambda: snapshot.reference,
        as_reference=lambda: compat.as_reference(snapshot.policy),
        logps=log_probabilities(trainer, forwards),
        engine=engine,
        chat=chat,
        environments=environments,
        toolbox=Toolbox(parts.toolbox.tools, environments, parts.toolbox.loop),
        rewards=RewardRunner(accelerator.device, parts.rewards.faults, parts.rewards.workers, parts.rewards.async_loop),
        images=images,
        clock=PhaseClock(),
        settings=settings,
    )
    return RolloutWorker(ahead)
