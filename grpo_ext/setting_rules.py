"""The rules for values of GRPOConfig's settings, and for settings that exclude each other.

Checked before anything is loaded. Rules for sizes are in batching.sizes, and rules that need a model are in checks.
"""

import dataclasses
import functools
import inspect
import math
import os
import re
from collections.abc import Mapping
from threading import TIMEOUT_MAX
from typing import Any

import trl
from transformers import TrainingArguments

from .algorithms.advantages import check_estimator, takes_keyword
from .algorithms.losses import LossConfig
from .algorithms.pass_at_k import logged_k
from .algorithms.policy_losses import POLICY_LOSSES, check_policy_loss
from .batching.sizes import require_whole
from .compat import WORKS
from .errors import ConfigError, UnknownSettingError, did_you_mean, refuse_combination
from .runtime.tracebacks import hide_frames

# the smallest values of settings that are whole numbers
_LEAST = dict.fromkeys(("per_device_eval_batch_size", "dynamic_sampling_max_rounds", "bitwise_threads"), 1)
_LEAST |= {"reward_retries": 0, "reward_workers": 0, "num_generations_eval": 1, "micro_batch_tokens": 2}
_MAY_BE_NONE = {"num_generations_eval", "micro_batch_tokens", "top_k", "reward_timeout", "tool_timeout"}
_MAY_BE_NONE |= {"trust_region_threshold", "sequence_mask_low", "sequence_mask_high", "teacher_kl_coef"}
_MAY_BE_NONE |= {"eval_pass_threshold"}

_SETTINGS = dataclasses.fields(trl.GRPOConfig)  # as it is now: a script may put this package's in its place
# the settings that TRL's GRPOConfig adds to transformers' in the tested versions
_OF_TRL = {
    "model_init_kwargs",
    "trust_remote_code",
    "router_aux_loss_coef",
    "disable_dropout",
    "cast_lm_head_to_fp32",
    "num_generations",
    "num_generations_eval",
    "max_completion_length",
    "ds3_gather_for_generation",
    "shuffle_dataset",
    "pad_to_multiple_of",
    "generation_batch_size",
    "steps_per_generation",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "generation_kwargs",
    "chat_template_kwargs",
    "repetition_penalty",
    "cache_implementation",
    "use_vllm",
    "vllm_mode",
    "vllm_model_impl",
    "vllm_enable_sleep_mode",
    "vllm_structured_outputs_regex",
    "vllm_server_base_url",
    "vllm_server_host",
    "vllm_server_port",
    "vllm_server_timeout",
    "vllm_group_port",
    "vllm_gpu_memory_utilization",
    "vllm_max_model_length",
    "vllm_tensor_parallel_size",
    "beta",
    "num_iterations",
    "epsilon",
    "delta",
    "epsilon_high",
    "sapo_temperature_neg",
    "sapo_temperature_pos",
    "vespo_k_pos",
    "vespo_lambda_pos",
    "vespo_k_neg",
    "vespo_lambda_neg",
    "importance_sampling_level",
    "reward_weights",
    "multi_objective_aggregation",
    "scale_rewards",
    "loss_type",
    "mask_truncated_completions",
    "sync_ref_model",
    "ref_model_mixup_alpha",
    "ref_model_sync_steps",
    "top_entropy_quantile",
    "entropy_coef",
    "use_adaptive_entropy",
    "entropy_coef_min",
    "entropy_coef_max",
    "entropy_coef_delta",
    "entropy_target",
    "max_tool_calling_iterations",
    "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode",
    "vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_clip_min",
    "off_policy_mask_threshold",
    "use_bias_correction_kl",
    "log_completions",
    "log_multimodal",
    "num_completions_to_print",
    "log_unique_prompts",
    "log_completions_hub_repo",
    "use_transformers_continuous_batching",
    "transformers_continuous_batching_config",
    "use_transformers_paged",
    "vllm_importance_sampling_cap",
}


