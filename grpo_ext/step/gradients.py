"""The gradient of a step: backward passes inside Accelerate's `accumulate`, and one sum over all processes.

DDP reduces inside the backward pass. Here the sum comes after the last one, so processes may run different numbers of
micro-batches, find out together whether one of them ran out of memory, and add integers in bitwise mode. Sharded
engines reduce by themselves.

Accelerate's bookkeeping: inside `accumulate` a backward pass synchronises processes where `accelerator.step` reaches a
multiple of `gradient_accumulation_steps`, and `accelerator.backward` divides the loss by that number. The loop outside
sees one batch per optimizer step, so both are set here, before the first micro-batch, and put back after the last.

A parameter takes part in a step if a completion that contributes uses it: the optimizer leaves one alone whose `.grad`
is None. So fillers (micro-batches of weight zero) leave no trace, where this package adds the gradients up. Users'
hooks on gradients run once, on the gradient of the step: what they return need not be a sum over micro-batches.
"""

import functools
import itertools
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

from ..errors import ConfigError
from ..precision.fixed_point import FixedPointSum, check_terms
from ..runtime import collectives
from ..runtime.attributes import temporarily_set

_PREPARED = "_is_accelerate_prepared"  # Accelerate's mark


def replicate(accelerator: Accelerator, model: torch.nn.Module) -> torch.nn.Module:
    """Prepare a model that every process holds whole, with the main process's weights; return any other unchanged.

    Accelerate would wrap it in DDP, whose buckets need the memory of another gradient.
    """
    if accelerator.num_processes == 1 or collectives.shards_parameters(accelerator) or hasattr(model, _PREPARED):
        return model
    model = accelerator.prepare_model(model, evaluation_mode=True)
    collectives.copy_from_main_process(model)
    setattr(model, _PREPARED, True)  # `accelerator.prepare` returns it as it is
    return model


