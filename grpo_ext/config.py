"""`GRPOConfig`: TRL's configuration plus the fields that separate what a run means from how it is laid out.

Differs from TRL: batch sizes of the algorithm are global (`global_batch_size`, `rollout_batch_size`), the micro-batch
may be any size, and the accumulation is derived. First thing a user touches; read by the trainer and the tools.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, cast, get_args

import torch
import trl

from . import contract
from .algorithms.losses import LossConfig
from .batching.micro_batches import Form
from .batching.sizes import BatchGeometry, ceil_div, geometry_of
from .errors import ConfigError
from .runtime.determinism import choose_cublas_workspace
from .setting_rules import (
    asks_for_deepspeed,
    check_ahead,
    check_algorithm,
    check_bitwise,
    check_choice,
    check_rollout_device,
    check_values,
)

_LAYOUT_FIELDS = (
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "gradient_accumulation_steps",
    "generation_batch_size",
    "steps_per_generation",
    "auto_find_batch_size",
)
# settings that earlier versions had, and what to write now
REMOVED_SETTINGS = {
    "packed_forward": "use forward='padded' in place of False, and leave True out",
    "score_completions_only": "leave it out: only completion tokens go through the language-model head",
    "balance_by_cost": "leave it out: groups are always assigned to processes by their cost",
    "bitwise_fraction_bits": "leave it out: gradient sums always have 48 fraction bits",
    "recompute_granularity": "leave it out: gradient_checkpointing=True runs whole layers again, False runs none",
    **dict.fromkeys(
        [f"fp16_{name}" for name in ("loss_scale", "initial_scale", "scale_window", "hysteresis", "min_scale")]
        + ["fp16_fixed_scale"],
        "leave it out: the loss scale has DeepSpeed's defaults; under DeepSpeed its file's fp16 section sets it",
    ),
}


def _setting(default: Any, help: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": help, **metadata})


def forms_of(forward: str) -> tuple[Form, ...]:
    """The forms that `forward` allows, the best first; padded batches are always the last resort."""
    if forward == "auto":
        return ("packed", "prefix")
    return () if forward == "padded" else (cast(Form, forward),)


@dataclass
class GRPOConfig(trl.GRPOConfig):
    """Configuration of `grpo_ext.GRPOTrainer`: every field of `trl.GRPOConfig`, with the same defaults, and these.

    The help of a field (`metadata["help"]`, and the `--help` of recipes/grpo.py) says what it is, its unit and default.
    Sizes are over all processes unless they say per device. Of TRL's fields, `per_device_train_batch_size` may be any
    positive integer, and `gradient_accumulation_steps` is derived where `global_batch_size` is given.

    Raises:
        ConfigError: sizes that break a rule, fields that contradict, unknown names; before anything is loaded.
    """

    # What the run means: changes what is learned, and is compared on resume.
    global_batch_size: int | None = _setting(
        None,
        "Completions per optimizer step, over all processes. Default: per_device_train_batch_size * "
        "gradient_accumulation_steps * processes, as in TRL. A size that is no multiple of num_generations cuts "
        "groups (their advantages stay those of the whole group) and needs a rollout_batch_size.",
    )
    rollout_batch_size: int | None = _setting(
        None,
        "Completions per generation phase, over all processes; a multiple of global_batch_size and of "
        "num_generations. Default: one optimizer step (or TRL's generation_batch_size / steps_per_generation).",
    )
    advantage_estimator: str | None = _setting(
        None,
        "How rewards become advantages: 'group_standardized' (GRPO), 'group_centered' (Dr. GRPO), "
        "'leave_one_out' (RLOO), 'reinforce_plus_plus_baseline', a registered name, or path/to/file.py:function. "
        "Default: what scale_rewards and multi_objective_aggregation say, as in TRL.",
    )
    loss_aggregation: str | None = _setting(
        None,
        "How the losses of tokens add up: 'token_mean', 'sequence_mean', 'sequence_sum', "
        "'sequence_sum_norm' (over max_completion_length) or 'prompt_mean' (each prompt alike, by the tokens that "
        "its group has in the step), or verl's names of the first four. Default: what loss_type says, as in TRL.",
    )
    dynamic_sampling: bool = _setting(
        False,
        "Replace groups whose rewards are all alike by groups of further prompts (DAPO), until the rollout "
        "batch is full or dynamic_sampling_max_rounds is reached. The batch keeps its size.",
    )
    dynamic_sampling_max_rounds: int = _setting(
        10, "With dynamic_sampling: how often further prompts are sampled for one rollout batch."
    )
    rollout_chunk_size: int | None = _setting(
        None,
        "Completions per generate call on one device, and per call of a reward function; a multiple of "
        "num_generations. The same chunks are sampled and scored for every number of processes, so a smaller chunk "
        "means more calls. Default: 64, rounded down to whole groups (at least one).",
    )

    rollout_lag: int = _setting(
        0,
        "Rollout batches that sampling runs ahead of training, on a thread of its own: rollout batch r is sampled with "
        "the weights that are there when training of rollout batch r - rollout_lag begins. What is trained does not "
        "depend on what takes how long. 0: sample, then train, then sample.",
    )

    float32_adapters: bool = _setting(
        True,
        "Train the adapter of a model in 4 or 8 bits in float32. False: in bfloat16, as TRL does, which takes 8 bytes "
        "less per trained parameter, rounds small updates away, and rounds them otherwise for another split.",
    )

    # How it is laid out: changes nothing that is learned.
    rollout_threads: int | None = _setting(
        None,
        "With rollout_lag on a CPU: threads that sampling computes with; training has the others of torch's "
        "(OMP_NUM_THREADS), at least one. Default: half. In bitwise mode it belongs to what a run means, training has "
        "bitwise_threads, and so has sampling by default.",
    )
    rollout_device: str | None = _setting(
        None, "With rollout_lag: the device that samples, for example 'cuda:1'. Default: the one that trains."
    )
    micro_batch_tokens: int | None = _setting(
        None,
        "The most tokens one forward holds on one device, prompts included (a prompt that is shared in a "
        "pack counts once). per_device_train_batch_size still limits the completions. Default: no limit.",
    )

    # What is not computed: each can be turned off, none changes the update.
    forward: str = _setting(
        "auto",
        "How completions run through the model, for policy, old and reference log-probabilities. 'packed': the prompt "
        "of a group once and its completions after it, without padding. 'prefix': prompts once with a cache, and their "
        "completions, padded, on it; for layers of other kinds (linear attention, convolutions) too. 'padded': every "
        "completion with its prompt. A model that cannot run what is set pads, and says so. 'auto' is the first that "
        "the model can run.",
        choices=["auto", *get_args(Form)],
    )
    skip_zero_contribution: bool = _setting(
        True,
        "Do not run completions that add exactly nothing to the update (advantage zero, no KL, entropy or "
        "auxiliary term). Denominators are unchanged; the logged entropy and clip ratios are those of the "
        "completions that are run (NaN where none is).",
    )
    compact_rollouts: bool = _setting(
        True,
        "While sampling, run the prompt once per group, let finished completions leave the batch, and grow "
        "the cache in place. Models that cannot (with caches of their own, sharded ones) sample as transformers does.",
    )

    # The same bits.
    bitwise_invariant: bool = _setting(
        False,
        "Give every parameter, optimizer tensor and logged metric the same bits for every micro-batch size "
        "and number of processes (data parallel, one machine type): forwards run in canonical units, gradients are "
        "summed as 64-bit integers (steps of 3.6e-15, sums up to 16384). Takes 8 more bytes per trained parameter.",
    )
    canonical_unit_size: int | None = _setting(
        None,
        "With bitwise_invariant: completions of one group per forward, whatever "
        "per_device_train_batch_size is; it decides the memory of a forward and belongs to what a run means. "
        "Default: num_generations.",
    )
    bitwise_threads: int = _setting(
        1,
        "With bitwise_invariant: threads each process computes with on the CPU; matrix products change "
        "bits with it, and launchers set it differently for one and several processes.",
    )

    # Resume.
    allow_changed_on_resume: list[str] | None = _setting(  # noqa: RUF009  (a dataclass field)
        None,
        "Names of settings (or data, model, rewards) that may differ from those of the checkpoint although "
        "they change what the run means, for example ['num_train_epochs'] to train longer. How a run is laid out "
        "(processes, micro-batches) may always differ.",
    )

    # Reward functions that fail.
    reward_workers: int = _setting(
        0,
        "Processes, for each training process, that call synchronous reward functions: fresh interpreters of one "
        "thread, without an accelerator. Chunks run there concurrently, and a call that takes longer than "
        "reward_timeout is killed. Rewards and logs do not depend on the number. 0: functions run in the training "
        "process.",
    )
    reward_timeout: float | None = _setting(
        None,
        "Seconds one call of a reward function may take; a call that takes longer has failed. Without reward_workers "
        "it runs in a thread of its own, which cannot be stopped. Default: no limit.",
    )
    reward_retries: int = _setting(
        0, "How often a call of a reward function that raised or took too long is made again."
    )
    reward_on_failure: str = _setting(
        "error",
        "What a reward function that still fails means: 'error' ends the run, 'none' gives the completions "
        "of that call None (does not apply).",
        choices=["error", "none"],
    )

    # Evaluation.
    eval_pass_threshold: float | None = _setting(
        None,
        "The least reward that counts as passed in the pass@k of an evaluation. Default: 1, where every reward of the "
        "evaluation is 0 or 1; for others no pass@k is logged.",
    )
    eval_pass_reward: str | None = _setting(
        None,
        "The reward function, by its name in the logs, whose rewards pass@k and mean@k are about. Default: the "
        "weighted sum of all, as in eval_reward.",
    )

    # Tools and environments.
    tool_timeout: float | None = _setting(
        None,
        "Seconds one call of a tool, or an environment's `reset`, may take. The model is told of a tool that takes "
        "longer as of any failure: an asynchronous one is cancelled, a synchronous one left behind in its thread, and "
        "its environment replaced. Default: no limit. (TRL's max_tool_calling_iterations limits the turns.)",
    )

    # Refusals.
    allow_split_dependent: bool = _setting(
        False,
        "Warn instead of refusing to train when the model or the settings make the update depend on the "
        "batch split (dropout, BatchNorm, NEFTune).",
    )

    def __post_init__(self) -> None:
        contract.verify()
        self._check_settings()
        launched = int(os.environ.get("WORLD_SIZE", "1"))
        if not torch.accelerator.is_available():
            # bfloat16, TRL's default, is accepted on the CPU only if that is asked for, and Accelerate joins several
            # CPU processes into one run only then; else each would train alone as process 0. Under DeepSpeed it joins
            # them over a backend that is named, and leaves DeepSpeed out where the CPU is asked for
            if asks_for_deepspeed(vars(self)):
                self.ddp_backend = self.ddp_backend or "gloo"
            else:
                self.use_cpu = True
        given = {name: getattr(self, name) for name in _LAYOUT_FIELDS}
        if self.rollout_device is not None:
            check_rollout_device(self.rollout_device, self.device, self.world_size)
        if not isinstance(self.num_generations, int) or self.num_generations < 2:
            self.resolve_geometry(num_processes=1)  # raises, and names the remedy
        # TRL checks that its sizes divide each other; ours need not. It is shown sizes that pass, and the user's come
        # back afterwards.
        neutral: int = self.num_generations  # type: ignore[assignment]
        self.per_device_train_batch_size = neutral
        self.per_device_eval_batch_size = neutral if self.num_generations_eval is None else self.num_generations_eval
        self.gradient_accumulation_steps = 1
        self.generation_batch_size = self.steps_per_generation = None
        self.auto_find_batch_size = False  # TRL's and Accelerate's would start the run again; here a step is repeated
        try:
            super().__post_init__()
        finally:
            for name, value in given.items():
                setattr(self, name, value)
        options: Any = self.accelerator_config
        if "num_steps" in (options.gradient_accumulation_kwargs or {}):
            raise ConfigError(
                "accelerator_config sets num_steps in gradient_accumulation_kwargs; leave it out, and set "
                "global_batch_size, from which the accumulation is derived, or gradient_accumulation_steps."
            )
        if launched > self.world_size:
            raise ConfigError(
                f"the launcher started {launched} processes (WORLD_SIZE), but Accelerate joins {self.world_size}: each "
                "would train alone. On the CPU set use_cpu=True (or ACCELERATE_USE_CPU=true)."
            )
        self.geometry: BatchGeometry = self.resolve_geometry(num_processes=self.world_size)

    def _check_settings(self) -> None:
        """Refuse what setting_rules refuses."""
        for spec in dataclasses.fields(self):
            if spec.name in GRPOConfig.__annotations__ and "choices" in spec.metadata:
                check_choice(spec.name, getattr(self, spec.name), spec.metadata["choices"])
        settings = vars(self)
        check_values(settings)
        check_algorithm(settings)
        check_ahead(settings)
        if self.bitwise_invariant:
            check_bitwise(settings)
            choose_cublas_workspace()
            self.tf32 = False

    @property
    def forms(self) -> tuple[Form, ...]:
        """The forms of the forward that may be run: see `forms_of`."""
        return forms_of(self.forward)

    @property
    def unit_rows(self) -> int | None:
        """Completions per canonical unit, or None outside bitwise mode."""
        if not self.bitwise_invariant:
            return None
        return self.canonical_unit_size or self.num_generations

    @property
    def pinned_threads(self) -> int | None:
        """CPU threads that a run computes with in bitwise mode; None outside of it."""
        return self.bitwise_threads if self.bitwise_invariant else None

    def resolve_geometry(self, num_processes: int) -> BatchGeometry:
        """The batch geometry on `num_processes` processes.

        Raises:
            ConfigError: the sizes break a rule.
        """
        return geometry_of(vars(self), num_processes)

    def loss_config(self) -> LossConfig:
        """The settings of the policy loss, under the names of algorithms.losses."""
        same = {spec.name for spec in dataclasses.fields(LossConfig)} & vars(self).keys()
        values: dict[str, Any] = {name: getattr(self, name) for name in same}
        return LossConfig(
            **values
            | {
                "epsilon_low": self.epsilon,
                "epsilon_high": self.epsilon if self.epsilon_high is None else self.epsilon_high,
                "max_completion_length": self.max_completion_length or 1,
                "correct_sampling": self.use_vllm and self.vllm_importance_sampling_correction,
                "aggregation": self.loss_aggregation,
            }
        )

    @classmethod
    def for_model(cls, args: trl.GRPOConfig | None, model: Any) -> GRPOConfig:
        """The configuration of a trainer: the given one, TRL's converted, or a default named after the model."""
        if args is None:
            place = getattr(getattr(model, "config", None), "_name_or_path", "")
            name = model if isinstance(model, str) else str(place)
            return cls(f"{name.split('/')[-1]}-GRPO")
        return args if isinstance(args, GRPOConfig) else cls.from_trl(args)

    @classmethod
    def from_trl(cls, args: trl.GRPOConfig) -> GRPOConfig:
        """This class's configuration with the settings of an existing `trl.GRPOConfig`, which is left as it is."""
        values = {spec.name: getattr(args, spec.name) for spec in dataclasses.fields(trl.GRPOConfig) if spec.init}
        if values["steps_per_generation"] is not None:
            values["generation_batch_size"] = None  # TRL computes one from the other and refuses to be given both
        config = cls(**values)
        for name, value in vars(args).items():  # what a subclass of TRL's configuration adds
            if not hasattr(config, name):
                setattr(config, name, value)
        return config

    def for_loop(self) -> GRPOConfig:
        """The copy that the Trainer's loop reads: one batch per optimizer step, sizes filled in."""
        self.geometry = self.resolve_geometry(self.world_size)  # sizes may have been changed after construction
        args = copy.copy(self)  # shallow: keeps what __post_init__ computed (devices, plugins)
        args.global_batch_size = self.geometry.global_batch_size
        args.rollout_batch_size = self.geometry.rollout_batch_size
        args.generation_batch_size = self.geometry.rollout_batch_size
        args.steps_per_generation = self.geometry.steps_per_rollout
        if self.use_vllm:  # while TRL builds the engine this number sizes its queue: the most rows of a process
            rows = ceil_div(self.geometry.rollout_batch_size, self.geometry.num_processes)
            args.steps_per_generation = ceil_div(rows, self.per_device_train_batch_size)
        args.gradient_accumulation_steps = 1
        args.auto_find_batch_size = False
        if getattr(args, "ddp_static_graph", None):
            args.ddp_static_graph = False  # it is about DDP's own sums of gradients, which the step does without
        # otherwise every micro-batch of a loader's last batch synchronises, and unequal counts hang
        accelerator: Any = copy.copy(self.accelerator_config)
        given = accelerator.gradient_accumulation_kwargs or {}
        accelerator.gradient_accumulation_kwargs = {**given, "sync_with_dataloader": False}
        args.accelerator_config = accelerator
        return args