def refuse_newer(settings: Mapping[str, Any]) -> None:
    """Refuse settings of a newer TRL, which nothing here may implement, unless they have their defaults."""
    for spec in _SETTINGS:
        if spec.name not in _OF_TRL and spec.name not in TrainingArguments.__dataclass_fields__:
            factory = spec.default_factory
            default = spec.default if factory is dataclasses.MISSING else factory()
            if (value := settings[spec.name]) != default:
                raise ConfigError(
                    f"{spec.name}={value!r}: grpo_ext does not know this setting of trl {trl.__version__}. Leave it at "
                    f"{default!r}, or install {WORKS}."
                )


def refusing_unknown(init: Any) -> Any:
    """A configuration's constructor, with a suggestion in the error of a keyword argument that it does not take."""
    known = inspect.signature(init).parameters

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **settings: Any) -> None:
        for name in settings.keys() - known.keys():
            remedy = did_you_mean(name, known, "leave it out.", cutoff=0.8)  # of two names that only begin alike, none
            raise UnknownSettingError(f"{type(self).__name__} has no setting {name!r}; {remedy}")
        init(self, *args, **settings)

    return hide_frames(checked)


def check_kind(spec: dataclasses.Field[Any], value: Any, own: bool) -> None:
    """Raise a ConfigError for text in a field that takes none, or a value that is not among a field's own choices."""
    if isinstance(value, str) and not isinstance(spec.default, str):
        # not `str`: HfArgumentParser takes it out of a field's type
        kinds = {*re.findall(r"\w+", str(spec.type))} - {"class", "typing", "Optional", "None"}
        if kinds <= {"int", "float", "bool"}:
            kind = " or ".join(sorted(kinds))
            raise ConfigError(f"{spec.name}={value!r} is text, and takes {kind}: no quotes (in YAML 1.0e-6, not 1e-6).")
    choices = spec.metadata.get("choices")
    if own and choices and value not in choices:
        raise ConfigError(f"{spec.name}={value!r} is unknown; use one of {', '.join(map(repr, choices))}.")


def check_values(settings: Mapping[str, Any]) -> None:
    for name, least in _LEAST.items():
        if settings[name] is not None or name not in _MAY_BE_NONE:
            require_whole(name, settings[name], least)
    seconds = "seconds, more than 0, or None for no limit"
    least_k = -1 if settings["use_vllm"] else 0  # -1 and 0 mean all tokens
    for name, takes, allowed in (
        ("epsilon", "0 or more", lambda value: value >= 0),
        ("beta", "0 or more", lambda value: 0 <= value < math.inf),
        ("temperature", "a number above 0", lambda value: 0 < value < math.inf),
        ("top_entropy_quantile", "a number from 0 to 1", lambda value: 0 <= value <= 1),
        ("top_p", "a number above 0, at most 1", lambda value: 0 < value <= 1),
        ("top_k", f"a whole number, {least_k} or more", lambda value: value >= least_k and value % 1 == 0),
        ("repetition_penalty", "a number above 0", lambda value: 0 < value < math.inf),
        ("eval_pass_threshold", "a finite number", math.isfinite),
        ("teacher_kl_coef", "a number above 0, or None for 1 with a teacher", lambda value: 0 < value < math.inf),
        ("routing_replay", "True or False", lambda value: isinstance(value, bool)),
        ("reward_timeout", seconds, lambda value: 0 < value <= TIMEOUT_MAX),
        ("tool_timeout", seconds, lambda value: 0 < value <= TIMEOUT_MAX),
        ("trust_region_threshold", "a number above 0, below 1", lambda value: 0 < value < 1),
        ("sequence_mask_low", "a ratio of 0 or more, below 1 (SkyRL: 0.99)", lambda value: 0 <= value < 1),
        ("sequence_mask_high", "a ratio above 1 (SkyRL: 1.01)", lambda value: 1 < value < math.inf),
    ):
        if name in _MAY_BE_NONE and settings[name] is None:
            continue
        if not isinstance(settings[name], (int, float)) or not allowed(settings[name]):
            raise ConfigError(f"{name}={settings[name]!r}: use {takes}.")
    weights = settings["reward_weights"] or ()
    if not all(math.isfinite(weight) for weight in weights):
        raise ConfigError(f"reward_weights={weights!r}: every weight has to be a finite number; 0 leaves a reward out.")
    check_sequence_parallel(settings)
    optim = str(getattr(settings["optim"], "value", settings["optim"]))
    if "lomo" in optim or optim.endswith("layerwise"):
        raise ConfigError(
            f"optim={optim} updates the model before the step's gradient is complete; use another optimizer."
        )


