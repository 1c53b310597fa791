"""A language-model head that returns log-probabilities of tokens, installed in a model's forward.

Differs from TRL's fused head: it computes only the requested positions, in any layout, and supports the logits of more
models. Runs inside the forward of the policy and the reference, below their wrappers. Shapes: S requested tokens, H
hidden size, V vocabulary.
"""

import types
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from accelerate.utils import send_to_device
from peft.tuners.tuners_utils import BaseTunerLayer
from torch.distributed.fsdp import FSDPModule

from ..algorithms.load_balancing import load_balancing_loss, router_statistics
from ..compat import triton_head
from ..errors import ModelError
from ..runtime.attributes import replace_forward
from ..runtime.sequence_group import SequenceGroup
from .carried import Carried, carrying
from .prefix_cache import Continuation, run_after_prompts
from .routing import Routing
from .sampling_masks import SamplingMasks
from .tiled_log_probs import LogitTransform, TiledLogProbs, gathered

# keywords that carry a `Targets`, and a `Continuation`, through the wrapped model to its forward
TARGETS, PREFIX = "grpo_ext_targets", "grpo_ext_prefix"

_FACTORS = ("logit_scale", "output_multiplier", "lm_head_multiplier")
_DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
_KERNEL_COLUMNS = 32768  # of the vocabulary at a time; TRL's choice
_UNREAD = ("mpt", "gemma3", "cohere2_vision")  # models that ignore these settings of their configuration


def logit_transform(config: Any, temperature: float = 1.0) -> LogitTransform:
    """The transform that a model's settings name, under all names in transformers."""
    if config.model_type in _UNREAD:
        return LogitTransform(temperature=temperature)
    config = config.get_text_config()

    def first(names: tuple[str, ...]) -> float | None:
        return next((value for name in names if (value := getattr(config, name, None)) is not None), None)

    scale, divisor = first(_FACTORS), first(_DIVISORS)
    if scale is None and divisor is not None:
        scale = divisor if config.model_type == "hyperclovax" else 1 / divisor
    vocabulary = getattr(config, "unpadded_vocab_size", None)
    return LogitTransform(1.0 if scale is None else scale, first(_CAPS), temperature, vocabulary)


