"""The contract with TRL, transformers and Accelerate: names and signatures that the package overrides, calls or reads.

`verify` compares it with the installed versions when a configuration or a trainer is built, before anything trains.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import transformers
import trl
from packaging.version import Version

from . import compat
from .compat import parameters_of
from .errors import ContractError

# what ran beside each: docs/versions.md
TESTED_TRL = ("1.15.0", "1.16.0")
NEWEST_TESTED = {"trl": TESTED_TRL[-1], "transformers": "5.23.0", "accelerate": "1.15.0"}


@dataclass(frozen=True)
class Point:
    """A function or method the package overrides or calls.

    Attributes:
        owner: the class or module that has it.
        parameters: the names of its first parameters, without `self`.
        closed: no further parameters may follow, because the override takes none.
    """

    owner: Any
    name: str
    parameters: tuple[str, ...]
    closed: bool = False


# taken now: scripts put this package's trainer in the place of TRL's
_GRPO = trl.GRPOTrainer

# methods of `trl.GRPOTrainer` (its own or transformers') that the package overrides
OVERRIDES: dict[str, Point] = {
    name: Point(_GRPO, name, tuple(parameters.split()), closed=True)
    for name, parameters in {
        "__init__": "model reward_funcs args train_dataset eval_dataset processing_class reward_processing_classes "
        "callbacks optimizers quantization_config peft_config tools rollout_func environment_factory",
        "create_accelerator_and_postprocess": "",
        "train": "resume_from_checkpoint trial ignore_keys_for_eval",
        "log": "logs start_time",
        "_save_checkpoint": "model trial",
        "_load_from_checkpoint": "resume_from_checkpoint model",
        "_load_best_model": "",
        "_issue_warnings_after_load": "load_result",
        "_push_from_checkpoint": "checkpoint_folder",
        "_get_output_dir": "trial",
        "_finalize_training": "trial num_train_samples start_time",
        "get_total_train_batch_size": "args",
        "get_train_dataloader": "",
        "get_eval_dataloader": "eval_dataset",
        "get_test_dataloader": "test_dataset",
        "_calculate_rewards": "inputs prompts completions completion_ids_list",
        "_generate_and_score_completions": "inputs",
        "_prepare_inputs": "generation_batch",
        "_generate": "prompts",
        "training_step": "model inputs num_items_in_batch",
        "prediction_step": "model inputs prediction_loss_only ignore_keys",
        "predict": "test_dataset ignore_keys metric_key_prefix",
        "evaluation_loop": "dataloader description prediction_loss_only ignore_keys metric_key_prefix",
        "_compute_loss": "model inputs",
    }.items()
} | {  # these overrides take any further parameters and pass them on
    name: Point(_GRPO, name, tuple(parameters.split()))
    for name, parameters in {
        "_init_training_state": "max_steps",
        "_run_epoch": "model epoch",
        "_generate_single_turn": "prompt_ids images multimodal_fields num_generations",
        "_get_per_token_logps_and_entropies": "model input_ids attention_mask logits_to_keep batch_size "
        "compute_entropy compute_aux_loss",
    }.items()
}


def _called(owner: Any, parameters: Mapping[str, str]) -> list[Point]:
    return [Point(owner, name, tuple(names.split())) for name, names in parameters.items()]


CALLED = [
    *_called(
        _GRPO,
        {
            "compute_loss": "model inputs return_outputs num_items_in_batch",
            "compute_loss_context_manager": "",
            "_log_metric": "name value",
            "_log_completion_extra": "column values",
            "_remove_unused_columns": "dataset description",
        },
    ),
    *_called(
        compat,
        {
            "unwrap_model_for_generation": "model accelerator gather_deepspeed3_params",
            "prepare_deepspeed": "model accelerator",
            "prepare_fsdp": "model accelerator",
            "supports_tool_calling": "processing_class",
            "_parse_response": "tokenizer ids prefix",
            "prepare_multimodal_messages": "messages images",
            "create_model_from_path": "model_id",
            "get_config_model_id": "config",
            "use_adapter": "model adapter_name",
            "profiling_context": "trainer name",
        },
    ),
    *_called(
        transformers.GenerationMixin,
        {
            "_prefill": "input_ids generation_config model_kwargs",
            "_update_model_kwargs_for_generation": "outputs model_kwargs",
            "prepare_inputs_for_generation": "input_ids next_sequence_length",
        },
    ),
]

# attributes of TRL's trainer that the package reads after it is built
ATTRIBUTES: tuple[str, ...] = (
    *("_dist", "_entropy_bonus_enabled", "_logs", "_metrics", "_pending_extra_logs", "_pending_metrics"),
    *("_standalone_tools", "_tokenizer", "accelerator", "args", "aux_loss_enabled", "callback_handler"),
    *("chat_template", "chat_template_kwargs", "environment_factories", "eos_token_ids", "epsilon_high"),
    *("epsilon_low", "eval_dataset", "importance_sampling_level", "is_deepspeed_enabled", "is_fsdp_enabled"),
    *("log_multimodal", "loss_type", "mask_truncated_completions", "max_completion_length"),
    *("max_tool_calling_iterations", "model", "model_wrapped", "multi_objective_aggregation", "num_generations"),
    *("num_generations_eval", "num_iterations", "off_policy_mask_threshold", "optimizer", "pad_to_multiple_of"),
    *("processing_class", "reward_func_names", "reward_funcs", "reward_processing_classes", "reward_weights"),
    *("rollout_func", "router_aux_loss_coef", "scale_rewards", "shuffle_dataset", "state", "temperature", "tools"),
    *("top_entropy_quantile", "train_dataset", "use_adaptive_entropy", "use_transformers_continuous_batching"),
    *("use_vllm", "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min"),
    *("vllm_importance_sampling_correction", "vllm_importance_sampling_mode"),
)

SAMPLING_ATTRIBUTES = {
    True: ("vllm_generation", "_last_loaded_step"),
    False: ("generation_config", "generation_kwargs"),
}  # by use_vllm
ENVIRONMENT_ATTRIBUTES = ("_env_tools", "_environment_pool")  # where there are environments


def broken_point(point: Point) -> str | None:
    """Why a function is not as the contract says, as a sentence; None if it is."""
    where, function = f"{point.owner.__name__}.{point.name}", getattr(point.owner, point.name, None)
    if function is None:
        return f"{where} is missing"
    actual, expected = parameters_of(function), list(point.parameters)
    if (actual if point.closed else actual[: len(expected)]) == expected:
        return None
    more = "" if point.closed else ", ..."
    return f"{where} takes ({', '.join(actual)}), not ({', '.join(expected)}{more})"


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "?"


def _explain(broken: Sequence[str]) -> str:
    versions = ", ".join(f"{name} {_installed(name)}" for name in NEWEST_TESTED)
    remedy = " ".join(f"'{name}=={tested}'" for name, tested in NEWEST_TESTED.items())
    return (
        f"grpo_ext does not fit the installed {versions}: {'; '.join(broken)}. TRL {' and '.join(TESTED_TRL)} are "
        f"tested and work: pip install {remedy}; or install a newer grpo_ext."
    )


@functools.cache
def verify() -> None:
    """Hold the installed TRL, transformers and Accelerate against the contract; some 30 milliseconds, once.

    Raises:
        ContractError: names every point that does not hold, the installed versions, and the versions that work.
    """
    broken = [broken_point(point) for point in (*OVERRIDES.values(), *CALLED)]
    if sentences := [sentence for sentence in broken if sentence is not None]:
        raise ContractError(_explain(sentences))


def verify_built(trainer: Any) -> None:
    """Check that TRL's constructor has set what the package reads.

    Raises:
        ContractError: names the attributes.
    """
    expected = (*ATTRIBUTES, *SAMPLING_ATTRIBUTES[bool(trainer.use_vllm)])
    if getattr(trainer, "environment_factories", None) is not None:
        expected += ENVIRONMENT_ATTRIBUTES
    missing = [name for name in expected if not hasattr(trainer, name)]
    if missing:
        raise ContractError(_explain([f"trl.GRPOTrainer sets no {', '.join(missing)}"]))


def untested() -> str | None:
    """A sentence where an installed library is newer than the newest one tested; None where none is."""
    versions = {name: _installed(name) for name in NEWEST_TESTED}
    newer = [
        f"{name} {versions[name]} is newer than {tested}"
        for name, tested in NEWEST_TESTED.items()
        if versions[name] != "?" and Version(versions[name]) > Version(tested)
    ]
    if not newer:
        return None
    return (
        f"{', '.join(newer)}, the newest version that grpo_ext was tested beside. The names and signatures that it "
        "relies on are in place; `grpo-ext check` shows on this machine that the split does not matter."
    )
