"""Finds buffers that a training forward moves and that a later forward reads, such as running statistics.

With them the update depends on how many forwards a step has. Frequencies of rotary positions, counters and caches may
move, because results do not. Runs before training (forward.runner), on rows made for the comparison of forms.
"""

import copy
from collections.abc import Callable

import torch

_Buffers = dict[str, torch.Tensor]  # by name
_ROUNDING = 1e-6  # of the largest number of a result, beside ten times what two runs from the same buffers differ


def moving_buffers(model: torch.nn.Module, log_probs: Callable[[], torch.Tensor], with_gradients: bool) -> list[str]:
    """The buffers that move, if later log-probabilities or gradients do too. Forwards run on copies of them.

    Called in `torch.no_grad`, and in `left_as_it_was`.
    """
    before = _buffers(model)
    owners = {name: model.get_submodule(name.rpartition(".")[0]) for name in before}
    saved = model.state_dict()
    if all(n not in saved and type(owner).__module__.startswith("transformers.") for n, owner in owners.items()):
        return []  # frequencies, caches
    parameters = [p for p in model.parameters() if p.requires_grad and with_gradients]

    def use(buffers: _Buffers) -> None:
        for name, buffer in buffers.items():
            owners[name]._buffers[name.rpartition(".")[2]] = buffer

    def trained() -> list[torch.Tensor]:
        """Log-probabilities, and the norms of gradients, of a training forward; a backward pass may move buffers."""
        model.train()
        with torch.set_grad_enabled(bool(parameters)):
            logps = log_probs()
            parts = torch.autograd.grad(logps.sum(), parameters, materialize_grads=True) if parameters else ()
        return [logps.detach(), torch.tensor([0.0, *(float(part.norm()) for part in parts)])]

    def results(buffers: _Buffers) -> list[torch.Tensor]:
        use(copy.deepcopy(buffers))  # modules that share a buffer share its copy
        model.eval()
        return [log_probs(), *trained()]

    use(copy.deepcopy(before))
    trained()
    after = _buffers(model)
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    differs = bool(moved) and any(map(differ, results(before), results(before), results(after)))
    use(before)
    return moved if differs else []


def _buffers(model: torch.nn.Module) -> _Buffers:
    return dict(model.named_buffers(remove_duplicate=False))


def differ(one: torch.Tensor, again: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a result differs from another by more than from its repetition."""
    noise, gap = ((one - values).abs().max() for values in (again, other))
    return bool(gap > 10 * noise + _ROUNDING * one.abs().max())
