"""What the package relies on in TRL, transformers and Accelerate, and what differs between their versions.

The only module that looks at a version or imports from inside TRL. `verify` holds the installed versions against the
contract below, by name and signature, when a configuration or a trainer is built, before anything trains.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import transformers
import trl
from packaging.version import Version

from .errors import ConfigError, ContractError

try:
    from trl import SyncRefModelCallback as SyncRefModelCallback
    from trl.chat_template_utils import parse_response as _parse_response
    from trl.chat_template_utils import supports_tool_calling as supports_tool_calling
    from trl.data_utils import prepare_multimodal_messages as prepare_multimodal_messages
    from trl.extras.profiling import profiling_context
    from trl.generation.vllm_client import VLLMClient
    from trl.models import prepare_deepspeed as prepare_deepspeed
    from trl.models import prepare_fsdp as prepare_fsdp
    from trl.models import unwrap_model_for_generation
    from trl.trainer.utils import create_model_from_path as create_model_from_path
    from trl.trainer.utils import get_config_model_id, use_adapter
except (ImportError, RuntimeError) as error:  # the latter from TRL's lazy modules
    raise ContractError(
        f"grpo_ext does not fit the installed trl {trl.__version__}: {error}. TRL 1.15 and 1.16 are tested and work."
    ) from error

# what ran beside each: docs/versions.md
TESTED_TRL = ("1.15.0", "1.16.0")
NEWEST_TESTED = {"trl": TESTED_TRL[-1], "transformers": "5.23.0", "accelerate": "1.15.0"}


# of a layer that keeps nothing; older versions of transformers have none
DummyLayer: type | None = getattr(transformers.cache_utils, "DummyLayer", None)
_PARSES_BY_TOOLS = "tools" in inspect.signature(_parse_response).parameters  # since TRL 1.16

# what TRL's scoring passes on to a model that takes images, by the names of the model's arguments
_COUNTS = ("num_images", "num_tiles")
_SCORER: Any = trl.GRPOTrainer._get_per_token_logps_and_entropies
IMAGE_ARGUMENTS = tuple(
    name
    for name, parameter in inspect.signature(_SCORER).parameters.items()
    if parameter.default is None and name not in ("batch_size", *_COUNTS)
)


def images_among(batch: Mapping[str, Any]) -> dict[str, Any]:
    """What there is of images in a batch of TRL's, as arguments of its scoring."""
    return {name: batch[name] for name in (*IMAGE_ARGUMENTS, *_COUNTS) if name in batch}


def sample_no_image_tokens(trainer: Any) -> None:
    """Never sample the token that stands for an image, which the images of the prompt would not match.

    TRL does so since 1.16, unless the user has other tokens that are not sampled.
    """
    if not trainer.use_vllm and (image := image_token(trainer.model)) is not None:
        others = trainer.generation_config.suppress_tokens or []
        trainer.generation_config.suppress_tokens = sorted({*others, image})


def image_token(model: Any) -> int | None:
    """The id of the token that stands for an image, or for a part of one; None for a model without such a token."""
    return getattr(model.config, "image_token_id", None)


def forget_absent_layers(model: Any) -> None:
    """Let FSDP wrap the layers that a model has.

    One with an image tower also names those of the tower's family that it lacks (CLIP's text embeddings), for which
    Accelerate and PEFT refuse it.
    """
    model._no_split_modules = {type(module).__name__ for module in model.modules()} & set(model._no_split_modules or ())


def processing_class_of(model: Any, args: trl.GRPOConfig) -> Any:
    """The tokenizer or processor of a model (its name or an object), as TRL's constructor finds it.

    Raises:
        ConfigError: the model is an object that does not know where it came from.
    """
    kwargs: Any = args.model_init_kwargs or {}
    name = model if isinstance(model, str) else get_config_model_id(model.config)
    if not name:
        raise ConfigError(
            "the model is an object whose configuration names no place to load a tokenizer from (_name_or_path is "
            "empty); pass the tokenizer as processing_class."
        )
    return transformers.AutoProcessor.from_pretrained(
        name,
        revision=kwargs.get("revision") if isinstance(model, str) else None,
        truncation_side="left",
        padding_side="left",
        trust_remote_code=getattr(args, "trust_remote_code", False),
    )


def parse_response(
    tokenizer: Any, ids: list[int], prefix: list[int], tools: Sequence[Callable[..., Any]]
) -> dict[str, Any]:
    """TRL's: the message that token ids stand for, plain text where they cannot be parsed.

    Args:
        prefix: the ids before them.
        tools: whose schemas give arguments their types; TRL 1.15 does not look at them.
    """
    known: dict[str, Any] = {"tools": tools} if _PARSES_BY_TOOLS else {}
    return _parse_response(tokenizer, ids, prefix=prefix, **known)


