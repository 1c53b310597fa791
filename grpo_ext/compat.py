"""What the package relies on in TRL, transformers and Accelerate, and what differs between their versions.

The only module that imports from inside TRL. `verify_overrides` compares the trainer's overrides with the installed
versions: an override of a method that was renamed would never be called, and the run would silently train as TRL does.
"""

import ast
import functools
import importlib
import importlib.util
import inspect
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, get_args

import torch
import transformers
import trl
from packaging.specifiers import SpecifierSet

from .errors import ConfigError, ContractError
from .runtime.attributes import temporarily_set_each
from .runtime.messages import logger

# as in pyproject.toml
TESTED = {"trl": ">=1.15,<1.17", "transformers": ">=5.20,<6"}
WORKS = " and ".join(name + versions for name, versions in TESTED.items())


def misfit(*differences: str) -> ContractError:
    """The error for differences of the installed versions from what the package relies on."""
    return ContractError(
        f"grpo_ext does not fit the installed trl {trl.__version__} and transformers {transformers.__version__}: "
        f"{'; '.join(differences)}. Install {WORKS}, or a newer grpo_ext."
    )


try:
    from trl import SyncRefModelCallback as SyncRefModelCallback
    from trl.chat_template_utils import parse_response as _parse_response
    from trl.chat_template_utils import supports_tool_calling as supports_tool_calling
    from trl.data_utils import prepare_multimodal_messages as prepare_multimodal_messages
    from trl.extras.profiling import profiling_context
    from trl.generation import vllm_generation
    from trl.generation.vllm_client import VLLMClient
    from trl.generation.vllm_generation import VLLMGeneration as VLLMGeneration
    from trl.models import prepare_deepspeed as prepare_deepspeed
    from trl.models import prepare_fsdp as prepare_fsdp
    from trl.models import unwrap_model_for_generation
    from trl.trainer.utils import create_model_from_path as create_model_from_path
    from trl.trainer.utils import get_config_model_id, use_adapter
    from trl.trainer.utils import strip_images_from_messages as strip_images_from_messages
except (ImportError, RuntimeError) as error:  # TRL's lazy modules raise RuntimeError
    raise misfit(str(error)) from error

_OLD_NAMES: Any = ("ignore", re.compile(r"`(is_)?gradient_checkpointing\w*` is deprecated"), FutureWarning, None, 0)

# methods of the trainer that override none of `trl.GRPOTrainer`, as all others do
_ADDED = {"_build", "_assemble", "_with_events", "_log_step", "_loss_of", "_checkpoint_folder", "generate", "rerun"}

# the argument of models and of `generate` that takes a cache: "cache" since transformers 5.24
_PREPARED: Any = transformers.GenerationMixin.prepare_inputs_for_generation
CACHE = "cache" if "cache" in inspect.signature(_PREPARED).parameters else "past_key_values"
# transformers' cache layer that stores nothing; None in transformers 5.20
DummyLayer: type | None = getattr(transformers.cache_utils, "DummyLayer", None)
_PARSES_BY_TOOLS = "tools" in inspect.signature(_parse_response).parameters  # since TRL 1.16

_VARIABLE = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}

# the arguments of TRL's log-probabilities that are passed on to a model that takes images
IMAGE_ARGUMENTS = (
    "pixel_values",
    "image_grid_thw",
    "pixel_attention_mask",
    "spatial_shapes",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)
_OF_IMAGES = (*IMAGE_ARGUMENTS, "num_images", "num_tiles")
# how many values methods of TRL's return; the last is VLLMGeneration's
_RETURNED = {"_generate_single_turn": 2, "generate": 4}


