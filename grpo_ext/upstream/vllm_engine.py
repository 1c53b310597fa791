"""Starts TRL's vLLM engine with further options, and sends it merged weights without writing into the trained model.

Repairs `trl.generation.vllm_generation.VLLMGeneration`: its constructor takes no options of vLLM's `LLM`, and its
`_iter_named_params` merges the adapter into the model and subtracts it again, which in half precision moves the base a
little every time. Until TRL fixes both; last seen in 1.16. `inspect.signature(VLLMGeneration)` shows the first.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftModel
from torch import nn

from .. import compat
from ..errors import ConfigError, shortened
from .merging import merged_copy


@contextmanager
def starting_vllm_with(options: Mapping[str, Any]) -> Iterator[None]:
    """Let TRL start its vLLM engine with further options; a ConfigError where vLLM does not start with them.

    `VLLMGeneration` has no argument for them, so meanwhile its module's name `LLM` is a function that adds them.
    """
    engine = getattr(compat.vllm_generation, "LLM", None)
    if not options or engine is None:  # TRL reports that vLLM is not installed
        yield
        return

    def start(**settings: Any) -> Any:
        try:
            return engine(**{**settings, **options})
        except (TypeError, ValueError) as error:
            reason = shortened(" ".join(str(error).split()), 150)
            raise ConfigError(
                f"vLLM does not start with {options}: {reason} Leave out the setting that needs them (vllm_lora, "
                "routing_replay, or a filter with sampling_mask='replay', which needs vLLM 0.28 and its Model Runner "
                "V2, and so no CPU)."
            ) from error

    compat.vllm_generation.LLM = start
    try:
        yield
    finally:
        compat.vllm_generation.LLM = engine


class MergingGeneration(compat.VLLMGeneration):
    """TRL's `VLLMGeneration`, which merges an adapter into copies of the layers that it adapts."""

    def _whole(self, parameter: Any) -> torch.Tensor:  # gathers shards of FSDP2
        if hasattr(parameter, "full_tensor"):
            return parameter.detach().to(self.accelerator.device).full_tensor()
        return parameter.detach()

    def _iter_named_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Like TRL's method, with the adapter merged into a copy of one layer at a time."""
        model: Any = self.model
        if not isinstance(model, PeftModel):
            yield from super()._iter_named_params()
            return
        merged_path, merged = "", nn.Module()
        for name, parameter in model.named_parameters():
            if model.prefix in name or "original_module" in name:
                continue
            path, is_adapted, rest = name.partition(".base_layer")
            layer: Any = model.get_submodule(path) if is_adapted else None
            with self._dist.gather_params([parameter] if layer is None else list(layer.parameters())):
                if layer is not None and path != merged_path:
                    merged_path, merged = path, merged_copy(layer)
                whole = self._whole(parameter if layer is None else merged.get_parameter(f"base_layer{rest}"))
                name = name.removeprefix("base_model.model.").replace(".base_layer", "")
                yield self._fix_param_name_to_vllm(name, extra_prefixes=["modules_to_save.default."]), whole
