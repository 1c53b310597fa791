"""The second trainer, which samples ahead of training on a thread of its own (sampling.ahead).

A shallow copy of the first: it shares what training does not change. Models, accelerator, state, records, tokenizers,
environments and components are its own, so that TRL's methods and a user's overrides of them run on it as they are.
Used by the trainer, which hands itself over, at the first step that samples ahead.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..batching.prompt_order import StepRows
from ..compat import View, VLLMClient
from ..forward.lm_head import install
from ..forward.reference import base_model_of
from ..forward.shards import ShardedSnapshot
from ..forward.snapshot import Snapshot, Weights
from ..runtime.clock import PhaseClock
from ..runtime.collectives import gather_nothing, wait_for_all
from ..runtime.determinism import align_memory
from .ahead import RolloutsAhead, Sampled, Worker
from .tool_calls import TimedTools


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


def begin_ahead(trainer: Any, waiting: Sequence[tuple[int, Weights]], threads: int | None) -> RolloutsAhead:
    """What samples ahead for a trainer.

    Args:
        waiting: what a checkpoint found on its way.
        threads: that sampling computes with on a CPU; None: as many as torch has.
    """
    device = torch.device(trainer.args.rollout_device or trainer.accelerator.device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    here = copy.copy(trainer.accelerator)
    one = {"num_processes": 1, "process_index": 0, "local_process_index": 0, "is_main_process": False}
    here.state, here._models = View(here.state, {**one, "device": device}), []
    gather_nothing(here)  # of an override, which runs on the thread too

    snapshot = _snapshot(trainer, here, device)
    twin = _twin(trainer, snapshot, here)

    def state(weights: Weights) -> dict[str, Any]:
        past = copy.copy(trainer.state)
        history = [entry for entry in past.log_history if entry.get("step", 0) <= weights.step]
        vars(past).update({**weights.progress, "log_history": history})
        changeable = {"generation_config": copy.deepcopy(getattr(trainer, "generation_config", None))}
        return {**changeable, "state": past, "_reward_funcs": list(trainer._reward_funcs)}

    def sample(rows: StepRows, weights: Weights, state: dict[str, Any], idle: float) -> Sampled:
        snapshot.put_in_place(weights)
        vars(twin).update(state)
        twin._last_loaded_step = twin.state.global_step  # a server has the weights
        call = twin._score_alone(rows)
        return Sampled(call, twin._forms(), twin._clock.take(), idle)

    def stopping() -> bool:
        return trainer._keeper.watch.requested

    send = _sender(trainer, snapshot) if trainer.use_vllm else None
    worker = Worker(threads, device)
    steps, last = trainer._sampler.steps, trainer.state.max_steps
    ahead = RolloutsAhead(steps, last, snapshot, worker, sample, state, stopping, send)
    try:
        ahead.resume(waiting)
    except BaseException:
        ahead.close()
        raise
    return ahead


def _snapshot(trainer: Any, here: Any, device: torch.device) -> Snapshot | ShardedSnapshot:
    policy = trainer.accelerator.unwrap_model(trainer.model)
    reference = None if trainer.ref_model is None else trainer.accelerator.unwrap_model(trainer.ref_model)
    if trainer._scorer.sharded:
        return ShardedSnapshot(policy, reference, trainer.args.sync_ref_model, trainer.args.should_save)

    def prepare(model: Any) -> Any:
        install(base_model_of(model), trainer.temperature, trainer.args.cast_lm_head_to_fp32)
        return here.prepare_model(model, evaluation_mode=True)

    watches = not trainer.use_vllm
    snapshot = Snapshot(policy, reference, trainer.args.sync_ref_model, device, prepare, watches)
    if trainer.args.bitwise_invariant:
        align_memory(*(model for model in (snapshot.policy, snapshot.reference) if model is not None))
    return snapshot


def _twin(trainer: Any, snapshot: Snapshot | ShardedSnapshot, here: Any) -> Any:
    twin = copy.copy(trainer)
    twin.accelerator, twin._clock, twin._ahead, twin._is_twin = here, PhaseClock(), None, True
    twin._waiting = []  # a copy would hold the weights that a checkpoint has loaded to the end of the run
    twin.model = twin.model_wrapped = snapshot.policy
    twin.ref_model = snapshot.reference
    # tokenizers are not to be used by two threads at a time
    own = copy.deepcopy((trainer.processing_class, trainer.reward_processing_classes))
    twin.processing_class, twin.reward_processing_classes = own
    twin._tokenizer = getattr(own[0], "tokenizer", own[0])
    twin._metrics = {mode: defaultdict(list) for mode in trainer._metrics}
    twin._logs = {name: copy.copy(record) for name, record in trainer._logs.items()}
    twin._pending_extra_logs, twin._pending_metrics = defaultdict(list), defaultdict(list)
    pools: dict[Any, list[Any]] = {name: [] for name in getattr(trainer, "_environment_pool", {})}
    twin._environment_pool = pools
    if (timed := trainer._timed_tools) is not None:
        twin._timed_tools = TimedTools(timed.seconds, pools)
    if trainer.use_vllm:
        generation = twin.vllm_generation = copy.copy(trainer.vllm_generation)
        generation.accelerator = View(here, {"is_main_process": True})
        if not trainer.accelerator.is_main_process:  # which alone has a client
            url = generation.server_base_url or f"http://{generation.server_host}:{generation.server_port}"
            generation.vllm_client = VLLMClient(base_url=url, connection_timeout=generation.server_timeout)
    twin._sampler = trainer._sampler.twin(here, twin.processing_class)
    twin._scorer = trainer._scorer.twin(here, twin)
    return twin


def _sender(trainer: Any, snapshot: Snapshot | ShardedSnapshot) -> Callable[[], None]:
    """What sends the weights that are in place to the vLLM server."""
    generation = copy.copy(trainer.vllm_generation)
    generation.model = snapshot.sent

    def send() -> None:
        generation.sync_weights()
        wait_for_all(trainer.accelerator)  # the main process sends, and every process asks
        trainer._last_loaded_step = -1  # an evaluation sends those of its own moment

    return send
