"""One table of settings: what each decides, when it is read, how a resume compares it, and the range of its values.

Rows name every field of GRPOConfig, TRL's and transformers' too, and what a run is made of besides (data, model).
Checks, fingerprints, causes of a difference, refused changes and the documents follow from it. Without torch and TRL.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import field
from numbers import Real
from threading import TIMEOUT_MAX
from typing import Any, NamedTuple

from .batching.sizes import Settings, require_whole
from .errors import ConfigError

# the stages of a step that a setting decides, or what else it is about
STAGES = ("prompts", "completions", "rewards", "advantages", "loss", "schedule", "optimizer")
# how a resume compares a setting: ALWAYS, in BITWISE mode alone (elsewhere it changes rounding at most), as part of the
# optimizer's STATE (another value would have no effect, or could not be loaded), or as a resolved SIZE; or not at all,
# where it is NOTED for a comparison of runs, or FREE
ALWAYS, BITWISE, STATE, SIZE, NOTED, FREE = "always", "bitwise", "state", "size", "noted", "free"


class Rule(NamedTuple):
    """The values that a setting takes."""

    takes: str = ""  # in an error
    fits: Callable[[Any], bool] = lambda value: True
    least: int | None = None  # of a whole number, instead
    none: bool = False  # may be None
    kind: Any = Real  # of a value that may fit; numpy's numbers too

    def check(self, name: str, value: Any) -> None:
        if self.none and value is None:
            return
        if self.least is not None:
            require_whole(name, value, self.least)
        elif not isinstance(value, self.kind) or not self.fits(value):
            raise ConfigError(f"{name}={value!r}: use {self.takes}.")


class Row(NamedTuple):
    names: str
    decides: str = ""  # `STAGES`, "layout" or "output"; empty: nothing here
    # when it is read: "build" (once), "rollout" (when a rollout batch begins), "loss" (at each loss, on the trainer),
    # "args" (at each loss, in args)
    read: str = "build"
    resume: str = FREE
    # "keeps": may change within a rollout batch. "unlike_trl": stock TRL would learn something else. "planned",
    # "copied", "engine": a callback may not change it, because steps, the generation_config, or engines are built with
    # it. "to_vllm": an attribute of TRL's `VLLMGeneration`. "truncates": leaves out tokens. "limit": limits ratios.
    # "size": another name of a size. "once": not passed on to a rerun. "unmeasured": not in a `plan --measure`.
    # "part": of the fingerprint, beside the settings. "case": a rerun may try it
    marks: str = ""
    rule: Rule | None = None


def _one_of(*values: Any) -> Rule:
    return Rule(f"one of {', '.join(map(repr, values))}", values.__contains__, kind=object)


LOG_LEVELS = ("detail", "debug", "info", "warning", "error", "critical", "passive")
_SECONDS = Rule("seconds, more than 0, or None for no limit", lambda v: 0 < v <= TIMEOUT_MAX, none=True)
_POSITIVE = Rule("a number above 0", lambda value: 0 < value < math.inf)
_NOT_NEGATIVE = Rule("0 or more", lambda value: 0 <= value < math.inf)
_BOUND = Rule("0 or more", lambda value: value >= 0, none=True)
_FINITE = Rule("a finite number", math.isfinite, none=True)
_NUMBER = Rule("a number", lambda value: not math.isnan(value), none=True)
_LOW = Rule("a ratio of 0 or more, below 1 (SkyRL: 0.99)", lambda value: 0 <= value < 1, none=True)
_HIGH = Rule("a ratio above 1 (SkyRL: 1.01)", lambda value: 1 < value < math.inf, none=True)
_SHARE = Rule("a number above 0, below 1", lambda value: 0 < value < 1, none=True)
_QUANTILE = Rule("a number from 0 to 1", lambda value: 0 <= value <= 1)
_SWITCH = Rule("True or False", lambda value: isinstance(value, bool))
_TOP_P = Rule("a number above 0, at most 1", lambda value: 0 < value <= 1)
_AGGREGATION = _one_of("sum_then_normalize", "normalize_then_sum")

TABLE = (
    # ---- This package: what the run means
    Row("global_batch_size", "loss", resume=SIZE),
    Row("rollout_batch_size", "prompts", resume=SIZE),
    Row("rollout_chunk_size", "completions", resume=SIZE),
    Row("advantage_estimator advantage_k", "advantages", "rollout", ALWAYS, "unlike_trl case"),
    Row("loss_aggregation", "loss", "args", ALWAYS, "unlike_trl keeps case"),
    Row("trust_region", "loss", "args", ALWAYS, "unlike_trl keeps limit case"),
    Row("trust_region_threshold", "loss", "args", ALWAYS, "unlike_trl keeps case", _SHARE),
    Row("sequence_mask_low", "loss", "args", ALWAYS, "unlike_trl keeps limit case", _LOW),
    Row("sequence_mask_high", "loss", "args", ALWAYS, "unlike_trl keeps limit case", _HIGH),
    Row("dynamic_sampling", "completions", "rollout", ALWAYS, "unlike_trl"),
    Row("dynamic_sampling_max_rounds", "completions", "rollout", ALWAYS, rule=Rule(least=1)),
    Row("rollout_lag", "completions loss", resume=ALWAYS, marks="unlike_trl unmeasured"),
    Row("sampling_mask", "completions loss", resume=ALWAYS, marks="unlike_trl"),
    Row("routing_replay", "loss", resume=ALWAYS, marks="unlike_trl", rule=_SWITCH),
    Row("teacher_model", "loss", marks="unlike_trl unmeasured"),
    Row("teacher_model_init_kwargs", "loss"),
    Row("teacher_kl_coef", "loss", "args", ALWAYS, "unlike_trl keeps case", _POSITIVE._replace(none=True)),
    Row("bitwise_invariant", "completions loss", resume=ALWAYS),
    Row("canonical_unit_size forward float32_weight_gradients", "loss", resume=BITWISE),
    Row("skip_zero_contribution", "loss", "args", BITWISE, "case"),
    Row("bitwise_threads", "completions loss", resume=BITWISE, rule=Rule(least=1)),
    Row("eval_pass_threshold", "advantages", "rollout", FREE, "case", _FINITE),
    # ---- This package: how it runs
    Row("micro_batch_tokens", "layout", rule=Rule(least=2, none=True)),
    Row("sequence_parallel_size", "layout", marks="once"),
    Row("reward_timeout", "rewards", rule=_SECONDS),
    Row("tool_timeout", "completions", "rollout", rule=_SECONDS),
    Row("reward_retries reward_workers", "layout", rule=Rule(least=0)),
    Row("reward_on_failure", "rewards"),
    Row("vllm_seeds vllm_lora vllm_check", "completions"),
    # ---- TRL: prompts and completions
    Row("num_generations", "prompts completions advantages", resume=ALWAYS, marks="planned"),
    Row("num_iterations", "prompts", resume=ALWAYS, marks="planned"),
    Row("shuffle_dataset", "prompts", resume=ALWAYS),
    Row("chat_template_kwargs", "prompts", "rollout", ALWAYS),
    Row("max_completion_length", "completions loss", "rollout", ALWAYS, rule=Rule(least=1, none=True)),
    Row("temperature", "completions loss", resume=ALWAYS, marks="copied to_vllm", rule=_POSITIVE),
    Row("top_k", "completions", resume=ALWAYS, marks="copied to_vllm truncates"),
    Row("top_p", "completions", resume=ALWAYS, marks="copied to_vllm truncates", rule=_TOP_P),
    Row("min_p", "completions", resume=ALWAYS, marks="copied to_vllm truncates", rule=_QUANTILE._replace(none=True)),
    Row("repetition_penalty", "completions", resume=ALWAYS, marks="copied to_vllm", rule=_POSITIVE),
    Row("generation_kwargs", "completions", "rollout", ALWAYS),
    Row("max_tool_calling_iterations", "completions", "rollout", ALWAYS, rule=Rule(least=0, none=True)),
    Row("mask_truncated_completions", "completions loss", "rollout", ALWAYS),
    Row("use_vllm", "completions", resume=ALWAYS, marks="engine unmeasured"),
    Row("vllm_mode", "completions", marks="engine", rule=_one_of("server", "colocate")),
    Row("use_transformers_continuous_batching", "completions", marks="engine"),
    Row("transformers_continuous_batching_config use_transformers_paged", "completions", resume=ALWAYS),
    Row("pad_to_multiple_of", "layout", marks="engine"),
    Row("vllm_structured_outputs_regex", "completions", resume=ALWAYS),
    Row("vllm_model_impl", "completions"),
    # ---- TRL: advantages and loss
    Row("reward_weights", "advantages", "rollout", ALWAYS, "case"),
    Row("scale_rewards", "advantages", "rollout", ALWAYS, "case", _one_of("group", "batch", "none", True, False)),
    Row("multi_objective_aggregation", "advantages", "rollout", ALWAYS, "case", _AGGREGATION),
    Row("vllm_importance_sampling_correction vllm_importance_sampling_mode", "loss", "rollout", ALWAYS),
    Row("vllm_importance_sampling_clip_min vllm_importance_sampling_clip_max", "loss", "rollout", ALWAYS, rule=_BOUND),
    Row("vllm_importance_sampling_cap", "loss", "rollout", ALWAYS, rule=_BOUND),
    Row("beta", "loss", "loss", ALWAYS, "case", _NOT_NEGATIVE),
    Row("loss_type", "loss", "loss", ALWAYS, "keeps case"),
    Row("epsilon", "loss", "loss", ALWAYS, "keeps case", _BOUND._replace(none=False)),
    Row("epsilon_high", "loss", "loss", ALWAYS, "keeps case", _BOUND),
    Row("importance_sampling_level", "loss", "loss", ALWAYS, "case"),
    Row("off_policy_mask_threshold", "loss", "loss", ALWAYS, "case", _FINITE),
    Row("entropy_coef", "loss", "loss", ALWAYS, "case", _FINITE._replace(none=False)),
    Row("router_aux_loss_coef", "loss", "loss", ALWAYS, rule=_FINITE),
    Row("delta", "loss", "args", ALWAYS, "case", _POSITIVE._replace(none=True)),
    Row("use_bias_correction_kl", "loss", "args", ALWAYS, "case"),
    Row("sapo_temperature_neg sapo_temperature_pos", "loss", "args", ALWAYS, "case", _POSITIVE),
    Row("vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg", "loss", "args", ALWAYS, "case", _NOT_NEGATIVE),
    Row("top_entropy_quantile", "loss", "loss", ALWAYS, "case", _QUANTILE),
    Row("use_adaptive_entropy", "loss", "loss", ALWAYS),
    Row("entropy_target entropy_coef_min entropy_coef_max", "loss", "args", ALWAYS, rule=_NUMBER),
    Row("entropy_coef_delta", "loss", "args", ALWAYS, rule=_FINITE),
    Row("sync_ref_model disable_dropout", "loss", resume=ALWAYS),
    Row("ref_model_mixup_alpha", "loss", resume=ALWAYS, rule=_QUANTILE),
    Row("ref_model_sync_steps", "loss", resume=ALWAYS, rule=Rule(least=1)),
    Row("cast_lm_head_to_fp32", "completions loss", resume=ALWAYS),
    # ---- TRL: the rest
    Row("generation_batch_size steps_per_generation", "layout", marks="size"),
    Row("num_generations_eval", "output", rule=Rule(least=1, none=True)),
    # ---- transformers
    Row("seed data_seed", "prompts completions", resume=ALWAYS),
    Row("dataloader_drop_last", "prompts", resume=ALWAYS, marks="keeps"),
    Row("bf16 fp16 full_determinism", "completions loss", resume=ALWAYS, marks="keeps"),
    Row("neftune_noise_alpha", "loss", resume=ALWAYS, marks="keeps"),
    Row("max_grad_norm", "optimizer", resume=ALWAYS, marks="keeps case"),
    Row("optim optim_args optim_target_modules", "optimizer", resume=ALWAYS, marks="keeps"),
    Row("weight_decay adam_beta1 adam_beta2", "optimizer", resume=STATE, marks="keeps"),
    Row("adam_epsilon", "optimizer", resume=STATE, marks="keeps case", rule=_NOT_NEGATIVE),
    Row("learning_rate", "schedule", resume=STATE, marks="keeps case", rule=_NOT_NEGATIVE),
    Row("num_train_epochs max_steps warmup_steps", "schedule", resume=ALWAYS, marks="keeps"),
    Row("lr_scheduler_type lr_scheduler_kwargs", "schedule", resume=ALWAYS, marks="keeps"),
    Row("per_device_train_batch_size gradient_accumulation_steps", "layout", marks="size"),
    Row("per_device_eval_batch_size", "layout", rule=Rule(least=1)),
    Row("output_dir report_to push_to_hub resume_from_checkpoint", "output", marks="once"),
    Row("hub_always_push hub_model_id hub_private_repo hub_revision hub_strategy hub_token", "output", marks="once"),
    # ---- What is laid out or written, and decides nothing that is learned
    Row(
        "cache_implementation ds3_gather_for_generation vllm_enable_sleep_mode vllm_gpu_memory_utilization "
        "vllm_group_port vllm_max_model_length vllm_server_base_url vllm_server_host vllm_server_port "
        "vllm_server_timeout vllm_tensor_parallel_size model_init_kwargs trust_remote_code gradient_checkpointing "
        "gradient_checkpointing_kwargs tf32 torch_compile torch_compile_backend torch_compile_mode "
        "use_liger_kernel liger_kernel_config use_cpu deepspeed fsdp fsdp_config activation_checkpointing "
        "activation_checkpointing_kwargs accelerator_config parallelism_config ddp_backend ddp_broadcast_buffers "
        "ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph ddp_timeout auto_find_batch_size "
        "torch_empty_cache_steps local_rank dataloader_num_workers "
        "dataloader_persistent_workers dataloader_pin_memory dataloader_in_order dataloader_prefetch_factor "
        "dataloader_multiprocessing_context remove_unused_columns allow_split_dependent",
        "layout",
    ),
    Row(
        "trail eval_pass_reward allow_changed_on_resume log_completions log_multimodal "
        "num_completions_to_print log_unique_prompts log_completions_hub_repo run_name project "
        "log_on_each_node logging_first_step disable_tqdm logging_nan_inf_filter logging_steps "
        "logging_strategy include_num_input_tokens_seen debug trackio_bucket_id trackio_space_id "
        "trackio_static_space_id skip_memory_metrics save_on_each_node save_only_model save_steps save_strategy "
        "save_total_limit enable_jit_checkpoint load_best_model_at_end metric_for_best_model greater_is_better "
        "ignore_data_skip restore_callback_states_from_checkpoint do_train do_eval do_predict eval_delay "
        "eval_on_start eval_steps eval_strategy eval_accumulation_steps eval_do_concat_batches "
        "eval_use_gather_object bf16_full_eval fp16_full_eval batch_eval_metrics include_for_metrics "
        "prediction_loss_only",
        "output",
    ),
    Row("log_level log_level_replica", "output", rule=_one_of(*LOG_LEVELS)),
    # of losses and loaders that do not run here
    Row("average_tokens_across_devices label_names label_smoothing_factor length_column_name use_cache"),
    Row("train_sampling_strategy"),
    # ---- What a run is made of besides, as `run.fingerprint` names it; of a name with dots the longest row counts
    Row("data tokenizer template", "prompts", resume=ALWAYS, marks="part"),
    Row("data.by_column", "rewards", resume=ALWAYS),
    Row("data.by_column.prompt data.by_column.image data.by_column.images", "prompts", resume=ALWAYS),
    Row("data.by_column.chat_template_kwargs", "prompts", resume=ALWAYS),
    Row("model", "completions loss", resume=ALWAYS, marks="part"),
    Row("model.parameters", "completions loss", resume=STATE),
    Row("end_tokens generation_config", "completions", resume=ALWAYS, marks="part"),
    Row("tools", "prompts completions rewards", resume=ALWAYS, marks="part"),
    Row("tool_code", "completions", resume=NOTED, marks="part"),
    Row("rewards", "rewards", resume=ALWAYS, marks="part"),
    Row("lr_scheduler", "schedule", resume=ALWAYS, marks="keeps"),
)
_BY_NAME = {name: row for row in TABLE for name in row.names.split()}


def setting(help: str, default: Any = None, **metadata: Any) -> Any:
    """The field of a dataclass of settings."""
    return field(default=default, metadata={"help": help, **metadata})


def row_of(name: str) -> Row | None:
    """The row of a setting, or of the longest part of a name with dots; None for a field of a user's own."""
    while name not in _BY_NAME and "." in name:
        name = name.rpartition(".")[0]
    return _BY_NAME.get(name)