def images_among(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {name: batch[name] for name in _OF_IMAGES if name in batch}


def refuse_unknown(images: Mapping[str, Any]) -> None:
    """Refuse an argument of TRL's log-probabilities that a newer TRL has added, and that would have no effect."""
    if unknown := [name for name, value in images.items() if name not in _OF_IMAGES and value is not None]:
        raise misfit(f"_get_per_token_logps_and_entropies was called with {', '.join(unknown)}")


def sample_no_image_tokens(view: Any) -> None:
    """Never sample the token of an image, as TRL since 1.16, unless the user suppresses other tokens."""
    if not view.use_vllm and (image := image_token(view.model)) is not None:
        others = view.generation_config.suppress_tokens or []
        view.generation_config.suppress_tokens = sorted({*others, image})


def image_token(model: Any) -> int | None:
    return getattr(model.config, "image_token_id", None)


def processing_class_of(model: Any, args: trl.GRPOConfig) -> Any:
    """Load the tokenizer or processor of a model (name or object) as TRL does; a ConfigError if it has no name."""
    kwargs: Any = args.model_init_kwargs or {}
    name = model if isinstance(model, str) else get_config_model_id(model.config)
    if not name:
        raise ConfigError(
            "the model's configuration has an empty _name_or_path; pass the tokenizer as processing_class."
        )
    options: Any = {"truncation_side": "left", "padding_side": "left"}
    options["revision"] = kwargs.get("revision") if isinstance(model, str) else None
    trusted = getattr(args, "trust_remote_code", False)
    return transformers.AutoProcessor.from_pretrained(name, trust_remote_code=trusted, **options)


def parse_response(
    tokenizer: Any, ids: list[int], prefix: list[int], tools: Sequence[Callable[..., Any]]
) -> dict[str, Any]:
    """The message in a completion; its text, without tool calls, where the tokenizer's parser fails."""
    known: dict[str, Any] = {"tools": tools} if _PARSES_BY_TOOLS else {}
    try:
        return _parse_response(tokenizer, ids, prefix=prefix, **known)
    except Exception as error:  # TRL handles ValueError and TypeError alone
        logger.warning_once(
            f"the tokenizer's parser of responses raises {type(error).__name__}: such completions are texts that call "
            "no tool. Logged once for each kind of error."
        )
        return {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}


def checkpoints_layers(model: Any) -> bool:
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


@contextmanager
def checkpointing_layers(model: Any, kwargs: Mapping[str, Any] | None) -> Iterator[None]:
    """Inside, gradient checkpointing is on with these arguments of the Trainer, or off (None); afterwards as before."""
    off = {"gradient_checkpointing": False, "_gradient_checkpointing_func": None}
    with ExitStack() as restored:
        modules = (module for module in model.modules() if hasattr(module, "gradient_checkpointing"))
        restored.enter_context(temporarily_set_each((module, off) for module in modules))
        if kwargs is not None:
            others = {**kwargs}
            by_name = {name: others.pop(name) for name in ("every_n_layers", "offload") if name in others}
            with hiding_deprecations():
                model.gradient_checkpointing_enable(others, **by_name)
        yield


@contextmanager
def unwrapped_for_generation(model: Any, accelerator: Any, **options: Any) -> Iterator[Any]:
    """TRL's context, which leaves gradient checkpointing alone: it would enable it again by the settings."""
    with checkpointing_layers(accelerator.unwrap_model(model), None), ExitStack() as context:
        with hiding_deprecations():
            unwrapped = context.enter_context(unwrap_model_for_generation(model, accelerator, **options))
        yield unwrapped


@contextmanager
def generating(trainer: Any) -> Iterator[Any]:
    args, wrapped, kwargs = trainer.args, trainer.model_wrapped, trainer.generation_kwargs
    options = {"gather_deepspeed3_params": args.ds3_gather_for_generation, "generation_kwargs": kwargs}
    with (
        profiling_context(trainer, "transformers.generate"),
        unwrapped_for_generation(wrapped, trainer.accelerator, **options) as model,
        torch.no_grad(),
        trainer._dist.summon_full_params(wrapped, recurse=False),
    ):
        yield model


def as_reference(model: Any) -> AbstractContextManager[Any]:
    """Inside, a model with adapters acts as its reference: without them, or with a copy of the loaded one."""
    return use_adapter(model, adapter_name="ref" if "ref" in model.peft_config else None)


@contextmanager
def hiding_deprecations() -> Iterator[None]:
    """Hide transformers' warnings about old names of gradient checkpointing: TRL uses them, and no user can act.

    One entry comes and goes. `catch_warnings` would drop filters that others set meanwhile, on any thread, and each
    change that it makes lets Python show every warning again.
    """
    filters: Any = warnings.filters
    filters.insert(0, _OLD_NAMES)
    try:
        yield
    finally:
        with suppress(ValueError):  # others have changed the list
            filters.remove(_OLD_NAMES)


def client_of(generation: Any) -> Any:
    """This process's client of TRL's vLLM server; TRL itself creates one on the main process only."""
    if (client := getattr(generation, "vllm_client", None)) is not None:
        return client
    url = generation.server_base_url or f"http://{generation.server_host}:{generation.server_port}"
    return VLLMClient(base_url=url, connection_timeout=generation.server_timeout)


def why_no_experts(mode: str) -> str | None:
    """Why vLLM does not return the experts of its tokens, as a clause; None if it does. `mode`: TRL's `vllm_mode`."""
    if mode == "server":
        return "TRL's client of a vLLM server returns no experts"
    if not hasattr(vllm_generation, "LLM"):
        return None  # not installed, which TRL reports
    vllm = importlib.import_module("vllm")
    if "enable_return_routed_experts" not in parameters_of(vllm.EngineArgs):
        return f"vLLM {vllm.__version__} returns no experts (EngineArgs has no enable_return_routed_experts)"
    on_cpu = importlib.import_module("vllm.platforms").current_platform.is_cpu()
    return f"vLLM {vllm.__version__} returns no experts on a CPU" if on_cpu else None


def lora_request(name: str, number: int, path: Path) -> Any:
    return importlib.import_module("vllm.lora.request").LoRARequest(name, number, str(path))


def server_info(client: Any) -> dict[str, Any]:
    """`vllm_config` and `vllm_env`; TRL's `get_server_info` lacks the latter, and TRL 1.15 has none."""
    answer = client.session.get(f"{client.base_url}/server_info", params={"config_format": "json"})
    return {"vllm_config": {}, "vllm_env": {}} | (answer.json() if answer.status_code == 200 else {})


def is_batch_invariant(client: Any | None) -> bool:
    """Whether vLLM, in this process or behind a client, declares that its bits do not depend on the batch."""
    if client is not None:
        return bool(server_info(client)["vllm_env"].get("VLLM_BATCH_INVARIANT"))
    platform = importlib.import_module("vllm.platforms").current_platform
    return bool(platform.is_cuda() and importlib.import_module("vllm.envs").VLLM_BATCH_INVARIANT)


def served_rank(rank: int) -> int:
    """The smallest `max_lora_rank` of vLLM that serves adapters of this rank; a ConfigError if there is none."""
    ranks = get_args(importlib.import_module("vllm.config.lora").MaxLoRARanks)
    if rank > max(ranks):
        raise ConfigError(f"vllm_lora=True with an adapter of rank {rank}: vLLM serves {max(ranks)} at most.")
    return min(served for served in ranks if served >= rank)


def parameters_of(function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind not in _VARIABLE and p.name != "self"]


def _mismatch(ours: type, name: str) -> str | None:
    """How a method of TRL's trainer differs from its override, as a sentence; None if the override fits.

    A parameter that TRL has added fits if it has a default.
    """
    theirs = getattr(ours.__base__, name, None)
    if theirs is None:
        return f"GRPOTrainer.{name} is missing"
    override, parameters = getattr(ours, name), inspect.signature(theirs).parameters
    # TRL's constructor has no teacher
    installed, expected = parameters_of(theirs), [p for p in parameters_of(override) if p != "teacher_model"]
    passed_on = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in inspect.signature(override).parameters.values())
    added = [] if passed_on else installed[len(expected) :]
    if installed[: len(expected)] != expected or any(parameters[n].default is inspect.Parameter.empty for n in added):
        return f"GRPOTrainer.{name} takes ({', '.join(installed)}), not ({', '.join(expected)})"
    return _returns_otherwise(name, theirs) if name in _RETURNED else None