def refuse_gradient_hooks(model: torch.nn.Module, sharded: bool) -> None:
    """Refuse hooks on the gradients of parameters that cannot wait for the gradient of the step."""
    for name, parameter in model.named_parameters():
        late = (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()
        users = [hook for hook in late if not str(hook.__module__).startswith("deepspeed.")]
        hooks = (parameter._backward_hooks or {}).values()
        # those of torch's register_multi_grad_hook fail outside of a backward pass
        places = {getattr(hook, "__globals__", {}).get("__name__") for hook in hooks}
        if users or (sharded and hooks) or "torch.autograd.graph" in places:
            raise ConfigError(
                f"a hook on the gradient of {name} would run during the backward pass, before the step's gradient is "
                "complete; remove it, or register it with register_hook and train with DDP, where it runs once, on "
                "the gradient of the step. An optimizer has to act in its step(), for example optim='adamw_torch'."
            )


def _drop(parameter: torch.Tensor) -> None:
    parameter.grad = None


class NativeGradients:
    """Sums in the parameters' own `.grad`: fast, and equal to rounding for every split."""

    def __init__(self, model: torch.nn.Module, accelerator: Accelerator) -> None:
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.accelerator = accelerator
        self._contributes = True  # the backward pass that runs
        self._hooked: Collection[str] = ()  # parameters with hooks of users, on any process

    def collecting(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _with_hooks(self) -> set[str]:
        return {name for name, parameter in self.parameters.items() if parameter._backward_hooks}

    def _used_anywhere(self, used: Collection[str]) -> list[str]:
        """The parameters that any process uses; notes those with hooks too."""
        flags = [name in names for names in (used, self._with_hooks()) for name in self.parameters]
        here = torch.tensor(flags, dtype=torch.int32, device=self.accelerator.device).view(2, -1)
        everywhere = collectives.stack_over_processes(here).amax(0).tolist()
        used_anywhere, self._hooked = ([*itertools.compress(self.parameters, row)] for row in everywhere)
        return used_anywhere

    def backward(self, run: Callable[[], None], contributes: bool) -> None:
        """Run a backward pass without the hooks of users; one that does not contribute leaves no gradient."""
        self._contributes = contributes
        with ExitStack() as restoring:
            for parameter in self.parameters.values():
                if hooks := parameter._backward_hooks:
                    restoring.callback(hooks.update, dict(hooks))
                    hooks.clear()
                if not contributes:
                    restoring.callback(setattr, parameter, "grad", parameter.grad)
                    parameter.grad = None
                    restoring.callback(parameter.register_post_accumulate_grad_hook(_drop).remove)
            run()

    def run_hooks(self) -> None:
        """Run the hooks of users once, on the gradient of the step; what the main process computes counts."""
        accelerator, scaler, hooked = self.accelerator, self.accelerator.scaler, list[torch.Tensor]()
        scale = 1.0 if scaler is None else scaler.get_scale()
        with collectives.raise_on_all("hooks on gradients"), torch.no_grad():
            for name, parameter in self.parameters.items():
                if (gradient := parameter.grad) is None or name not in self._hooked:
                    continue
                gradient = gradient / scale
                for hook in [*(parameter._backward_hooks or {}).values()]:
                    returned = hook(gradient)
                    gradient = gradient if returned is None else returned
                # a hook may draw random numbers; adding -0.0 changes no bit
                parameter.grad = gradient * scale if accelerator.is_main_process else torch.full_like(gradient, -0.0)
                hooked.append(parameter.grad)
        if accelerator.num_processes > 1:
            collectives.sum_in_place(hooked)

    def discard(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def finish(self, count: int) -> None:
        """Sum over all processes after `count` backward passes of this one."""
        if self.accelerator.num_processes == 1:
            self._hooked = self._with_hooks()
            return
        used = {name for name, parameter in self.parameters.items() if parameter.grad is not None}
        shared = [self.parameters[name] for name in self._used_anywhere(used)]
        for parameter in shared:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        collectives.sum_in_place([p.grad for p in shared if p.grad is not None])


class FixedPointGradients(NativeGradients):
    """Sums of 64-bit integers, whose bits do not depend on how the step was cut or assigned (precision.fixed_point).

    Each backward pass fills `.grad` anew, and a hook adds it to the sums, which take twice the memory of a gradient.
    """

    def __init__(self, model: torch.nn.Module, accelerator: Accelerator) -> None:
        super().__init__(model, accelerator)
        self._sums: dict[str, FixedPointSum] = {}

    @contextmanager
    def collecting(self) -> Iterator[None]:
        def take(name: str, parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            if self._contributes:
                self._sum_of(name).add(parameter.grad)
            parameter.grad = None

        self._sums.clear()
        with ExitStack() as hooks:
            for name, parameter in self.parameters.items():
                hooks.callback(parameter.register_post_accumulate_grad_hook(functools.partial(take, name)).remove)
            yield

    def _sum_of(self, name: str) -> FixedPointSum:
        if name not in self._sums:
            self._sums[name] = FixedPointSum(self.parameters[name])
        return self._sums[name]

    def discard(self) -> None:
        super().discard()
        self._sums.clear()

    def finish(self, count: int) -> None:
        """Sum over all processes; a PrecisionError on all if a term was not finite or out of range on any."""
        device = self.accelerator.device
        terms = int(collectives.stack_over_processes(torch.tensor(float(count), device=device)).sum())
        if not (names := self._used_anywhere(self._sums)):
            return
        highest = torch.stack([self._sum_of(name).largest.to(device) for name in names])
        everyone = collectives.stack_over_processes(highest).nan_to_num(nan=float("inf")).amax(0).tolist()
        for name, largest in zip(names, everyone, strict=True):
            check_terms(name, terms, largest)
        if self.accelerator.num_processes > 1:
            collectives.sum_in_place([self._sums[name].total for name in names])
        for name in names:
            parameter = self.parameters[name]
            parameter.grad = self._sums.pop(name).value(parameter.dtype)


@contextmanager
def accumulating(
    accelerator: Accelerator, gradients: NativeGradients | None, count: int, meets: bool
) -> Iterator[Callable[[torch.Tensor, bool], None]]:
    """A context for the backward passes of a step, which it yields; at its end one sum over the processes.

    Each is given the loss of a micro-batch, and whether the parameters that it uses take part in the step.

    The loss is scaled to undo two divisions: that of `accelerator.backward` by the accumulation steps (none under
    DeepSpeed), and the mean over processes of an engine that reduces in the backward pass. `gradients` is None where
    the engine adds them up: DeepSpeed in its last backward, FSDP in every one. `count`: micro-batches of this process;
    `meets`: a backward pass is a collective.
    """
    collecting = nullcontext() if gradients is None else gradients.collecting()
    deepspeed = gradients is None and accelerator.distributed_type == DistributedType.DEEPSPEED
    options = {"scale_wrt_gas": False} if deepspeed else {}
    if gradients is None:
        # FSDP reduces in every backward: gradients that wait for the last one are whole on every process
        steps = 1 if accelerator.distributed_type == DistributedType.FSDP else count
        scale = accelerator.num_processes * (1 if deepspeed else steps)
    else:
        # more than `count`, so that no backward synchronises; a power of two divides exactly
        steps = scale = 1 << count.bit_length()
    accelerator.step = 0
    accumulation = temporarily_set(accelerator, gradient_accumulation_steps=steps)

    def backward(loss: torch.Tensor, contributes: bool) -> None:
        run = functools.partial(accelerator.backward, loss * scale, **options)
        run() if gradients is None else gradients.backward(run, contributes)

    with collectives.raise_on_all("the end of the micro-batches", meets, again=True), accumulation, collecting:
        yield backward
    if gradients is not None:
        gradients.finish(count)
        gradients.run_hooks()
        accelerator.sync_gradients = True  # the optimizer may step