@contextmanager
def unwrapped_for_generation(
    model: Any, accelerator: Any, gradient_checkpointing_kwargs: dict[str, Any] | None, **options: Any
) -> Iterator[Any]:
    """TRL's `unwrap_model_for_generation`, after which gradient checkpointing is as it was.

    TRL 1.15 turns it on again without its keyword arguments.
    """
    knows = "gradient_checkpointing_kwargs" in inspect.signature(unwrap_model_for_generation).parameters
    if knows:
        options["gradient_checkpointing_kwargs"] = gradient_checkpointing_kwargs
    inner = accelerator.unwrap_model(model)
    checkpointing = inner.is_gradient_checkpointing
    with unwrap_model_for_generation(model, accelerator, **options) as unwrapped:
        yield unwrapped
    if checkpointing and not knows:
        inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs)


@contextmanager
def generating(trainer: Any) -> Iterator[Any]:
    """The contexts of TRL's generation with transformers: the model unwrapped, no gradients, parameters gathered."""
    with (
        profiling_context(trainer, "transformers.generate"),
        unwrapped_for_generation(
            trainer.model_wrapped,
            trainer.accelerator,
            trainer.args.gradient_checkpointing_kwargs,
            gather_deepspeed3_params=trainer.args.ds3_gather_for_generation,
            generation_kwargs=trainer.generation_kwargs,
        ) as model,
        torch.no_grad(),
        trainer._dist.summon_full_params(trainer.model_wrapped, recurse=False),
    ):
        yield model


class View:
    """An object seen with some attributes replaced. What is set is set on the object, what is replaced on the view.

    TRL's `VLLMGeneration.generate` reads `self.llm`: it is run on a view that has another engine (`on_view`), because
    setting it on the object, and back, would show to everything else that reads it meanwhile.
    """

    def __init__(self, target: Any, instead: dict[str, Any]) -> None:
        vars(self)["_target"], vars(self)["_instead"] = target, instead

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # for `super()` in the methods that run on it
        return type(self._target)

    def __getattr__(self, name: str) -> Any:  # called for attributes that a View itself has not
        seen = vars(self)
        if "_target" not in seen or (name.startswith("__") and name.endswith("__")):  # while it is copied or pickled
            raise AttributeError(name)
        return seen["_instead"][name] if name in seen["_instead"] else getattr(seen["_target"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self)["_instead"]:
            vars(self)["_instead"][name] = value
        else:
            setattr(vars(self)["_target"], name, value)


def on_view(method: Any, instead: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Call a bound method on a view of its object; what it calls in turn sees the object itself.

    Raises:
        ContractError: the method has been replaced by something that is bound to no object.
    """
    if not hasattr(method, "__func__"):
        raise ContractError(f"{method!r} was put in the place of a method that grpo_ext calls on a view of its object.")
    return method.__func__(View(method.__self__, instead), *args, **kwargs)


@contextmanager
def as_reference(model: Any) -> Iterator[None]:
    """Inside, a model with adapters is its own reference: without them, or with a copy of the loaded one."""
    with use_adapter(model, adapter_name="ref" if "ref" in model.peft_config else None):
        yield


def client_of(generation: Any) -> Any:
    """The client by which this process asks TRL's vLLM server; TRL gives the main process alone one."""
    if (client := getattr(generation, "vllm_client", None)) is not None:
        return client
    url = generation.server_base_url or f"http://{generation.server_host}:{generation.server_port}"
    return VLLMClient(base_url=url, connection_timeout=generation.server_timeout)


@functools.cache
def triton_head() -> Callable[..., Any] | None:
    """TRL's head for accelerators, where an installed TRL brings the one that is known here. Not run on a GPU."""
    if importlib.util.find_spec("triton") is None:
        return None
    try:
        function = importlib.import_module("trl.kernels.chunked_logprob").ChunkedLogProbFunction
    except (ImportError, AttributeError):  # TRL 1.15 has none there
        return None
    known = ["hidden", "weight", "bias", "targets", "temperature", "chunk_size"]
    known += ["final_logit_softcapping", "logit_scale", "outputs"]
    return function.apply if parameters_of(function.forward)[1:] == known else None


# ---- The contract ---------------------------------------------------------------------------------------------------


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
        "_load_optimizer_and_scheduler": "checkpoint",
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
        sys.modules[__name__],
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
    *("log_multimodal", "loss_type", "lr_scheduler", "mask_truncated_completions", "max_completion_length"),
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


def parameters_of(function: Callable[..., Any]) -> list[str]:
    """Names of the parameters, without `self` and without those that take any number."""
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind not in variable and p.name != "self"]


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


class _Double(ModuleType):
    """torch, whose float32 is float64."""

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name in ("float32", "float") else getattr(torch, name)


@contextmanager
def float64_throughout(model: Any) -> Iterator[Any]:
    """The model in float64, also where transformers computes in float32 whatever the weights are (norms, softmax).

    For comparisons alone: a patched global, because those places ask for `torch.float32` by name.
    """
    model.double()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # grouped products have no float64
    modules: set[Any] = {sys.modules[type(part).__module__] for part in model.modules()}
    used = {getattr(value, "__module__", None) or "" for module in modules for value in vars(module).values()}
    modules |= {sys.modules[name] for name in used if name.startswith("transformers.")}
    with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        for module in modules:
            if hasattr(module, "torch") and module.__name__.startswith("transformers."):
                module.torch = _Double("torch")
        try:
            yield model
        finally:
            for module in modules:
                if isinstance(getattr(module, "torch", None), _Double):
                    module.torch = torch


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