def _returns_otherwise(name: str, method: Any) -> str | None:
    """Whether a method returns another number of values, as a sentence; None if its source does not show it."""
    try:
        [function] = ast.parse(textwrap.dedent(inspect.getsource(method))).body
    except (OSError, TypeError):
        return None
    returned = getattr(getattr(function, "body", [None])[-1], "value", None)
    if not isinstance(returned, ast.Tuple) or len(returned.elts) == _RETURNED[name]:
        return None
    return f"{name} returns {ast.unparse(returned)}, not {_RETURNED[name]} values"


def values_of(name: str, returned: Any) -> Any:
    """What a method of TRL's returned; a ContractError for another number of values."""
    if not isinstance(returned, tuple) or len(returned) != _RETURNED[name]:
        number = len(returned) if isinstance(returned, tuple) else 1
        raise misfit(f"{name} returned {number} values, not {_RETURNED[name]}")
    return returned


def overrides(ours: type) -> list[str]:
    """The methods of `trl.GRPOTrainer`, inherited ones included, that the trainer overrides."""
    return [name for name, value in vars(ours).items() if inspect.isfunction(value) and name not in _ADDED]


@functools.cache
def verify_overrides(ours: type) -> None:
    """Raise a ContractError that names every method that the installed versions lack or have changed."""
    broken = [_mismatch(ours, name) for name in overrides(ours)]
    broken.append(_returns_otherwise("generate", VLLMGeneration.generate))
    if differences := list(filter(None, broken)):
        raise misfit(*differences)


def warn_of_untested_versions() -> None:
    """Warn once, on the main process, of versions outside of `TESTED`."""
    installed = {"trl": trl.__version__, "transformers": transformers.__version__}
    outside = [name for name, versions in TESTED.items() if installed[name] not in SpecifierSet(versions)]
    if outside:
        logger.warning_once(
            f"{' and '.join(f'{name} {installed[name]}' for name in outside)}: not tested with this grpo_ext, which "
            f"works with {WORKS}. `grpo-ext check` shows whether the split matters."
        )


@functools.cache
def triton_head() -> Callable[..., Any] | None:
    """TRL's Triton head for accelerators, if the installed TRL has the known version of it."""
    if importlib.util.find_spec("triton") is None:
        return None
    try:
        function = importlib.import_module("trl.kernels.chunked_logprob").ChunkedLogProbFunction
    except (ImportError, AttributeError):  # TRL 1.15 has none
        return None
    known = ["hidden", "weight", "bias", "targets", "temperature", "chunk_size"]
    known += ["final_logit_softcapping", "logit_scale", "outputs"]
    if (installed := parameters_of(function.forward)[1:]) == known:
        return function.apply
    logger.warning_once(
        f"TRL's Triton head has changed in trl {trl.__version__}: it takes ({', '.join(installed)}), not "
        f"({', '.join(known)}). The head of this package runs instead."
    )
    return None
