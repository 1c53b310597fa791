"""Finds buffers that a training forward moves and that a later forward reads, such as running statistics.

With them the update depends on how many forwards a step has. Frequencies of rotary positions, counters and caches may
move, because results do not. Runs before training (forward.runner), on rows made for the comparison of forms.
"""

from collections.abc import Callable, Mapping

import torch

_ROUNDING = 1e-6  # of the largest number of a result, beside ten times what two runs from the same buffers differ


def moving_buffers(model: torch.nn.Module, log_probs: Callable[[], torch.Tensor], with_gradients: bool) -> list[str]:
    """The buffers that move, if later log-probabilities or gradients do too. Forwards run on copies of them.

    Called in `torch.no_grad`.
    """
    parents = (model.get_submodule(name.rpartition(".")[0]) for name, _ in model.named_buffers())
    if all(type(module).__module__.split(".")[0] == "transformers" for module in parents):  # frequencies, caches
        return []
    modes, before = [(module, module.training) for module in model.modules()], dict(model.named_buffers())
    parameters = [p for p in model.parameters() if p.requires_grad and with_gradients]

    def use(buffers: Mapping[str, torch.Tensor]) -> None:
        for name, buffer in buffers.items():
            path, _, key = name.rpartition(".")
            model.get_submodule(path)._buffers[key] = buffer

    def results(buffers: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        use({name: buffer.clone() for name, buffer in buffers.items()})
        model.eval()
        evaluated = log_probs()
        model.train()
        with torch.set_grad_enabled(bool(parameters)):
            trained = log_probs()
            parts = torch.autograd.grad(trained.sum(), parameters, allow_unused=True) if parameters else ()
        sizes = [float(part.norm()) for part in parts if part is not None]
        return [evaluated, trained.detach(), torch.tensor([0.0, *sizes])]

    try:
        use({name: buffer.clone() for name, buffer in before.items()})
        model.train()
        log_probs()
        after = dict(model.named_buffers())
        moved = [name for name in before if not torch.equal(before[name], after[name])]
        differ = moved and any(map(_differ, results(before), results(before), results(after)))
        return moved if differ else []
    finally:
        use(before)
        for module, training in modes:
            module.training = training


def _differ(one: torch.Tensor, again: torch.Tensor, other: torch.Tensor) -> bool:
    noise, gap = ((one - values).abs().max() for values in (again, other))
    return bool(gap > 10 * noise + _ROUNDING * one.abs().max())