def check_best_metric(settings: Mapping[str, Any]) -> None:
    """Raise a ConfigError for a `metric_for_best_model` that an evaluation may not log, because the run would fail."""
    name, group = settings["metric_for_best_model"], settings["num_generations_eval"] or settings["num_generations"]
    metric, unsure = re.fullmatch(r"(?:.+_)?(pass|mean)@(\d+)", name or ""), settings["eval_pass_threshold"] is None
    sizes = logged_k(group) if metric and metric[1] == "pass" else [group]
    if metric and (int(metric[2]) not in sizes or (metric[1] == "pass" and unsure)):
        raise ConfigError(
            f"metric_for_best_model={name!r} may be missing in an evaluation: {metric[1]}@k is logged for k in {sizes} "
            "(num_generations_eval), and pass@k of arbitrary rewards only with eval_pass_threshold, the least reward "
            "that has passed. Set it, and use one of these k."
        )


def check_algorithm(settings: Mapping[str, Any]) -> None:
    level, aggregation = settings["importance_sampling_level"], settings["loss_aggregation"]
    region = {name: settings[name] for name in ("trust_region", "trust_region_threshold", "delta")}
    loss = LossConfig(settings["loss_type"], level, aggregation=aggregation, **region)
    if loss.loss_type in POLICY_LOSSES:
        check_policy_loss(loss.loss_type)
    longest = settings["max_completion_length"]
    if loss.weighting == "sequence_sum_norm" and not longest:
        setting = "loss_type" if aggregation is None else "loss_aggregation"
        raise ConfigError(
            f"{setting}={settings[setting]!r} divides the loss by max_completion_length, which is {longest}; set it to "
            "the most tokens of a completion, or use another loss_aggregation, for example 'token_mean'."
        )
    if (name := settings["advantage_estimator"]) is not None:
        check_estimator(name)
        scale, several = settings["scale_rewards"], settings["multi_objective_aggregation"]
        if scale not in ("group", True) or several != "sum_then_normalize":
            raise ConfigError(
                f"advantage_estimator={name!r} and scale_rewards={scale!r}, multi_objective_aggregation={several!r} "
                "both determine how rewards become advantages; leave out the latter two."
            )
    check_advantage_k(name, settings["advantage_k"], settings["num_generations"])
    shared = settings["vllm_mode"] == "colocate" and settings["vllm_tensor_parallel_size"] > 1
    if settings["dynamic_sampling"] and settings["use_vllm"] and shared:
        raise ConfigError(
            "dynamic_sampling=True samples as many prompts as are missing, which may not divide evenly among "
            "processes, as tensor-parallel vLLM engines require; use vllm_tensor_parallel_size=1, or a server."
        )


def check_advantage_k(estimator: str | None, k: Any, group: int) -> None:
    takes_k = estimator is not None and takes_keyword(estimator, "advantage_k")
    fits = isinstance(k, int) and 1 <= k < group if takes_k else k is None
    if not fits:
        rule = f"takes a whole number from 1 to {group - 1} (num_generations - 1)" if takes_k else "takes none"
        raise ConfigError(f"advantage_k={k!r}, but advantage_estimator={estimator!r} {rule}.")


def asks_for(engine: str, settings: Mapping[str, Any]) -> bool:
    """Whether launcher or settings turn on "fsdp" or "deepspeed" (Accelerate turns the latter off with use_cpu)."""
    return os.environ.get(f"ACCELERATE_USE_{engine.upper()}", "false").lower() == "true" or bool(settings[engine])


