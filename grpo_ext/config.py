"""`GRPOConfig`: TRL's configuration, with fields that separate the algorithm of a run from its hardware layout.

Differs from TRL: batch sizes of the algorithm are global (`global_batch_size`, `rollout_batch_size`), the micro-batch
may be any size, and the accumulation is derived. Users set it; the trainer and the command line read it.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from dataclasses import dataclass
from typing import Any, NamedTuple, cast, get_args

import numpy as np
import torch
import trl

from . import compat
from .batching.micro_batches import Form
from .batching.sizes import BatchGeometry, geometry_of, group_size
from .errors import ConfigError
from .runtime.attributes import temporarily_set
from .runtime.determinism import CUBLAS, CUBLAS_VALUES
from .settings import setting
from .value_checks import (
    asks_for,
    check_ahead,
    check_algorithm,
    check_best_metric,
    check_bitwise,
    check_kind,
    check_values,
    refuse_newer,
    refusing_unknown,
)


class Replay(NamedTuple):
    """What is recorded while sampling and replayed in every later forward."""

    masks: bool = False  # the tokens that each token was sampled from (`sampling_mask="replay"`)
    experts: bool = False  # the experts of each token (`routing_replay`)

    def __bool__(self) -> bool:
        return any(self)

    def __str__(self) -> str:
        settings = ("sampling_mask='replay'", "routing_replay=True")
        return " and ".join(setting for setting, replays in zip(settings, self, strict=True) if replays)

    def refuse_other_tokens(self, problem: str) -> None:
        """Raise a ConfigError for a forward of tokens without a record; `problem`: a clause about these tokens."""
        if self:
            raise ConfigError(
                f"{self}: {problem}, and there is no record of these; pass on the same tensors, or turn replay off."
            )


NO_REPLAY = Replay()


def forms_of(forward: str) -> tuple[Form, ...]:
    """The forms that `forward` allows, the best first; padded batches are always the last resort."""
    if forward == "auto":
        return ("packed", "prefix")
    return () if forward == "padded" else (cast(Form, forward),)


@dataclass
class GRPOConfig(trl.GRPOConfig):
    """Configuration of `grpo_ext.GRPOTrainer`: every field of `trl.GRPOConfig`, and these.

    Defaults are TRL's, but for `num_completions_to_print`. The help of a field (`metadata["help"]`, and the `--help` of
    recipes/grpo.py) says what it is, its unit and default. Sizes are over all processes unless they say per device. Of
    TRL's fields, `per_device_train_batch_size` may be any positive integer, and `gradient_accumulation_steps` is
    derived where `global_batch_size` is set.

    Raises:
        ConfigError: sizes that break a rule, fields that contradict, unknown names; before anything is loaded.
    """

    _VALID_DICT_FIELDS = [*trl.GRPOConfig._VALID_DICT_FIELDS, "teacher_model_init_kwargs"]

    # What the run means: these change what is learned, and are compared on resume.
    global_batch_size: int | None = setting(
        "Completions per optimizer step, over all processes. Default: per_device_train_batch_size * "
        "gradient_accumulation_steps * processes, as in TRL."
    )
    rollout_batch_size: int | None = setting(
        "Completions per generation phase, over all processes; a multiple of global_batch_size and "
        "num_generations. Default: one optimizer step, or what generation_batch_size or steps_per_generation say."
    )
    advantage_estimator: str | None = setting(
        "How rewards become advantages: 'group_standardized' (GRPO), 'group_centered' (Dr. GRPO), "
        "'leave_one_out' (RLOO), 'reinforce_plus_plus_baseline', 'max_rl' (over the group's mean reward), 'pass_at_k' "
        "(with advantage_k), 'optimal_baseline' (OPO: the mean weighted by length), a registered name, or "
        "path/to/file.py:function. Default: what scale_rewards and multi_objective_aggregation say, as in TRL."
    )
    advantage_k: int | None = setting(
        "With advantage_estimator='pass_at_k': the k of the pass@k that is trained, completions, 1 to "
        "num_generations - 1. A reward passes at eval_pass_threshold; without one rewards have to be 0 or 1."
    )
    loss_aggregation: str | None = setting(
        "How token losses are added up: 'token_mean', 'sequence_mean', 'sequence_sum', 'sequence_sum_norm' (over "
        "max_completion_length) or 'prompt_mean' (prompts weigh the same). Default: what loss_type says, as in TRL."
    )
    trust_region: str | None = setting(
        "Instead of clipping ratios (epsilon), leave out tokens whose probability has moved further than "
        "trust_region_threshold the way their advantage points (DPPO), by its difference ('tv') or KL divergence "
        "('kl'), from the old policy, or the sampler where none is computed. For grpo, bnpo, dr_grpo, dapo and luspo.",
        choices=[None, "tv", "kl"],
    )
    trust_region_threshold: float | None = setting(
        "With trust_region: how far a token may move, as a probability ('tv') or in nats ('kl'); DPPO: 0.15 and 0.05."
    )
    sequence_mask_low: float | None = setting(
        "Leave out completions whose geometric mean ratio to the sampler (exp of the mean log-ratio) is below this, "
        "0 to 1. Left-out completions stay in the denominators. Default: no limit."
    )
    sequence_mask_high: float | None = setting("As sequence_mask_low: the most, above 1. Default: no limit.")
    dynamic_sampling: bool = setting(
        "Replace groups whose rewards are all equal by groups of further prompts (DAPO), until the rollout batch is "
        "full or dynamic_sampling_max_rounds is reached.",
        default=False,
    )
    dynamic_sampling_max_rounds: int = setting(
        "With dynamic_sampling: how often further prompts are sampled for one rollout batch.", default=10
    )
    rollout_chunk_size: int | None = setting(
        "Completions per chunk, a multiple of num_generations; reward functions are called once per chunk. If it is "
        "set, so is generate, and completions are the same on any number of processes (rollout_batch_size / P is "
        "cheapest for up to P). Default: an eighth of the rollout batch, at most 64, in whole groups; a process then "
        "samples its chunks in one call, and rounding may change completions: few in float32, most in half precision."
    )
    trail: bool = setting(
        "Record digests of every rollout batch and step in steps.jsonl too, for grpo-ext diff.", default=True
    )
    rollout_lag: int = setting(
        "Rollout batches that sampling runs ahead of training, on a thread: rollout batch r is sampled with the "
        "weights that training on rollout batch r - rollout_lag starts from. 0: sample, then train, then sample.",
        default=0,
    )

    sampling_mask: str | None = setting(
        "'replay': compute log-probabilities, KL and entropy over the tokens that top_p, top_k, min_p and other "
        "filters kept while sampling: the distribution that was sampled from. top_k limits their number, 512 if it is "
        "not set. With a filter, vLLM has to be colocated, 0.28 or newer. Default: the whole vocabulary, as in TRL.",
        choices=[None, "replay"],
    )
    routing_replay: bool = setting(
        "For mixture-of-experts models: record which experts each token was routed to while sampling, and route it to "
        "the same experts in every later forward of the policy. Their weights come from the current router.",
        default=False,
    )
    teacher_model: str | None = setting(
        "A model, by path or id, that the policy is distilled from on its own completions, beside reward functions or "
        "without any (num_generations may then be 1). A model object is the trainer's argument teacher_model."
    )
    teacher_model_init_kwargs: dict[str, Any] | str | None = setting(  # noqa: RUF009  (a dataclass field)
        "Arguments of from_pretrained for teacher_model, as model_init_kwargs; dtype is float32 by default."
    )
    teacher_kl_coef: float | None = setting(
        "With a teacher: the advantage of each token is increased by this factor times the teacher's log-probability "
        "of it minus the policy's. Default: 1."
    )
    float32_weight_gradients: bool = setting(
        "With bf16 or fp16: sum and keep the gradients of float32 weights of linear layers and experts in float32, so "
        "that micro-batches of whole groups give the same update. False: every micro-batch rounds them. No effect "
        "under FSDP and DeepSpeed.",
        default=True,
    )

    # How the run is laid out: changes nothing that is learned.
    micro_batch_tokens: int | None = setting(
        "The most tokens in one forward on one device, a shared prompt counted once; per_device_train_batch_size "
        "still limits the completions. Default: no limit."
    )
    sequence_parallel_size: int = setting(
        "Processes that share the tokens of every micro-batch, for completions that do not fit on one device: each "
        "holds a slice of the activations. Divides the number of processes and of attention heads. Does not change "
        "the batch sizes. 1: every process has its own micro-batches.",
        default=1,
    )

    # What need not be computed: each can be turned off, and none changes the gradient. Parameters that no completion
    # uses have none (`.grad` is None), so the optimizer leaves them alone; skip_zero_contribution decides which
    # completions count.
    forward: str = setting(
        "How completions run through the model: 'packed' (each prompt once, its completions after it, no "
        "padding), 'prefix' (prompts once with a cache, then padded completions), 'padded' (every completion with "
        "its prompt), or 'auto' (the first of these that the model can run). If the model cannot run the chosen form, "
        "it runs padded batches, with a warning; only rows of one length together, if padding changes the model.",
        default="auto",
        choices=["auto", *get_args(Form)],
    )
    skip_zero_contribution: bool = setting(
        "Skip completions that add exactly nothing to the update (advantage zero, no KL, entropy or auxiliary "
        "term). The logged entropy and clip ratios are then those of the other completions. False: these completions "
        "count as use of a parameter, such as an expert that no other token chooses: its gradient is zero, and weight "
        "decay and momentum move it. True: the optimizer leaves it alone.",
        default=True,
    )

    # vLLM.
    vllm_seeds: bool = setting(
        "Give every completion that vLLM samples its own seed. False: vLLM draws the rows of a batch together, which "
        "saves 1 to 2 ms per token at 256 rows; completions then depend on the split and differ in a resumed run.",
        default=True,
    )
    vllm_lora: bool | None = setting(
        "Send a LoRA adapter to vLLM by itself, instead of all weights with the adapter merged in. Default: if the "
        "server was started with --enable-lora and can serve the adapter. True: a colocated engine is started with "
        "LoRA, and an adapter that cannot be served is an error. False: never."
    )
    vllm_check: bool = setting(
        "End the run if vLLM's log-probabilities differ from the trainer's by more than rounding in half precision. "
        "Compared in the first rollout batch, and in all for which the trainer computes them (by default all).",
        default=True,
    )

    # The same bits.
    bitwise_invariant: bool = setting(
        "Give every parameter, optimizer tensor and logged metric the same bits for every micro-batch size and "
        "number of processes (data parallel, one machine type). Takes 8 more bytes per trained parameter.",
        default=False,
    )
    canonical_unit_size: int | None = setting(
        "With bitwise_invariant: completions of one group per forward, instead of per_device_train_batch_size; it "
        "changes what is learned. Default: num_generations."
    )
    bitwise_threads: int = setting(
        "With bitwise_invariant: CPU threads per process; the bits of matrix products depend on it.", default=1
    )

    # Resume.
    allow_changed_on_resume: list[str] | None = setting(  # noqa: RUF009  (a dataclass field)
        "Names of settings (or data, model, rewards) that may differ from the checkpoint's although they change what "
        "is learned, for example ['num_train_epochs'] to train longer. The layout may always differ."
    )

    # Reward functions that fail.
    reward_workers: int = setting(
        "Processes per training process that call synchronous reward functions concurrently; a call that takes "
        "longer than reward_timeout is killed. 0: functions run in the training process.",
        default=0,
    )
    reward_timeout: float | None = setting(
        "Seconds one call of a reward function may take (its thread runs on without reward_workers). Default: no limit."
    )
    reward_retries: int = setting(
        "How often a reward function that raised or took too long is called again.", default=0
    )
    reward_on_failure: str = setting(
        "When a reward function's last retry has failed: 'error' ends the run, 'none' gives None (does not apply).",
        default="error",
        choices=["error", "none"],
    )

    # Evaluation.
    eval_pass_threshold: float | None = setting(
        "The least reward that passes in the pass@k of an evaluation, and with advantage_estimator='pass_at_k'. "
        "Default: 1 if all are 0 or 1; else no pass@k."
    )
    eval_pass_reward: str | None = setting(
        "The reward function of pass@k and mean@k, by its name in the logs. Default: the weighted sum of all."
    )

    # Tools and environments.
    tool_timeout: float | None = setting(
        "Seconds one call of a tool, or an environment's `reset`, may take before it fails. Default: no limit."
    )

    # Logs.
    num_completions_to_print: int | None = setting(
        "Completions that log_completions prints at a log; all are in the run's folder. None prints all, as in TRL.",
        default=4,
    )

    # Refusals.
    allow_split_dependent: bool = setting(
        "Warn, not refuse, if the model or settings make the update depend on the split (BatchNorm, NEFTune, and "
        "dropout that does not belong to tokens).",
        default=False,
    )

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, np.generic):  # sizes and records take Python's numbers
                setattr(self, name, value.item())
        self.check()
        if self.bitwise_invariant:
            if not torch.cuda.is_initialized():
                os.environ.setdefault(CUBLAS, CUBLAS_VALUES[0])
            self.tf32 = False
        launched = int(os.environ.get("WORLD_SIZE", "1"))
        if not torch.accelerator.is_available():
            # without use_cpu TRL refuses bfloat16, its default, and Accelerate lets each CPU process train alone as
            # process 0; with use_cpu Accelerate turns DeepSpeed off, which needs only the name of the backend
            if asks_for("deepspeed", vars(self)):
                self.ddp_backend = self.ddp_backend or "gloo"
            else:
                self.use_cpu = True
        # TRL checks that its sizes divide each other; ours need not, so it gets sizes that pass
        neutral = {
            "num_generations": (group := max(group_size(vars(self)), 2)),
            "per_device_train_batch_size": group,
            "per_device_eval_batch_size": self.num_generations_eval or group,
            "gradient_accumulation_steps": 1,
            "generation_batch_size": None,
            "steps_per_generation": None,
            "auto_find_batch_size": False,  # it would start the run again; here the step is repeated
        }
        with temporarily_set(self, **neutral), compat.hiding_deprecations():
            super().__post_init__()
        options: Any = self.accelerator_config
        if "num_steps" in (options.gradient_accumulation_kwargs or {}):
            raise ConfigError(
                "accelerator_config sets num_steps in gradient_accumulation_kwargs; set global_batch_size instead."
            )
        if launched > self.world_size:
            raise ConfigError(
                f"the launcher started {launched} processes (WORLD_SIZE), but Accelerate joins {self.world_size}: each "
                "would train alone. On the CPU set use_cpu=True (or ACCELERATE_USE_CPU=true)."
            )
        self.geometry: BatchGeometry = geometry_of(vars(self), self.world_size)
        check_best_metric(vars(self))

    def check(self) -> None:
        """Raise a ConfigError for values that a setting does not take, or that contradict others."""
        settings = vars(self)
        for spec in dataclasses.fields(GRPOConfig):
            check_kind(spec, settings[spec.name], own=spec.name in GRPOConfig.__annotations__)
        refuse_newer(settings)
        check_values(settings)
        check_algorithm(settings)
        check_ahead(settings)
        if self.bitwise_invariant:
            check_bitwise(settings)

    @property
    def may_change(self) -> set[str]:
        """The names in `allow_changed_on_resume`, which may be set to one text."""
        names = self.allow_changed_on_resume or ()
        return {names} if isinstance(names, str) else set(names)

    @property
    def replay(self) -> Replay:
        return Replay(self.sampling_mask == "replay", self.routing_replay)

    @property
    def unit_rows(self) -> int | None:
        """Completions per canonical unit in bitwise mode."""
        return (self.canonical_unit_size or self.num_generations) if self.bitwise_invariant else None

    @property
    def pinned_threads(self) -> int | None:
        """CPU threads in bitwise mode."""
        return self.bitwise_threads if self.bitwise_invariant else None

    @classmethod
    def for_model(cls, args: trl.GRPOConfig | None, model: Any) -> GRPOConfig:
        """The configuration of a trainer: `args`, converted if it is TRL's, or a default named after the model."""
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
            values["generation_batch_size"] = None  # TRL computes it from steps_per_generation and refuses both
        config = cls(**values)
        for name, value in vars(args).items():  # what a subclass of TRL's configuration adds
            if not hasattr(config, name):
                setattr(config, name, value)
        return config

    def for_loop(self) -> GRPOConfig:
        """The copy that the Trainer's loop reads: one batch per optimizer step, sizes filled in."""
        # sizes may have been changed after construction
        sizes = self.geometry = geometry_of(vars(self), self.world_size)
        args = copy.copy(self)  # shallow: keeps what __post_init__ computed (devices, plugins)
        args.global_batch_size, args.steps_per_generation = sizes.global_batch_size, sizes.steps_per_rollout
        args.rollout_batch_size = args.generation_batch_size = sizes.rollout_batch_size
        args.gradient_accumulation_steps = 1
        args.auto_find_batch_size = False
        args.ddp_static_graph = None  # concerns DDP's reduction of gradients, which the step does not use
        # otherwise every micro-batch of a loader's last batch synchronises, and unequal counts hang
        accelerator: Any = copy.copy(self.accelerator_config)
        accumulation = accelerator.gradient_accumulation_kwargs or {}
        accelerator.gradient_accumulation_kwargs = {**accumulation, "sync_with_dataloader": False}
        args.accelerator_config = accelerator
        return args


GRPOConfig.__init__ = refusing_unknown(GRPOConfig.__init__)  # type: ignore[method-assign]