def log_probs(
    hidden_SH: torch.Tensor,
    weight_VH: torch.Tensor,
    bias_V: torch.Tensor | None,
    targets_S: torch.Tensor,
    transform: LogitTransform,
    with_entropy: bool = True,
    masks: SamplingMasks | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probabilities and entropies, (S,) in nats, by the fastest method for the device."""
    whole = transform.vocabulary is None or transform.vocabulary >= weight_VH.size(0)
    # what TRL's kernel supports
    plain = whole and masks is None and hidden_SH.dtype != torch.float64 and len(targets_S) > 0
    # in bitwise mode torch refuses kernels whose bits change from run to run, but it does not know Triton's
    open_to_triton = hidden_SH.device.type == "cuda" and not torch.are_deterministic_algorithms_enabled()
    # the kernel's entropy is NaN with banned tokens, whose logit is -inf
    plain = plain and not (bias_V is not None and bias_V.isneginf().any())
    if open_to_triton and plain and (kernel := triton_head()) is not None:
        settings = (transform.temperature, _KERNEL_COLUMNS, transform.cap, transform.scale)
        return kernel(hidden_SH, weight_VH, bias_V, targets_S, *settings, ("entropy",) if with_entropy else ())[:2]
    return TiledLogProbs.apply(hidden_SH, weight_VH, bias_V, targets_S, transform, with_entropy, masks)


class RouterOutput(NamedTuple):
    """Router logits of one forward, one (tokens, E) tensor per layer, and the count of each token.

    The counts of a padded batch are its attention mask; in a pack a prompt counts once for each of its completions.
    """

    logits: tuple[torch.Tensor, ...]
    counts_BL: torch.Tensor
    top_k: int  # experts per token
    group: SequenceGroup | None  # whose members hold the logits of other tokens
    experts_NC: torch.Tensor | None  # those of `Routing` that were replayed

    def statistics(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        """`router_statistics` of the whole forward."""
        chosen, probs, rows = router_statistics(self.logits, self.counts_BL, self.top_k, self.experts_NC)
        if self.group is None:
            return chosen, probs, rows
        total = self.group.total(torch.cat([chosen, chosen.new_tensor([rows])]))
        return total[:-1], self.group.total(probs), int(total[-1])

    def aux_loss(self) -> torch.Tensor:
        chosen, probs, rows = self.statistics()
        return load_balancing_loss(probs, (chosen / max(rows, 1)).to(probs), rows)


@dataclass(frozen=True)
class LogProbs:
    logps_S: torch.Tensor  # of the completion tokens, row by row, in nats
    entropies_S: torch.Tensor  # in nats; empty where not requested
    router: RouterOutput | None  # of a MoE model, where requested
    routing: Routing | None = None  # None where nothing is recorded or replayed
    # the recorded experts of each token of the rows, on the CPU; a prompt that ran once for several completions has
    # them in the first of these
    experts_NC: torch.Tensor | None = None


class Targets(types.SimpleNamespace):
    """The tokens whose log-probabilities a forward returns; not a dataclass: FSDP copies dataclass arguments."""

    predictor_S: torch.Tensor  # positions in the flattened input whose hidden states predict the tokens
    tokens_S: torch.Tensor  # their ids
    entropy: bool = True  # also return entropies
    router: bool = False  # also return the router logits of a MoE model
    masks: SamplingMasks | None = None  # the tokens that each one was sampled from; None: the whole vocabulary
    routing: Routing | None = None  # records or replays the experts of the input's tokens
    dropout_N: torch.Tensor | None = None  # keys of the input's tokens, int64; None: without dropout


def _backbone(model: Any) -> Any:
    """The part of a causal language model before its head, or the model itself."""
    return model.base_model if model.base_model is not model else getattr(model, "model", model)


def refuse_unknown_head(model: Any) -> None:
    """Raise a ModelError where logits are not one linear layer on the backbone's hidden states."""
    backbone, head = _backbone(model), model.get_output_embeddings()
    if backbone is model or head is None:
        raise ModelError(
            f"{type(model).__name__} has no backbone with a linear language-model head after it, from which "
            "log-probabilities are computed. Use a causal language model of transformers."
        )
    if isinstance(head, BaseTunerLayer):
        raise ModelError(
            f"the adapter reaches the language-model head of {type(model).__name__}, but log-probabilities use the "
            "head's own weight: leave it out of target_modules, or train it whole with modules_to_save=['lm_head']."
        )
    inner = getattr(head, "original_module", head)  # PEFT's modules_to_save wraps the head
    if type(inner).forward is not torch.nn.Linear.forward:
        raise ModelError(
            f"the language-model head of {type(model).__name__} is a {type(inner).__name__} with a forward of its own, "
            "but log-probabilities need the weight of a linear layer. Use a model with a plain, unquantised head."
        )
    known = {id(p) for part in (backbone, head) for p in part.parameters()}
    further = [name for name, parameter in model.named_parameters() if id(parameter) not in known]
    if further:
        raise ModelError(
            f"{type(model).__name__} has more than a linear layer between its hidden states and its logits "
            f"({', '.join(further[:4])}), which log-probabilities would leave out. Use a model with a plain "
            "language-model head."
        )


def install(model: Any, temperature: float, cast_to_fp32: bool = False) -> None:
    """Install this head in the forward of `model` (under PEFT, the base), before anything wraps the model.

    Called with `grpo_ext_targets=Targets(...)`, the forward returns log-probabilities (S,), entropies (S,) and router
    logits, the latter two None unless requested; other calls are unchanged.
    """
    transform = logit_transform(model.config, temperature)

    def run(below: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        targets = kwargs.pop(TARGETS, None)
        if targets is None:
            return below(model, *args, **kwargs)
        return _run(model, transform, cast_to_fp32, targets, *args, **kwargs)

    replace_forward(model, run, mark=temperature)


def _run(
    model: Any, transform: LogitTransform, cast_to_fp32: bool, targets: Targets, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor | None, tuple[torch.Tensor, ...] | None]:
    if targets.router:
        kwargs["output_router_logits"] = True
    completions: Continuation | None = kwargs.pop(PREFIX, None)
    if completions is None:
        backbone = _backbone(model)
        with carrying(backbone, Carried.of(targets, kwargs.get("input_ids"))):
            output = backbone(*args, **{**kwargs, "use_cache": False, "return_dict": True})
        hidden, routers = output.last_hidden_state.flatten(0, 1), getattr(output, "router_logits", None)
    else:
        hidden, routers = run_after_prompts(_backbone(model), kwargs, completions, targets)
    head = model.get_output_embeddings()  # PEFT and FSDP replace the head later
    hidden_SH = hidden[targets.predictor_S.to(hidden.device)]
    if isinstance(head, FSDPModule):
        head.unshard()  # where Accelerate finds no norm before it, the head is an FSDP unit that nothing else gathers
    weight, bias = head.weight, getattr(head, "bias", None)
    hidden_SH = hidden_SH.to(weight.device)  # `device_map` may put the head elsewhere
    if cast_to_fp32:
        hidden_SH = hidden_SH.float()
    with torch.autocast(weight.device.type, enabled=False) if cast_to_fp32 else nullcontext(), gathered(weight, bias):
        tokens_S, masks = send_to_device((targets.tokens_S, targets.masks), weight.device)
        logps, entropy = log_probs(hidden_SH, weight, bias, tokens_S, transform, targets.entropy, masks)
    return logps, entropy if targets.entropy else None, routers if targets.router else None