def check_bitwise(settings: Mapping[str, Any]) -> None:
    by_timing = settings["use_transformers_continuous_batching"]
    vllm, invariant = settings["use_vllm"], os.environ.get("VLLM_BATCH_INVARIANT", "0") == "1"
    varies = vllm and settings["vllm_mode"] == "colocate" and not invariant  # a server is asked later
    others = {
        "FSDP (gradients are reduced as floating point numbers)": asks_for("fsdp", settings),
        "DeepSpeed (gradients are reduced as floating point numbers)": asks_for("deepspeed", settings),
        "use_vllm without VLLM_BATCH_INVARIANT=1 (batches, and so bits, depend on timing)": varies,
        "vllm_seeds=False": vllm and not settings["vllm_seeds"],
        "use_transformers_continuous_batching (batches depend on timing)": by_timing,
        "micro_batch_tokens (units are canonical; canonical_unit_size sets their size)": settings["micro_batch_tokens"],
        "allow_split_dependent": settings["allow_split_dependent"],
        "torch_compile (it chooses kernels by timing)": settings["torch_compile"],
        "use_liger_kernel": settings["use_liger_kernel"],
        "tf32": settings["tf32"],
        "fp16 (its loss scale moves with overflows)": settings["fp16"],
    }
    refuse_combination("bitwise_invariant=True", others, "Turn one of the two off.")
    size, group = settings["canonical_unit_size"], settings["num_generations"]
    if size is not None and (not isinstance(size, int) or not 1 <= size <= group):
        raise ConfigError(
            f"canonical_unit_size={size!r}: a unit holds completions of one group; use 1 to {group} (num_generations)."
        )


def _refuse_mesh(mesh: Any) -> None:
    """Raise a ConfigError where Accelerate's `ParallelismConfig`, or its launcher, splits tokens or layers."""
    launched = os.environ if os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "").lower() == "true" else {}
    for name in ("cp_size", "sp_size", "tp_size"):
        size = max(getattr(mesh, name, 1) or 1, int(launched.get(f"PARALLELISM_CONFIG_{name.upper()}", 1)))
        if size > 1:
            raise ConfigError(
                f"{name}={size} in Accelerate's ParallelismConfig: completions are laid out here after sampling, which "
                f"it does not follow. Leave it out; sequence_parallel_size={size} shares completions between processes."
            )


def check_sequence_parallel(settings: Mapping[str, Any]) -> None:
    _refuse_mesh(settings.get("parallelism_config"))
    require_whole("sequence_parallel_size", size := settings["sequence_parallel_size"])
    if size == 1:
        return
    forward, lag, bits = settings.get("forward", "auto"), settings.get("rollout_lag"), settings.get("bitwise_invariant")
    others = {
        f"forward={forward!r} (only packs share their tokens)": forward not in ("auto", "packed"),
        "bitwise_invariant=True (a weight's gradient is a sum over tokens, and each process rounds its part)": bits,
        "DeepSpeed (use FSDP2 or DDP)": asks_for("deepspeed", settings),
        f"rollout_lag={lag} (sampling ahead cannot exchange data between devices while training does)": lag,
        "torch_compile=True": settings.get("torch_compile"),
    }
    refuse_combination(f"sequence_parallel_size={size}", others, "Turn one of the two off.")


def check_lag(lag: Any, sharded: bool) -> None:
    require_whole("rollout_lag", lag, least=0)
    if lag and sharded:
        raise ConfigError(
            f"rollout_lag={lag} with FSDP or DeepSpeed: a forward is a collective, and two threads would run their "
            "collectives in different orders. Use rollout_lag=0, or DDP."
        )


def check_ahead(settings: Mapping[str, Any]) -> None:
    lag, vllm = settings["rollout_lag"], settings["use_vllm"]
    check_lag(lag, asks_for("fsdp", settings) or asks_for("deepspeed", settings))
    if not lag:
        return
    colocated = vllm and settings["vllm_mode"] != "server"
    trained_weights = settings["use_transformers_continuous_batching"]
    others = {
        "vllm_mode='colocate' (the engine shares the device with training; use a server)": colocated,
        "torch_compile (the copy of the model would be compiled again)": settings["torch_compile"],
        "cast_lm_head_to_fp32=True (TRL's head uses the weights being trained)": settings["cast_lm_head_to_fp32"],
        "use_transformers_continuous_batching (it samples with the weights being trained)": trained_weights,
    }
    refuse_combination(f"rollout_lag={lag}", others, "Change that, or use rollout_lag=0.")
