"""Sends trained weights to a vLLM engine: a LoRA adapter by itself, or weights with the adapter merged into copies.

Differs from TRL, which always sends merged weights (how: upstream.vllm_engine). Called by rollouts.build.
"""

import atexit
import shutil
import tempfile
import uuid
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import save_file
from torch import nn

from .. import compat
from ..errors import ConfigError, RolloutError
from ..runtime.collectives import gather_lists
from ..upstream.vllm_engine import MergingGeneration, starting_vllm_with
from ..view import TrainerView
from .vllm import mask_bound

# fields of PEFT's LoraConfig that may have any value: vLLM reads them, or they do not change an adapter's output
_SERVED = {
    *("r", "lora_alpha", "use_rslora", "lora_dropout", "target_modules", "exclude_modules", "layers_to_transform"),
    *("layers_pattern", "task_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode"),
    *("peft_version", "megatron_core", "qalora_group_size", "init_lora_weights"),
}
_UNCHANGED_BASE = (True, False, "gaussian")  # initialisations of an adapter that leave the base as it was


def why_not_alone(model: Any, max_rank: int | None = None) -> str | None:
    """Why vLLM cannot serve the adapter of a model by itself, as a clause; None where it can.

    vLLM ignores settings of PEFT that it does not know, so everything but plain LoRA of linear layers is refused.
    `max_rank` is the engine's; None: an engine is started with the rank that the adapter needs.
    """
    if not isinstance(model, PeftModel):
        return "the model has no adapter"
    if len(model.active_adapters) != 1 or type(config := model.peft_config[model.active_adapters[0]]) is not LoraConfig:
        return f"the adapter is not one LoRA, but {', '.join(model.active_adapters)}"
    defaults = LoraConfig().to_dict()
    for name, value in config.to_dict().items():
        if name not in _SERVED and value != defaults.get(name) and value:
            return f"its setting {name}={value!r} is not supported by vLLM"
    if config.init_lora_weights not in _UNCHANGED_BASE:
        return f"init_lora_weights={config.init_lora_weights!r} changed the base, and the engine has the original"
    kinds = {type(layer.get_base_layer()) for layer in model.modules() if isinstance(layer, BaseTunerLayer)}
    if others := [kind.__name__ for kind in kinds if not issubclass(kind, nn.Linear)]:
        return f"it adapts {', '.join(sorted(others))}, and vLLM serves LoRA of linear layers only"
    if max_rank is not None and config.r > max_rank:
        return f"its rank is {config.r}, and the engine's max_lora_rank {max_rank}"
    return None


@dataclass
class AdapterVersions:
    """The adapter that an engine samples with; every time weights are sent it has a new version.

    The name of a version contains a random token of this run. So a server never samples with an adapter that it kept
    from another run, or from this one before a resume.
    """

    folder: Path  # versions are saved here, and a server reads them here
    run: str  # the token
    client: Any | None = None  # this process's client of a server
    number: int = field(default=0, init=False)  # the version that the engine has; 0: none yet

    def send(self, generation: "Generation") -> None:
        earlier, self.number = self._name, self.number + 1
        writes = self.client is None or generation.accelerator.is_main_process
        if writes:
            shutil.rmtree(self.folder, ignore_errors=True)  # no request names earlier versions any more
        path = generation.save_adapter(self.folder / self._name, writes)
        if self.client is None:
            generation.llm.adapter = compat.lora_request(self._name, self.number, path)
        else:
            if writes:
                self._load(path, earlier)
            self.client.model = self._name

    @property
    def _name(self) -> str:
        return f"grpo-ext-{self.run}-v{self.number}"

    def _load(self, path: Path, earlier: str) -> None:
        client: Any = self.client
        body = {"lora_name": self._name, "lora_path": str(path)}
        try:
            answer = client.session.post(f"{client.base_url}/v1/load_lora_adapter", json=body)
            problem = "" if answer.status_code == 200 else f"{answer.status_code}: {answer.text}"
        except OSError as error:  # after TRL's retries
            problem = str(error)
        if problem:
            raise RolloutError(
                f"the vLLM server did not load the adapter {path} ({problem}). Start it with "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, where it can read that folder, or set vllm_lora=False."
            )
        if self.number > 1:
            client.session.post(f"{client.base_url}/v1/unload_lora_adapter", json={"lora_name": earlier})


