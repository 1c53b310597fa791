"""Finds buffers that a training forward moves and that a later forward reads, such as running statistics.

With them the update depends on how many forwards a step has. Frequencies of rotary positions, counters and caches may
move, because results do not. Runs before training (forward.runner), on rows made for the comparison of forms.
"""

from collections.abc import Callable, Mapping

import torch

_ROUNDING = 1e-6  # of the largest number of a result, beside ten times what two runs from the same buffers differ
_Buffers = Mapping[str, torch.Tensor]


def moving_buffers(model: torch.nn.Module, log_probs: Callable[[], torch.Tensor], gradients: bool) -> list[str]:
    """The buffers that change later log-probabilities or `gradients`; forwards run on copies of them.

    The first that does so alone, or all that move where only together they do. Called in `torch.no_grad`.
    """
    modes = [(module, module.training) for module in model.modules()]
    before = dict(model.named_buffers())

    def use(buffers: _Buffers) -> None:
        for name, buffer in buffers.items():
            path, _, key = name.rpartition(".")
            model.get_submodule(path)._buffers[key] = buffer

    def run(buffers: _Buffers, training: bool = True) -> torch.Tensor:
        use({name: buffer.clone() for name, buffer in buffers.items()})
        model.train(training)
        with torch.set_grad_enabled(training and gradients):
            return log_probs()

    def results(buffers: _Buffers) -> list[torch.Tensor]:
        trained_S, sizes = run(buffers), [0.0]
        if gradients:
            parameters = [p for p in model.parameters() if p.requires_grad]
            parts = torch.autograd.grad(trained_S, parameters, torch.ones_like(trained_S), allow_unused=True)
            sizes += [0.0 if part is None else float(part.norm()) for part in parts]
        return [trained_S.detach(), run(buffers, training=False), torch.tensor(sizes)]

    try:
        run(before)
        after = dict(model.named_buffers())
        moved = [name for name in before if not torch.equal(before[name], after[name])]
        if not moved:
            return []
        one, again = results(before), results(before)
        for names in [*([name] for name in moved), moved]:
            other = results({**before, **{name: after[name] for name in names}})
            if any(map(_differ, one, again, other)):
                return names
        return []
    finally:
        use(before)
        model.train()  # some modules merge weights while they evaluate
        for module, training in modes:
            module.training = training


def _differ(one: torch.Tensor, again: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether `other` differs by more than rounding; `again` ought to be `one`."""
    noise, gap = ((one - values).abs().max() for values in (again, other))
    return bool(gap > 10 * noise + _ROUNDING * one.abs().max())