def named(mark: str) -> list[str]:
    """The settings with a mark, in the order of the table."""
    return [name for name, row in _BY_NAME.items() if mark in row.marks.split()]


def read_at(time: str) -> list[str]:
    return [name for name, row in _BY_NAME.items() if row.read == time]


def decides(name: str, stage: str) -> bool:
    """Whether a setting decides a stage of a step; `name` may go on after a dot or a space."""
    row = row_of(name.split(" ")[0])
    return row is not None and stage in row.decides.split()


def resumes(name: str) -> str:
    """How a resume compares a setting; one of a user's own always."""
    row = row_of(name)
    return ALWAYS if row is None else row.resume


def compared_by_value(name: str, bitwise: bool) -> bool:
    """Whether a resume compares a setting by its value."""
    return resumes(name) in ((ALWAYS, STATE, BITWISE) if bitwise else (ALWAYS, STATE))


def check_ranges(settings: Settings) -> None:
    """Raise a ConfigError for a value that a setting does not take."""
    for name, row in _BY_NAME.items():
        if row.rule is not None and name in settings:
            row.rule.check(name, settings[name])
    least = -1 if settings["use_vllm"] else 0  # which mean all tokens
    takes = f"a whole number, {least} or more"
    Rule(takes, lambda value: value >= least and value % 1 == 0, none=True).check("top_k", settings["top_k"])