class ColocatedEngine:
    """vLLM's engine in this process, with the seeds and the adapter that TRL's calls lack."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.seeds: Any = None  # one for each row of the next call; None: vLLM draws all rows from one generator
        self.adapter: Any = None  # vLLM's `LoRARequest`; None: without one
        self.completions: list[Any] = []  # of the latest call, with masks and experts where they were asked for

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def generate(self, prompts: Any, sampling_params: Any, **options: Any) -> Any:
        if self.seeds is not None:
            seeds, sampling_params = self.seeds, [sampling_params.clone() for _ in self.seeds]
            for params, seed in zip(sampling_params, seeds, strict=True):
                params.seed = seed
        outputs = self.engine.generate(prompts, sampling_params=sampling_params, lora_request=self.adapter, **options)
        self.completions = [completion for output in outputs for completion in output.outputs]
        return outputs


class Generation(MergingGeneration):
    """The engine of a trainer, which gets an adapter by itself or merged weights."""

    versions: AdapterVersions | None  # of the adapter that is sent by itself; None where weights are sent
    mask_bound: int | None  # the most ids of a replayed mask; None: no mask is replayed
    unfiltered: bool  # masks are replayed, and every token is sampled from the whole vocabulary

    @classmethod
    def of(
        cls, generation: Any, versions: AdapterVersions | None, mask_bound: int | None, unfiltered: bool
    ) -> "Generation":
        if isinstance(generation, cls):  # the trainer is assembled again, to run a step again
            return generation
        # TRL's trainer starts the engine and has no argument for the class that does, so the attributes move to an
        # object of this one; `__init__` would start a second engine
        new = cls.__new__(cls)
        vars(new).update(vars(generation), versions=versions, mask_bound=mask_bound, unfiltered=unfiltered)
        if new.mode == "colocate":
            new.llm = new.llm if isinstance(new.llm, ColocatedEngine) else ColocatedEngine(new.llm)
        if mask_bound is not None:  # vLLM returns masks only with a `top_k`
            new.generation_kwargs = {**new.generation_kwargs, "top_k": mask_bound}
        return new

    def sync_weights(self) -> None:
        if self.versions is None:
            super().sync_weights()
        else:
            self.versions.send(self)

    def save_adapter(self, folder: Path, writes: bool) -> Path:
        """Gather the adapter on all processes, save it as PEFT does where `writes`, and return its folder."""
        model: Any = self.model
        (name,) = model.active_adapters
        state = {key: value for key, value in model.state_dict(keep_vars=True).items() if "lora_" in key}
        with self._dist.gather_params(list(state.values())):
            whole = {key: self._whole(value).cpu() for key, value in state.items()}
        if writes:
            folder.mkdir(parents=True)
            tensors = get_peft_model_state_dict(model, whole, name)
            save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "adapter_model.safetensors")
            model.peft_config[name].save_pretrained(str(folder))
        return folder.absolute()


def versions_of(view: TrainerView, client: Any | None) -> AdapterVersions | None:
    """The versions of an adapter that is sent by itself (`client`: to a server); None where weights are sent."""
    args, model = view.args, view.policy
    if args.vllm_lora is False or (args.vllm_lora is None and client is None):
        return None
    if client is not None:
        reason = _why_not_served(model, compat.server_info(client)["vllm_config"])
    elif args.vllm_enable_sleep_mode:
        reason = "vllm_enable_sleep_mode=True drops the engine's weights, so all are sent again"
    else:
        reason = why_not_alone(model)
    if reason is not None:
        if args.vllm_lora:
            raise ConfigError(f"vllm_lora=True cannot be kept: {reason}. Set it to None or False.")
        return None
    (run, *_) = gather_lists([uuid.uuid4().hex[:8]])
    if client is not None:
        return AdapterVersions(view.output_dir / "vllm_adapter", run, client)
    folder = Path(tempfile.mkdtemp(prefix="grpo-ext-adapter-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return AdapterVersions(folder, run)


def _why_not_served(model: Any, info: Mapping[str, Any]) -> str | None:
    if not (served := info.get("lora_config")):
        return "the server was started without --enable-lora"
    if info["parallel_config"]["data_parallel_size"] > 1:
        return "an adapter reaches only one replica of a server with --data-parallel-size"
    return why_not_alone(model, served["max_lora_rank"])


def starting_engine(config: Any, model: Any, peft_config: Any, rollout_func: Any) -> AbstractContextManager[None]:
    """Inside, TRL starts an engine with the options of vLLM that masks, experts and adapters need."""
    if not config.use_vllm:
        return nullcontext()
    options: dict[str, Any] = {}
    if mask_bound(config, rollout_func) is not None:
        options["return_sampling_mask"] = True
    if config.replay.experts and rollout_func is None and compat.why_no_experts(config.vllm_mode) is None:
        options["enable_return_routed_experts"] = True
    if isinstance(model, PeftModel):
        peft_config = model.peft_config[model.active_adapters[0]]
    rank = getattr(peft_config, "r", None)
    if config.vllm_lora and config.vllm_mode == "colocate" and rank is not None:
        options |= {"enable_lora": True, "max_lora_rank": compat.served_rank(rank)}
    return starting_vllm_with(options)
