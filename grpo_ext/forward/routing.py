"""Replays the experts that each token of a mixture-of-experts model was sent to.

Two forwards of the same tokens may choose different experts where scores are close (Ma et al., arXiv 2510.11370). So a
router's `torch.topk` over the scores of the experts is recorded while sampling; in later forwards it returns the
recorded experts with their live scores, and gradients reach the router. Shapes: N tokens of a forward, X experts, K of
them chosen by a router, C choices of all routers.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..errors import ModelError
from ..runtime.attributes import replace_forward
from ..runtime.sequence_group import SequenceGroup
from .carried import carried_now

BY_ROUTER = -1  # instead of an expert: the router chooses
_CHOICES = (torch.topk, torch.Tensor.topk)


@dataclass(frozen=True)
class Router:
    columns: slice  # its choices among those of all routers
    choices: int  # choices of all routers for a token
    experts: int  # experts to choose from
    layer: int = -1  # number among all decoder layers; -1: unknown

    @property
    def dtype(self) -> torch.dtype:
        return torch.int8 if self.experts <= torch.iinfo(torch.int8).max + 1 else torch.int16

    @property
    def width(self) -> int:
        return self.columns.stop - self.columns.start


class Routing:
    """The experts of a forward's tokens, to record or replay; not a dataclass: FSDP copies dataclass arguments."""

    def __init__(
        self,
        experts_NC: torch.Tensor | None = None,
        counts_N: torch.Tensor | None = None,
        group: SequenceGroup | None = None,  # whose members route the other tokens of the pack
    ) -> None:
        self.experts_NC = experts_NC  # to replay, `BY_ROUTER` where the router chooses; None: record
        self.counts_N = counts_N  # how often the padded batch would have computed each token; None: nothing is counted
        self.group = group
        self._choices = 0  # choices of all routers
        # by first token and first column, so that a layer that gradient checkpointing recomputes counts once
        self._recorded: dict[int, dict[int, torch.Tensor]] = {}
        self._counted: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def counts(self) -> torch.Tensor:
        """Replayed choices where the live router would have chosen other experts, and all of them.

        One for each router and token, weighted by `counts_N`.
        """
        device = None if self.counts_N is None else self.counts_N.device
        pairs = [torch.zeros(2, dtype=torch.long, device=device), *map(torch.stack, self._counted.values())]
        counted = torch.stack(pairs).sum(0)
        return counted if self.group is None else self.group.total(counted)

    def choose(self, router: Router, first: int, scores_NX: torch.Tensor, live: Any) -> Any:
        """Values and experts (N, K) that replace `topk`'s result `live`; `first`: the number of the first token."""
        live_NK = live[1]
        if self.experts_NC is None:
            self._recorded.setdefault(first, {})[router.columns.start] = live_NK.to(router.dtype)
            self._choices = router.choices
            return live
        tokens = slice(first, first + len(scores_NX))
        recorded_NK = self.experts_NC[tokens, router.columns].to(scores_NX.device, torch.long)
        known_NK = recorded_NK != BY_ROUTER
        if self.counts_N is not None:
            counts_N = self.counts_N[tokens].to(scores_NX.device) * known_NK[:, 0]
            changed_N = (live_NK[:, :, None] != recorded_NK[:, None, :]).all(2).any(1)
            self._counted[first, router.columns.start] = (counts_N * changed_N).sum(), counts_N.sum()
        experts_NK = torch.where(known_NK, recorded_NK, live_NK)
        return torch.return_types.topk((scores_NX.gather(1, experts_NK), experts_NK))

    def pop_experts(self) -> torch.Tensor:
        """The experts (N, C) recorded since the last call; a ModelError where a forward skipped a router."""
        passes = [[part for _, part in sorted(parts.items())] for _, parts in sorted(self._recorded.items())]
        self._recorded.clear()
        if not passes or any(sum(part.size(1) for part in parts) != self._choices for parts in passes):
            raise _unknown("a forward chose experts without its routers")
        return torch.cat([torch.cat([part.to(parts[0].device) for part in parts], dim=1) for parts in passes])


class _Choice(TorchFunctionMode):
    def __init__(self, router: Router, routing: Routing, first: int = 0) -> None:
        super().__init__()
        self.router, self.routing, self.first = router, routing, first

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        # some routers call `topk` for groups of experts first
        if (
            func not in _CHOICES
            or args[0].shape[1:] != (self.router.experts,)
            or output[1].size(1) != self.router.width
        ):
            return output
        return self.routing.choose(self.router, self.first, args[0], output)


# ---- Routers of a model ---------------------------------------------------------------------------------------------


