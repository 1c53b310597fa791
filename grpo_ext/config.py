"""`GRPOConfig`: TRL's configuration plus the fields that separate what a run means from how it is laid out.

Differs from TRL: batch sizes of the algorithm are global (`global_batch_size`, `rollout_batch_size`), the micro-batch
may be any size, and the accumulation is derived. First thing a user touches; read by the trainer and the tools.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import TIMEOUT_MAX
from types import MappingProxyType
from typing import Any, cast, get_args, get_type_hints

import torch
import trl

from . import compat
from .algorithms.advantages import check_estimator, probe_estimator
from .algorithms.losses import LOSS_TYPES, LossConfig
from .batching.micro_batches import Form
from .batching.sizes import BatchGeometry, ceil_div, check_lag, geometry_of, require_whole
from .errors import ConfigError, did_you_mean
from .precision.scale_rule import INITIAL_SCALE, ScaleRule
from .runtime.quiet import quiet
from .runtime.recompute import KEEP_PRODUCTS, check_recompute

_LAYOUT_FIELDS = (
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "gradient_accumulation_steps",
    "generation_batch_size",
    "steps_per_generation",
    "auto_find_batch_size",
)
_LOSS_SCALE = ("fp16_initial_scale", "fp16_scale_window", "fp16_hysteresis", "fp16_min_scale", "fp16_fixed_scale")


def _setting(default: Any, help: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": help, **metadata})


# settings of earlier versions, and what to write now
REMOVED_SETTINGS = {
    "packed_forward": "use forward='padded' in place of False, and leave True out",
    "score_completions_only": "leave it out: only completion tokens go through the language-model head",
}


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

    recompute_granularity: str = _setting(
        "full",
        "With gradient_checkpointing: what the backward pass computes again. 'full': whole layers, as in transformers. "
        "'selective': all but matrix products and attention, which takes more memory and less time.",
        choices=["full", "selective"],
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
    balance_by_cost: bool = _setting(
        True, "Assign groups to processes by their cost (prompt once, completions, attention) instead of by count."
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
        "summed as 64-bit integers. Takes 8 more bytes per trained parameter.",
    )
    canonical_unit_size: int | None = _setting(
        None,
        "With bitwise_invariant: completions of one group per forward, whatever "
        "per_device_train_batch_size is; it decides the memory of a forward and belongs to what a run means. "
        "Default: num_generations.",
    )
    bitwise_fraction_bits: int = _setting(
        48,
        "With bitwise_invariant: bits behind the binary point of the gradient sums. 48: steps of 3.6e-15, "
        "sums up to 16384. Gradients out of range are an error.",
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

    # Half precision (fp16=True).
    fp16_initial_scale: float | None = _setting(None, "With fp16: the loss scale at the start. Default: 65536.")
    fp16_scale_window: int | None = _setting(
        None, "With fp16: steps without an overflow before the loss scale doubles. Default: 1000."
    )
    fp16_hysteresis: int | None = _setting(
        None, "With fp16: overflows before the loss scale halves (each skips its step). Default: 2."
    )
    fp16_min_scale: float | None = _setting(
        None,
        "With fp16: the loss scale never falls below; an overflow there ends the run with an error. Default: 1.",
    )
    fp16_fixed_scale: float | None = _setting(
        None,
        "With fp16: a loss scale that stays as it is; fp16_hysteresis overflows in a row end the run. "
        "Default: a dynamic scale.",
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
        compat.verify()
        self._refuse_text()
        self._check_names()
        launched = int(os.environ.get("WORLD_SIZE", "1"))
        if not torch.accelerator.is_available():
            # bfloat16, TRL's default, is accepted on the CPU only if that is asked for, and Accelerate joins several
            # CPU processes into one run only then; else each would train alone as process 0. Under DeepSpeed it joins
            # them over a backend that is named, and leaves DeepSpeed out where the CPU is asked for
            if self._asks_for_deepspeed():
                self.ddp_backend = self.ddp_backend or "gloo"
            else:
                self.use_cpu = True
        given = {name: getattr(self, name) for name in _LAYOUT_FIELDS}
        self._check_algorithm()
        _check_tokens(self.micro_batch_tokens)
        self._check_loss_scale()
        self._check_ahead()
        if self.bitwise_invariant:
            self._check_bitwise()
        require_whole("per_device_eval_batch_size", self.per_device_eval_batch_size, "a whole number, 1 or more")
        if self.num_generations_eval is not None:
            require_whole("num_generations_eval", self.num_generations_eval, "a whole number, 1 or more")
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
            with quiet():
                super().__post_init__()
        finally:
            for name, value in given.items():
                setattr(self, name, value)
        check_recompute(vars(self))
        self._read_accumulation()
        if launched > self.world_size:
            raise ConfigError(
                f"the launcher started {launched} processes (WORLD_SIZE), but Accelerate joins {self.world_size}: each "
                "would train alone. On the CPU set use_cpu=True (or ACCELERATE_USE_CPU=true)."
            )
        self.geometry: BatchGeometry = self.resolve_geometry(num_processes=self.world_size)

    def _read_accumulation(self) -> None:
        """Take the accumulation steps that are given for Accelerate as `gradient_accumulation_steps`, as in TRL.

        Raises:
            ConfigError: both are given.
        """
        accelerator: Any = copy.copy(self.accelerator_config)
        given = dict(accelerator.gradient_accumulation_kwargs or {})
        if "num_steps" not in given:
            return
        steps = given.pop("num_steps")
        if self.gradient_accumulation_steps not in (1, steps):
            raise ConfigError(
                f"gradient_accumulation_steps={self.gradient_accumulation_steps}, and num_steps={steps} in "
                "gradient_accumulation_kwargs of accelerator_config; leave the latter out."
            )
        self.gradient_accumulation_steps = steps
        accelerator.gradient_accumulation_kwargs = given
        self.accelerator_config = accelerator

    def _asks_for_fsdp(self) -> bool:
        """Whether the launcher or the settings turn FSDP on."""
        return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true" or bool(self.fsdp)

    def _asks_for_deepspeed(self) -> bool:
        """Whether the launcher or the settings turn DeepSpeed on (which Accelerate leaves out where use_cpu is set)."""
        return os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true" or bool(self.deepspeed)

    def _refuse_text(self) -> None:
        """Refuse text where a field takes numbers or truth values; transformers takes it, and fails later.

        Raises:
            ConfigError: names the field.
        """
        for name, kinds in _untexted().items():
            if isinstance(value := getattr(self, name), str):
                wanted = "True or False" if bool in kinds else f"a number ({name}={value})"
                yaml = "; YAML reads 1e-4 as text, and 1.0e-4 as a number" if float in kinds and "e" in value else ""
                raise ConfigError(f"{name}={value!r} is text; the field takes {wanted}, without quotes{yaml}.")

    def _check_names(self) -> None:
        known = {
            "loss_type": LOSS_TYPES,
            "importance_sampling_level": ("token", "sequence"),
            "scale_rewards": ("group", "batch", "none", True, False),
            "reward_on_failure": ("error", "none"),
            "forward": ("auto", *get_args(Form)),
            "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
        }
        for name, values in known.items():
            if getattr(self, name) not in values:
                names = ", ".join(repr(v) for v in values if isinstance(v, str))
                raise ConfigError(f"{name}={getattr(self, name)!r} is unknown; use one of {names}.")
        for name in ("reward_timeout", "tool_timeout"):
            seconds = getattr(self, name)
            if seconds is None:
                continue
            if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds <= TIMEOUT_MAX:
                raise ConfigError(f"{name}={seconds!r}: use seconds, more than 0, or None for no limit.")
        least = self.eval_pass_threshold
        if least is not None and (isinstance(least, bool) or not isinstance(least, (int, float)) or least != least):
            raise ConfigError(
                f"eval_pass_threshold={least!r}: use a number, the least reward that has passed, or None."
            )
        require_whole("reward_retries", self.reward_retries, "0 or more", least=0)
        require_whole("reward_workers", self.reward_workers, "a whole number of processes, 0 or more", least=0)
        optim = str(getattr(self.optim, "value", self.optim))
        if "lomo" in optim or optim.endswith("layerwise"):
            raise ConfigError(
                f"optim={optim} updates the model during the backward pass, before the step's gradient is complete;"
                " use another optimizer, for example adamw_torch."
            )

    def _check_algorithm(self) -> None:
        """Refuse unknown estimators and aggregations, and settings that say two things.

        Raises:
            ConfigError: names the settings.
        """
        if self.loss_config().weighting == "sequence_sum_norm" and not self.max_completion_length:
            setting = "loss_type" if self.loss_aggregation is None else "loss_aggregation"
            raise ConfigError(
                f"{setting}={getattr(self, setting)!r} divides the loss by max_completion_length, which is "
                f"{self.max_completion_length}; set it to the tokens a completion may have, or add up another way, for "
                "example loss_aggregation='token_mean'."
            )
        name = self.advantage_estimator
        if name is not None:
            check_estimator(name)
            if isinstance(self.num_generations, int) and self.num_generations > 1:
                probe_estimator(name, self.num_generations)
            if self.scale_rewards not in ("group", True) or self.multi_objective_aggregation != "sum_then_normalize":
                raise ConfigError(
                    f"advantage_estimator={name!r} and scale_rewards={self.scale_rewards!r}, "
                    f"multi_objective_aggregation={self.multi_objective_aggregation!r} both say how rewards become "
                    "advantages; leave the latter two out."
                )
        require_whole("dynamic_sampling_max_rounds", self.dynamic_sampling_max_rounds, "a whole number, 1 or more")
        together = self.use_vllm and (self.vllm_mode != "colocate" or self.vllm_tensor_parallel_size > 1)
        if self.dynamic_sampling and together:
            raise ConfigError(
                "dynamic_sampling=True samples as many prompts as are missing, which several processes cannot share "
                "evenly, as a vLLM server and tensor parallel engines need; use vllm_mode='colocate' with "
                "vllm_tensor_parallel_size=1."
            )

    @property
    def loss_scale(self) -> tuple[float, ScaleRule, set[str]]:
        """The loss scale at the start, how it moves, and which of the settings were given."""
        usual = ScaleRule()
        rule = ScaleRule(
            usual.window if self.fp16_scale_window is None else self.fp16_scale_window,
            usual.hysteresis if self.fp16_hysteresis is None else self.fp16_hysteresis,
            usual.minimum if self.fp16_min_scale is None else self.fp16_min_scale,
            dynamic=self.fp16_fixed_scale is None,
        )
        chosen = self.fp16_initial_scale if self.fp16_fixed_scale is None else self.fp16_fixed_scale
        given = {name for name in _LOSS_SCALE if getattr(self, name) is not None}
        return INITIAL_SCALE if chosen is None else float(chosen), rule, given

    def _check_loss_scale(self) -> None:
        """Refuse loss scales without fp16, out of range, or both fixed and dynamic.

        Raises:
            ConfigError: names the settings.
        """
        scale, rule, given = self.loss_scale
        if given and not self.fp16:
            raise ConfigError(f"{', '.join(sorted(given))}: only fp16 training has a loss scale; set fp16=True.")
        if not rule.dynamic and (moving := sorted(given - {"fp16_fixed_scale", "fp16_hysteresis"})):
            raise ConfigError(
                f"fp16_fixed_scale={scale:g} stays as it is, and {', '.join(moving)} say how a dynamic scale moves; "
                "remove one or the other."
            )
        for name, value in (("fp16_scale_window", rule.window), ("fp16_hysteresis", rule.hysteresis)):
            require_whole(name, value, "a whole number of steps, 1 or more")
        if not rule.minimum > 0 or not scale >= (rule.minimum if rule.dynamic else 0) or not 0 < scale <= 2.0**32:
            raise ConfigError(
                f"a loss scale of {scale:g} with a minimum of {rule.minimum:g}: use a minimum above 0 and a scale from "
                "there to 2**32."
            )

    def _check_bitwise(self) -> None:
        """Refuse what the same bits cannot be promised for.

        Raises:
            ConfigError: names all of it.
        """
        refused = {
            "FSDP (gradients are reduced as floating point numbers)": self._asks_for_fsdp(),
            "DeepSpeed (gradients are reduced as floating point numbers)": self._asks_for_deepspeed(),
            "use_vllm (its batches, and with them its bits, follow from timing)": self.use_vllm,
            "use_transformers_continuous_batching (batches follow from timing)": (
                self.use_transformers_continuous_batching
            ),
            "micro_batch_tokens (units are canonical; canonical_unit_size sets their size)": (
                self.micro_batch_tokens is not None
            ),
            "allow_split_dependent": self.allow_split_dependent,
            "torch_compile (kernels are chosen by timing)": self.torch_compile,
            "use_liger_kernel": self.use_liger_kernel,
            "tf32": bool(self.tf32),
            "fp16 (its loss scale moves with overflows)": bool(self.fp16),
        }
        found = [name for name, is_set in refused.items() if is_set]
        if found:
            raise ConfigError(
                f"bitwise_invariant=True cannot be kept with {'; '.join(found)}. Turn one of the two off."
            )
        size, group = self.canonical_unit_size, self.num_generations
        if size is not None and (not isinstance(size, int) or not 1 <= size <= group):  # type: ignore[operator]
            raise ConfigError(
                f"canonical_unit_size={size!r}: a unit holds completions of one group; use 1 to {group} "
                "(num_generations)."
            )
        bits = self.bitwise_fraction_bits
        require_whole("bitwise_fraction_bits", bits, "20 to 60 (48: sums up to 16384)", least=20, most=60)
        require_whole("bitwise_threads", self.bitwise_threads, "1 or more")
        if self.tf32 is None:
            self.tf32 = False

    def _check_ahead(self) -> None:
        """Refuse what rollouts cannot be sampled ahead with.

        Raises:
            ConfigError: names all of it.
        """
        check_lag(self.rollout_lag, self._asks_for_fsdp() or self._asks_for_deepspeed(), self.use_vllm)
        if self.rollout_threads is not None:
            require_whole("rollout_threads", self.rollout_threads, "a whole number, 1 or more")
        alone = [name for name in ("rollout_threads", "rollout_device") if getattr(self, name) is not None]
        if not self.rollout_lag:
            if alone:
                raise ConfigError(
                    f"{', '.join(alone)} without rollout_lag: nothing is sampled ahead; set rollout_lag, or leave it "
                    "out."
                )
            return
        refused = {
            "vllm_mode='colocate' (the engine shares the device with training; use a server)": (
                self.use_vllm and self.vllm_mode != "server"
            ),
            "torch_compile (a copy would be compiled anew)": self.torch_compile,
            "ignore_data_skip=True (a resumed epoch begins anew, and what was sampled ahead is for where it was)": (
                self.ignore_data_skip
            ),
            "cast_lm_head_to_fp32=True (TRL's head runs the weights that are trained)": self.cast_lm_head_to_fp32,
            "use_transformers_continuous_batching (it samples with the weights that are trained)": (
                self.use_transformers_continuous_batching
            ),
        }
        if found := [name for name, is_set in refused.items() if is_set]:
            raise ConfigError(
                f"rollout_lag={self.rollout_lag} does not go with {'; '.join(found)}. Change that, or use "
                "rollout_lag=0."
            )
        if self.rollout_device is not None:
            try:
                torch.device(self.rollout_device)
            except RuntimeError as error:
                raise ConfigError(f"rollout_device={self.rollout_device!r} is no device of torch: {error}") from None
            kind, index = torch.device(self.rollout_device).type, torch.device(self.rollout_device).index
            said = (
                f"rollout_device={self.rollout_device!r} and training on {self.device} by {self.world_size} process(es)"
            )
            if kind != self.device.type:
                raise ConfigError(f"{said}: use a device of the same kind, or leave it out.")
            if index is not None and (kind == "cpu" or self.world_size > 1):
                shared = "there is one CPU" if kind == "cpu" else "all processes would share it"
                raise ConfigError(f"{said}: {shared}; use {kind!r}, or leave it out.")

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
        return LossConfig(
            loss_type=self.loss_type,
            importance_sampling_level=self.importance_sampling_level,
            epsilon_low=self.epsilon,
            epsilon_high=self.epsilon if self.epsilon_high is None else self.epsilon_high,
            delta=self.delta,
            beta=self.beta,
            use_bias_correction_kl=self.use_bias_correction_kl,
            sapo_temperature_pos=self.sapo_temperature_pos,
            sapo_temperature_neg=self.sapo_temperature_neg,
            vespo_k_pos=self.vespo_k_pos,
            vespo_lambda_pos=self.vespo_lambda_pos,
            vespo_k_neg=self.vespo_k_neg,
            vespo_lambda_neg=self.vespo_lambda_neg,
            off_policy_mask_threshold=self.off_policy_mask_threshold,
            max_completion_length=self.max_completion_length or 1,
            correct_sampling=self.use_vllm and self.vllm_importance_sampling_correction,
            aggregation=self.loss_aggregation,
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
        if self.recompute_granularity == "selective":
            kwargs: Any = self.gradient_checkpointing_kwargs or {}
            compat.set_checkpointing_kwargs(args, {**kwargs, "use_reentrant": False, "context_fn": KEEP_PRODUCTS})
        # otherwise every micro-batch of a loader's last batch synchronises, and unequal counts hang
        accelerator: Any = copy.copy(self.accelerator_config)
        given = accelerator.gradient_accumulation_kwargs or {}
        accelerator.gradient_accumulation_kwargs = {**given, "sync_with_dataloader": False}
        args.accelerator_config = accelerator
        return args


@functools.cache
def _untexted() -> dict[str, set[Any]]:
    """The types of every field that takes numbers and truth values alone."""
    kinds = {name: set(get_args(hint)) or {hint} for name, hint in get_type_hints(GRPOConfig).items()}
    return {name: kind for name, kind in kinds.items() if kind <= {int, float, bool, type(None)}}


def _naming_fields(init: Callable[..., None]) -> Callable[..., None]:
    """A dataclass's `__init__`, which says of an unknown field which one may be meant."""
    known = inspect.signature(init).parameters

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs.keys() - known.keys():
            if name in REMOVED_SETTINGS:
                raise ConfigError(f"GRPOConfig no longer has the field {name!r}; {REMOVED_SETTINGS[name]}.")
            hint = did_you_mean(name, known, "`help(GRPOConfig)` and recipes/grpo.py --help list the fields.")
            raise ConfigError(f"GRPOConfig has no field {name!r}; {hint}")
        init(self, *args, **kwargs)

    return checked


GRPOConfig.__init__ = _naming_fields(GRPOConfig.__init__)  # type: ignore[method-assign]

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


def _check_tokens(micro_batch_tokens: int | None) -> None:
    if micro_batch_tokens is not None and (not isinstance(micro_batch_tokens, int) or micro_batch_tokens < 2):
        raise ConfigError(
            f"micro_batch_tokens={micro_batch_tokens!r} is no token budget; it must be a whole number that holds at "
            "least the longest prompt and one token, or None."
        )