def _refusing_removed(init: Callable[..., None]) -> Callable[..., None]:
    """A dataclass's `__init__`, which says of a removed setting what to write instead."""

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs.keys() & REMOVED_SETTINGS.keys():
            raise ConfigError(f"GRPOConfig no longer has the field {name!r}; {REMOVED_SETTINGS[name]}.")
        init(self, *args, **kwargs)

    return checked


GRPOConfig.__init__ = _refusing_removed(GRPOConfig.__init__)  # type: ignore[method-assign]

# help of fields that mean something else here than TRL and transformers say
_HELP = {
    "num_generations": "Completions per prompt, 2 or more; rollout_batch_size is a multiple of it.",
    "per_device_train_batch_size": "The most completions of one forward on one device, any number; changes nothing "
    "that is learned. Without global_batch_size it also makes the step, as in TRL.",
    "gradient_accumulation_steps": "Only without global_batch_size, which it then makes as in TRL; otherwise derived.",
    "generation_batch_size": "TRL's name for rollout_batch_size.",
    "steps_per_generation": "Micro-batches per generation phase, as in TRL; better, rollout_batch_size.",
    "auto_find_batch_size": "Accepted and without effect: a step that runs out of memory always runs again with "
    "smaller micro-batches.",
    "resume_from_checkpoint": "For scripts, as in transformers; recipes/grpo.py hands it to train(): a checkpoint, "
    "'latest' (or true) for the newest whole one of output_dir, or 'auto' for that or, where there is none, a new run.",
}
for _name, _text in _HELP.items():
    _spec = copy.copy(GRPOConfig.__dataclass_fields__[_name])  # a copy, because TRL's class has the same object
    _spec.metadata = MappingProxyType({**_spec.metadata, "help": _text})
    GRPOConfig.__dataclass_fields__[_name] = _spec
