"""What the package reads from a trainer, by public names and with types: the only file that knows its attributes.

Components are built from the parts of a view. Settings are read through it where TRL reads them, because users and
callbacks may change them: those of a rollout batch when it begins, those of the loss at each loss.
"""

from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy, deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import trl
from accelerate import Accelerator
from transformers import GenerationConfig, ProcessorMixin, TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler

from . import compat
from .batching.sizes import BatchGeometry
from .config import GRPOConfig
from .runtime.attributes import temporarily_set
from .runtime.collectives import shards_parameters

# names of TRL's and transformers' private attributes, by their names here
_PRIVATE = {
    "tokenizer": "_tokenizer",
    "metrics": "_metrics",
    "logs": "_logs",
    "pending_metrics": "_pending_metrics",
    "pending_columns": "_pending_extra_logs",
    "standalone_tools": "_standalone_tools",
    "weights_sent_at": "_last_loaded_step",
    "entropy_bonus": "_entropy_bonus_enabled",
    "last_entropy": "_last_world_entropy",
    "tokenize_prompts": "_tokenize_prompts",
    "calculate_rewards": "_calculate_rewards",
    "loss_of": "_loss_of",
    "environment_tools": "_env_tools",
    "environment_pools": "_environment_pool",
}
# attributes that `GRPOTrainer._assemble` sets
_COMPONENTS = (
    *("_clock", "_forwards", "_rollouts", "_step_planner", "_loss_overrides", "_trl_methods", "_pass_at_k", "_keeper"),
)
# attributes that a trainer without vLLM, asynchronous functions or environments lacks, and the one that says so
_ABSENT: dict[str, tuple[Any, str]] = {
    "vllm_generation": (None, "use_vllm"),
    "_last_loaded_step": (-1, "use_vllm"),
    "async_loop": (None, "_has_async_funcs"),
    "_env_tools": ({}, "environment_factories"),
    "_environment_pool": ({}, "environment_factories"),
}


