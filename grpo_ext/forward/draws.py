"""Finds modules whose forward draws random numbers from torch's generators, which know the batch.

Dropout inside attention, LayerDrop, drop path, noise of routers: whatever its name, a generator's state moves.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch


def generator_states(device: torch.device, with_cpu: bool = True) -> list[bytes]:
    """The states of torch's generators, of the CPU and of all devices of a kind."""
    states = [torch.get_rng_state()] if with_cpu else []
    if device.type != "cpu":
        module: Any = torch.get_device_module(device)
        states += module.get_rng_state_all() if hasattr(module, "get_rng_state_all") else [module.get_rng_state()]
    return [bytes(state.numpy()) for state in states]


def drawn_in(names: Sequence[str]) -> str:
    """The reason against modules that draw, as a sentence."""
    return (
        f"a training forward draws random numbers for its batch in {', '.join(names[:3])}; set that rate to 0 "
        "(model_init_kwargs={'attention_dropout': 0.0}; attn_pdrop in GPT-2), or set "
        "disable_dropout=True, which zeroes every rate, LoRA's too; a rate in the model's code has to be changed there"
    )


def drawing_modules(model: torch.nn.Module, device: torch.device, forward: Callable[[], Any]) -> list[str]:
    """The innermost modules that draw in a forward, by name and class."""
    names, begun = list[str](), list[tuple[int, list[bytes]]]()

    def leave(name: str, module: Any) -> None:
        inside, before = begun.pop()
        if inside == len(names) and before != generator_states(device):
            names.append(f"{name or 'the model'} ({type(module).__name__})")

    with ExitStack() as hooks, torch.no_grad():
        for path, module in model.named_modules():
            enter = module.register_forward_pre_hook(lambda *args: begun.append((len(names), generator_states(device))))
            end = module.register_forward_hook(lambda module, *args, path=path: leave(path, module))
            hooks.callback(enter.remove)
            hooks.callback(end.remove)
        forward()
    return names