def install_routers(model: Any) -> None:
    """Let the routers of a model record and replay where a forward carries a `Routing`.

    Raises a ModelError if they are missing or unknown.
    """
    layers = list(_layers(model))
    if not layers:
        raise ModelError(
            f"routing_replay=True, and {type(model).__name__} has no routed experts; leave routing_replay out."
        )
    widths = [modules[0].top_k for _, modules in layers]
    stops = list(itertools.accumulate(widths))
    for (layer, modules), width, stop in zip(layers, widths, stops, strict=True):
        for module in modules:
            if not hasattr(module.forward, "of_grpo_ext"):
                _verify(module)
                router = Router(slice(stop - width, stop), stops[-1], module.num_experts, layer)
                replace_forward(module, functools.partial(_choosing, router), mark=router)


def _choosing(router: Router, below: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    carried = carried_now()
    if carried is None or carried.routing is None:
        return below(*args, **kwargs)
    with _Choice(router, carried.routing, carried.first):
        return below(*args, **kwargs)


def routers_of(model: Any) -> list[Router]:
    """Routers in the order of their columns; after `install_routers`."""
    return [modules[0].forward.of_grpo_ext for _, modules in _layers(model)]


def _layers(model: Any) -> Iterator[tuple[int, list[Any]]]:
    """Yields each layer with experts: its number, its router and copies of that in PEFT's `modules_to_save`."""
    layer = None
    for path, block in model.named_modules():
        # PEFT's copies of a block lie inside a layer
        inside = layer is not None and path.startswith(f"{layer}.")
        if inside or not isinstance(getattr(block, "experts", None), nn.Module):
            continue
        layer = path
        modules = [module for name, module in block.named_modules() if name and _is_router(module)]
        if not modules:
            raise _unknown(f"{path} ({type(block).__name__}) has no module with integers top_k and num_experts")
        yield next((int(part) for part in path.split(".") if part.isdigit()), -1), modules


def _is_router(module: nn.Module) -> bool:
    numbers = (getattr(module, name, None) for name in ("top_k", "num_experts"))
    # PEFT's wrapper has the attributes of the router inside
    others = ("experts", "original_module")
    return all(isinstance(number, int) for number in numbers) and not any(hasattr(module, name) for name in others)


def _unknown(reason: str) -> ModelError:
    return ModelError(
        f"routing_replay=True does not know how this model chooses its experts: {reason}. It supports routers that "
        "are modules with integers top_k and num_experts, and that choose with torch.topk over the scores of all "
        "experts. Leave routing_replay out."
    )


def _verify(module: Any) -> None:
    """Check on random inputs that a router returns recorded and replayed experts, with weights, or raise."""
    name, generator = type(module).__name__, torch.Generator().manual_seed(0)
    router = Router(slice(0, module.top_k), module.top_k, module.num_experts)
    tensors = [*module.named_parameters(), *module.named_buffers()]
    shapes = {path: tuple(getattr(tensor, "ds_shape", tensor.shape)) for path, tensor in tensors}  # whole under ZeRO-3
    hidden = next((shape[1] for shape in shapes.values() if len(shape) == 2 and shape[0] == router.experts), None)
    if hidden is None:
        raise _unknown(f"{name} has no weight with a row for each expert")
    values = {path: torch.randn(shape, generator=generator) for path, shape in shapes.items()}
    tokens_NH = torch.randn(8, hidden, generator=generator) / hidden**0.5  # so small that no softmax is zero

    def run(routing: Routing) -> Any:
        with torch.no_grad(), _Choice(router, routing):
            return torch.func.functional_call(module, values, (tokens_NH,))

    recording = Routing()
    try:
        live = run(recording)
        if not recording._recorded:
            raise _unknown(f"{name} does not choose with torch.topk")
        recorded = recording.pop_experts().long()
        others = (recorded + 1) % router.experts
        replayed = run(Routing(others))
    except ModelError:
        raise
    except Exception as error:  # an unknown class of router may need other arguments
        raise _unknown(f"{name} cannot be recorded and replayed on random numbers ({error})") from error
    for what, expected, outputs in (("recorded", recorded, live), ("replayed", others, replayed)):
        returned = _experts_in(outputs, router)
        if returned is None or not torch.equal(expected.sort(1).values, returned.sort(1).values):
            raise _unknown(f"{name} returns experts that differ from those {what}")
    weights = [output for output in replayed if output.is_floating_point() and output.shape == others.shape]
    if any((weights_NK == 0).any() for weights_NK in weights):
        raise _unknown(f"{name} gives no weight to experts outside the groups that it chooses first")


def _experts_in(outputs: Any, router: Router) -> torch.Tensor | None:
    """The experts (N, K) in a router's output: ids, or the columns of its non-zero scores (N, X)."""
    width = router.width
    tensors = [output for output in outputs if isinstance(output, torch.Tensor)]
    for tensor in tensors:
        if not tensor.is_floating_point() and tensor.shape[1:] == (width,):
            return tensor
    for tensor in tensors:
        chosen_NX = tensor != 0
        if tensor.shape[1:] == (router.experts,) and (chosen_NX.sum(1) == width).all():
            return chosen_NX.nonzero()[:, 1].view(-1, width)
    return None
