"""Checks of the values in a GRPOConfig, by the table of settings and by what several settings mean together.

Checked before anything is loaded. Rules for sizes are in batching.sizes, and rules that need a model are in checks.
"""

import dataclasses
import functools
import inspect
import math
import os
import re
from numbers import Real
from typing import Any

import trl
from transformers import TrainingArguments

from .algorithms.advantages import check_estimator, takes_keyword
from .algorithms.losses import LossConfig
from .algorithms.pass_at_k import logged_k
from .algorithms.policy_losses import POLICY_LOSSES, check_policy_loss
from .batching.sizes import Settings, check_lag, require_whole
from .compat import WORKS
from .errors import ConfigError, UnknownSettingError, did_you_mean
from .runtime.tracebacks import hide_frames
from .settings import check_ranges, refuse_excluded, row_of

_SETTINGS = dataclasses.fields(trl.GRPOConfig)  # as it is now: a script may put this package's in its place


def refuse_newer(settings: Settings) -> None:
    """Refuse settings of a newer TRL, which nothing here may implement, unless they have their defaults."""
    for spec in _SETTINGS:
        if row_of(spec.name) is None and spec.name not in TrainingArguments.__dataclass_fields__:
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


def check_values(settings: Settings) -> None:
    check_ranges(settings)
    weights = settings["reward_weights"] or ()
    if not isinstance(weights, list | tuple) or not all(
        isinstance(weight, Real) and math.isfinite(weight) for weight in weights
    ):
        raise ConfigError(f"reward_weights={weights!r}: use a list of finite numbers; 0 leaves a reward out.")
    check_sequence_parallel(settings)
    optim = str(getattr(settings["optim"], "value", settings["optim"]))
    if "lomo" in optim or optim.endswith("layerwise"):
        raise ConfigError(
            f"optim={optim} updates the model before the step's gradient is complete; use another optimizer."
        )


def check_best_metric(settings: Settings) -> None:
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


def check_algorithm(settings: Settings) -> None:
    level, aggregation = settings["importance_sampling_level"], settings["loss_aggregation"]
    loss = LossConfig(
        settings["loss_type"],
        level,
        aggregation=aggregation,
        trust_region=settings["trust_region"],
        trust_region_threshold=settings["trust_region_threshold"],
        delta=settings["delta"],
    )
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


def asks_for(engine: str, settings: Settings) -> bool:
    """Whether launcher or settings turn on "fsdp" or "deepspeed" (Accelerate turns the latter off with use_cpu)."""
    return os.environ.get(f"ACCELERATE_USE_{engine.upper()}", "false").lower() == "true" or bool(settings.get(engine))


def check_bitwise(settings: Settings) -> None:
    vllm, invariant = settings["use_vllm"], os.environ.get("VLLM_BATCH_INVARIANT", "0") == "1"
    varies = vllm and settings["vllm_mode"] == "colocate" and not invariant  # a server is asked later
    facts = with_engines(settings) | {"vllm_varies": varies, "vllm_unseeded": vllm and not settings["vllm_seeds"]}
    refuse_excluded("bitwise_invariant", "bitwise_invariant=True", facts)
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


def check_sequence_parallel(settings: Settings) -> None:
    _refuse_mesh(settings.get("parallelism_config"))
    require_whole("sequence_parallel_size", size := settings["sequence_parallel_size"])
    if size > 1:
        other = settings.get("forward", "auto") not in ("auto", "packed")
        facts = with_engines(settings) | {"other_form": other}
        refuse_excluded("sequence_parallel_size", f"sequence_parallel_size={size}", facts)


def with_engines(settings: Settings) -> dict[str, Any]:
    """The settings, with whether FSDP or DeepSpeed is on, by the launcher too."""
    return {**settings, **{engine: asks_for(engine, settings) for engine in ("fsdp", "deepspeed")}}


def check_ahead(settings: Settings) -> None:
    lag, vllm = settings["rollout_lag"], settings["use_vllm"]
    check_lag(lag, asks_for("fsdp", settings) or asks_for("deepspeed", settings))
    if not lag:
        return
    facts = {**settings, "colocated": vllm and settings["vllm_mode"] != "server"}
    refuse_excluded("rollout_lag", f"rollout_lag={lag}", facts, "Change that, or use rollout_lag=0.")