class TrainerView:
    """A trainer's attributes, as they are when they are read; methods of `ours` count as not overridden."""

    # Models and data
    model: Any
    ref_model: Any
    accelerator: Accelerator
    processing_class: Any
    tokenizer: Any
    train_dataset: Any
    eval_dataset: Any
    optimizer: Any
    lr_scheduler: Any
    model_wrapped: Any  # as the loop calls it
    is_deepspeed_enabled: bool
    is_fsdp_enabled: bool
    get_tp_size: Callable[[], int]
    # The loop
    args: GRPOConfig
    geometry: BatchGeometry  # the batch sizes of the run
    state: TrainerState
    control: TrainerControl
    callback_handler: Any
    hub_model_id: str | None
    add_callback: Callable[[Any], None]
    train: Callable[..., Any]
    # Sampling
    num_generations: int
    num_generations_eval: int
    num_iterations: int
    max_completion_length: int | None
    temperature: float
    generation_config: GenerationConfig
    generation_kwargs: dict[str, Any]
    eos_token_ids: list[int]
    pad_to_multiple_of: int | None
    use_vllm: bool
    vllm_mode: str
    vllm_importance_sampling_correction: bool
    vllm_importance_sampling_mode: str
    vllm_importance_sampling_clip_min: float | None
    vllm_importance_sampling_clip_max: float | None
    vllm_generation: Any  # TRL's client or engine of vLLM
    use_transformers_continuous_batching: bool
    weights_sent_at: int  # the optimizer step whose weights vLLM has; -1: others
    rollout_func: Callable[..., Any] | None
    # Chats, tools, environments
    chat_template: str | None
    chat_template_kwargs: dict[str, Any]
    tokenize_prompts: Callable[[list[Any]], tuple[list[list[int]], Any, Any]]
    tools: list[Callable[..., Any]] | None
    standalone_tools: list[Callable[..., Any]]
    environment_factories: dict[str | None, Any] | None
    environment_tools: dict[str | None, Any]  # of each environment, by its name
    environment_pools: dict[str | None, list[Any]]  # environments to use again
    async_loop: Any  # of asynchronous tools and reward functions
    max_tool_calling_iterations: int
    # Rewards and advantages
    reward_funcs: list[Any]
    reward_func_names: list[str]
    reward_weights: torch.Tensor
    reward_processing_classes: list[Any]
    scale_rewards: str
    multi_objective_aggregation: str
    mask_truncated_completions: bool
    calculate_rewards: Callable[..., torch.Tensor]
    # The loss
    beta: float
    loss_type: str
    top_entropy_quantile: float
    aux_loss_enabled: bool
    router_aux_loss_coef: float
    entropy_bonus: bool
    use_adaptive_entropy: bool
    entropy_coef: float
    last_entropy: float
    loss_of: Callable[[Any, Any], torch.Tensor]  # a micro-batch's part of the loss, by the model that the loop calls
    # Logs
    metrics: dict[str, MutableMapping[str, list[float]]]
    logs: dict[str, Any]
    pending_metrics: MutableMapping[str, list[float]]
    pending_columns: MutableMapping[str, list[Any]]
    log_completions: bool
    log_multimodal: bool

    def __init__(self, trainer: trl.GRPOTrainer, ours: type[trl.GRPOTrainer]) -> None:
        self._trainer, self._ours = trainer, ours

    if not TYPE_CHECKING:  # a type checker knows the attributes above and no others

        def __getattr__(self, name: str) -> Any:
            name = _PRIVATE.get(name, name)
            if name in _ABSENT:
                return getattr(self._trainer, name, copy(_ABSENT[name][0]))
            return getattr(self._trainer, name)

    def verify(self) -> None:
        """Raise a ContractError that names the attributes that TRL's trainer lacks."""
        later = {"geometry", "generation_config", "generation_kwargs"}  # the last two are absent with vLLM
        names = {_PRIVATE.get(name, name) for name in TrainerView.__annotations__.keys() - later}
        names -= {name for name, (_, needed_for) in _ABSENT.items() if not getattr(self._trainer, needed_for, None)}
        if missing := sorted(name for name in names if not hasattr(self._trainer, name)):
            raise compat.misfit(f"GRPOTrainer has no {', '.join(missing)}")

    @property
    def group_size(self) -> int:
        return self.num_generations if self.model.training else self.num_generations_eval

    @property
    def generation_settings(self) -> dict[str, Any]:
        return dict(self.args.generation_kwargs or {})  # type: ignore[arg-type]

    @property
    def corrects_sampling(self) -> bool:
        return self.use_vllm and self.vllm_importance_sampling_correction

    @property
    def takes_images(self) -> bool:
        """A processor, not a tokenizer."""
        return isinstance(self.processing_class, ProcessorMixin)

    @property
    def num_prompts(self) -> int | None:
        """Prompts of the training set; None for a stream."""
        return len(self.train_dataset) if hasattr(self.train_dataset, "__len__") else None

    @property
    def models(self) -> list[Any]:
        return [model for model in (self.model, self.ref_model, self.teacher_model) if model is not None]

    @property
    def teacher_model(self) -> Any:
        loop: Any = self._trainer  # without a coefficient the attribute belongs to a subclass
        return None if self.args.teacher_kl_coef is None else loop.teacher_model

    @property
    def sharded(self) -> bool:
        return shards_parameters(self.accelerator)

    @property
    def output_dir(self) -> Path:
        return Path(str(self.args.output_dir))

    @property
    def policy(self) -> Any:
        """The trained model inside an engine's wrapper."""
        return self.accelerator.unwrap_model(self.model)

    def state_dict(self) -> dict[str, Any]:
        """What the Trainer's loop has summed up since its last log line, and since its start."""
        loop: Any = self._trainer
        return {
            "loss": float(loop._tr_loss),
            "total_loss": float(loop._total_loss_scalar),
            "last_logged": float(loop._globalstep_last_logged),
            "metrics": {name: [float(value) for value in values] for name, values in self.metrics["train"].items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the sums of a checkpoint, after the loop has set its own to zero."""
        loop: Any = self._trainer
        self.metrics["train"].clear()
        self.metrics["train"].update(state["metrics"])
        loop._step, loop._initial_global_step = self.state.global_step, 0
        loop._tr_loss = loop._tr_loss + state["loss"]
        loop._total_loss_scalar, loop._globalstep_last_logged = state["total_loss"], int(state["last_logged"])

    def set_reference(self, model: Any, beta: float) -> None:
        self._trainer.ref_model, self._trainer.beta = model, beta

    def set_teacher(self, model: Any) -> None:
        if model is not None:
            self._trainer.teacher_model = model  # type: ignore[attr-defined]
            self.args.teacher_kl_coef = self.args.teacher_kl_coef or 1.0

    # ---- Temporary changes of the trainer --------------------------------------------------------------------------

    def logging(self, table: dict[str, Any]) -> AbstractContextManager[None]:
        return temporarily_set(self._trainer, _logs=table)

    def attributes_for(self, args: GRPOConfig, names: Collection[str]) -> dict[str, Any]:
        """`args`, and the attributes that TRL's constructor makes of these settings."""
        attributes = {name: getattr(args, name) for name in names if hasattr(self._trainer, name)} | {"args": args}
        if "epsilon" in names:
            attributes["epsilon_low"] = args.epsilon
        if "epsilon_high" in names or ("epsilon" in names and args.epsilon_high is None):
            attributes["epsilon_high"] = args.epsilon if args.epsilon_high is None else args.epsilon_high
        if "reward_weights" in names:
            weights = args.reward_weights or [1.0] * len(self.reward_funcs)
            attributes["reward_weights"] = torch.tensor(weights, dtype=torch.float32)
        if "entropy_coef" in names:
            attributes["_entropy_bonus_enabled"] = args.use_adaptive_entropy or args.entropy_coef != 0.0
        return attributes

    def having(self, attributes: dict[str, Any]) -> AbstractContextManager[None]:
        """Inside, the trainer has other attributes, by TRL's names, and what an override logs is left out."""
        logs = deepcopy({"_metrics": self.metrics, "_logs": self.logs})
        return temporarily_set(self._trainer, **logs, **attributes)

    @contextmanager
    def assembled_for(self, args: GRPOConfig, callbacks: list[Any]) -> Iterator[tuple[Any, Any]]:
        """Inside, the trainer has other arguments, callbacks and components, and evaluates and shows nothing.

        Yields its rollouts and its planner of steps.
        """
        trainer: Any = self._trainer
        handler = CallbackHandler(callbacks, self.model, self.processing_class, self.optimizer, self.lr_scheduler)
        others = {"args": args, "callback_handler": handler, "eval_dataset": None, "log_completions": False}
        restored = {name: getattr(trainer, name) for name in _COMPONENTS}
        with temporarily_set(trainer, **others, **restored):
            trainer._assemble(None)
            trainer._rollouts.refuse_changes = restored["_rollouts"].refuse_changes
            trainer._keeper.watch.saves = False
            yield trainer._rollouts, trainer._step_planner

    def override_of(self, name: str) -> Callable[..., Any] | None:
        """The method of a subclass, or one assigned to the trainer, that replaces ours; None without one."""
        kind = type(self._trainer)
        replaced = name in vars(self._trainer) or getattr(kind, name) is not getattr(self._ours, name)
        return getattr(self._trainer, name) if replaced else None

    def overridden(self, *names: str) -> str | None:
        """The first of these methods that a user overrides, with the name of the class; None if none is overridden."""
        name = next((name for name in names if self.override_of(name) is not None), None)
        return None if name is None else f"{type(self._trainer).__name__}.{name}"

    # ---- TRL's contexts and functions, which need the trainer itself ----------------------------------------------

    def profile(self, name: str) -> AbstractContextManager[Any]:
        return compat.profiling_context(self._trainer, name)

    def generating(self) -> AbstractContextManager[Any]:
        """TRL's contexts around transformers' `generate`."""
        return compat.generating(self._trainer)

    def turn_of_trl(self, *args: Any) -> Any:
        """TRL's `_generate_single_turn`, whatever a user overrides."""
        return self._ours._generate_single_turn(self._trainer, *args)

    def call_rollout_func(self, prompts: list[Any]) -> Any:
        assert self.rollout_func is not None
        return self.rollout_func(prompts, self._trainer)

    # ---- What is written to a trainer -----------------------------------------------------------------------------

    def show_environments(self, transcripts: Sequence[Any]) -> None:
        if self.environment_factories is not None:
            trainer: Any = self._trainer
            trainer.environments = [transcript.environment for transcript in transcripts]
            trainer._batch_environments = [transcript.environment_name for transcript in transcripts]

    def use_generation(self, generation: Any) -> None:
        self._trainer.vllm_generation = generation

    def note_weights_sent(self, step: int) -> None:
        self._trainer._last_loaded_step = step