MOST_KEPT = 512  # tokens of a replayed mask without top_k


def truncating(values: Settings) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None and _truncates(name, value)}


def truncating_in(settings: Settings) -> dict[str, Any]:
    """The settings of TRL that leave out tokens; `generation_kwargs` may contain others."""
    return truncating({name: settings.get(name) for name in named("truncates")})


def _truncates(name: str, value: float) -> bool:
    if name in ("top_p", "typical_p"):
        return value < 1
    if name in ("epsilon_cutoff", "eta_cutoff"):
        return 0 < value < 1
    return name == "top_h" or (name in ("top_k", "min_p") and value != 0)


def most_kept(filters: Settings) -> int | None:
    return filters.get("top_k", MOST_KEPT) if filters else None


# ---- Settings that exclude each other -------------------------------------------------------------------------------


# by setting: facts that exclude it (settings, or what a caller knows), and the text of the error, a format of facts
EXCLUDED = {
    "bitwise_invariant": {
        "fsdp": "FSDP (gradients are reduced as floating point numbers)",
        "deepspeed": "DeepSpeed (gradients are reduced as floating point numbers)",
        "vllm_varies": "use_vllm without VLLM_BATCH_INVARIANT=1 (batches, and so bits, depend on timing)",
        "vllm_unseeded": "vllm_seeds=False",
        "use_transformers_continuous_batching": "use_transformers_continuous_batching (batches depend on timing)",
        "micro_batch_tokens": "micro_batch_tokens (units are canonical; canonical_unit_size sets their size)",
        "allow_split_dependent": "allow_split_dependent",
        "torch_compile": "torch_compile (it chooses kernels by timing)",
        "use_liger_kernel": "use_liger_kernel",
        "tf32": "tf32",
        "fp16": "fp16 (its loss scale moves with overflows)",
        "reward_models": (
            "reward models ({reward_models}; the bits of a score depend on the batch it is computed in, so use a "
            "function that scores one completion at a time)"
        ),
        "vllm_engine": (
            "this vLLM engine (it does not report that its bits are the same in every batch; set "
            "VLLM_BATCH_INVARIANT=1 where it starts, on an NVIDIA GPU)"
        ),
        "other_sampling": "{other_sampling} (only this trainer's own sampling has the same bits in every split)",
        "attention_kernels": (
            "the attention kernels {attention_kernels!r}, which replace torch's "
            "(torch.nn.attention.restore_flash_attention_impl() before training)"
        ),
        "timed_kernels": (
            "flash-linear-attention, which chooses its kernels by timing them (without it transformers computes "
            "these layers in torch)"
        ),
        "gpu_kinds": "GPUs of several kinds, which choose other kernels ({gpu_kinds})",
    },
    "sequence_parallel_size": {
        "other_form": "forward={forward!r} (only packs share their tokens)",
        "bitwise_invariant": "bitwise_invariant=True (a gradient is a sum over tokens; each process rounds its part)",
        "deepspeed": "DeepSpeed (use FSDP2 or DDP)",
        "rollout_lag": "rollout_lag={rollout_lag} (sampling ahead cannot exchange data while training does)",
        "torch_compile": "torch_compile=True",
    },
    "rollout_lag": {
        "colocated": "vllm_mode='colocate' (the engine shares the device with training; use a server)",
        "torch_compile": "torch_compile (the copy of the model would be compiled again)",
        "cast_lm_head_to_fp32": "cast_lm_head_to_fp32=True (TRL's head uses the weights being trained)",
        "use_transformers_continuous_batching": (
            "use_transformers_continuous_batching (it samples with the weights being trained)"
        ),
        "other_sampling": (
            "{other_sampling} (it would sample with the weights that are trained; only this trainer's own sampling"
            " runs on a copy of them)"
        ),
        "noise": (
            "{noise} (two threads would draw from one stream of random numbers; use disable_dropout=True and no "
            "NEFTune)"
        ),
        "scales": (
            "weights in 8 bits (a copy and the model, or the teacher, cannot share their scales, which "
            "bitsandbytes hands to the layer that runs first; use load_in_4bit)"
        ),
        "shown_images": "images together with tools or an environment (not implemented)",
        "stream": "a stream (rows are read before their step; use a data set with a length)",
    },
    "sampling_mask": {
        "own_sampling": "{own_sampling} (it returns no kept tokens)",
        "own_log_probs": "{own_log_probs} (it gets padded tensors, without the kept tokens)",
        "outside_masks": "{outside_masks}",
        "foreign": "{foreign} (sampling that is not by key returns no kept tokens)",
        "vllm_settings": "{vllm_settings} (vLLM returns no masks that describe it)",
        "server_filters": "{server_filters} on a vLLM server (TRL's client returns no masks)",
    },
    "routing_replay": {
        "own_method": "{own_method} (it gets padded tensors, without the experts)",
        "takes_images": "a model that takes images",
        "torch_compile": "torch_compile=True",
        "fsdp_checkpointing": "FSDP's activation_checkpointing (set gradient_checkpointing=True)",
        "prefill_chunk_size": "prefill_chunk_size",
    },
    "data.by_column.chat_template_kwargs": {
        "rollout_func": "rollout_func",
        "remove_unused_columns": "remove_unused_columns",
    },
    "teacher_model": {
        "loaded_teacher": "teacher_model or teacher_model_init_kwargs in GRPOConfig (for one that is loaded)",
        "shared_weights": "weights that the policy shares (it would move with the policy; pass a copy)",
        "alone": "reward functions and num_generations=1 (a completion alone in its group has no advantage)",
        "torch_dtype": "torch_dtype in teacher_model_init_kwargs (which has no effect; write dtype)",
        "takes_images": "a model that takes images (not implemented)",
    },
}


def refuse_excluded(
    setting: str, shown: str, facts: Mapping[str, Any], remedy: str = "Turn one of the two off."
) -> None:
    """Raise a ConfigError where facts exclude a setting, which the error shows as `shown`.

    Facts are values by name; one that is absent excludes nothing.
    """
    texts = [text.format_map(facts) for fact, text in EXCLUDED[setting].items() if facts.get(fact)]
    if texts:
        raise ConfigError(f"{shown} cannot be combined with {'; '.join(texts)}. {remedy}")
