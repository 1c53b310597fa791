"""The dynamic loss scale of fp16 training: torch's scaler with DeepSpeed's rule for the scale.

The rule (`deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler`, without `consecutive_hysteresis`) is that of OpenRLHF
too: Micikevicius et al. 2018 (arXiv:1710.03740) with a hysteresis and a minimum. `torch.amp.GradScaler` has neither,
doubles one step earlier, looks for overflows on one process only, and lets fused optimizers skip steps unseen, so that
Accelerate moves the scheduler. Under DeepSpeed the engine scales by itself.
"""

import dataclasses
from typing import Any

import torch

from ..errors import ConfigError, PrecisionError
from ..runtime.collectives import any_process

_COUNTS = ("patience", "steps", "last_overflow", "skipped")


class LossScaler(torch.amp.GradScaler):
    # the values are DeepSpeed's
    initial = 2.0**16  # what the loss is multiplied by before the backward pass
    window = 1000  # steps without an overflow before the scale doubles
    hysteresis = 2  # overflows before it halves; each skips its step
    minimum = 1.0  # the scale never falls below; an overflow there is an error

    def __init__(self, device: torch.device) -> None:
        super().__init__(device.type, init_scale=self.initial)
        self._lazy_init_scale_growth_tracker(device)  # otherwise `scale` does, and `value` cannot be set before
        self.patience = self.hysteresis  # overflows until the scale halves, 1 or more
        self.steps = self.skipped = self._reported = 0  # so far; steps include skipped ones
        self.last_overflow = -1  # the step, counted from 0; -1: none
        self._overflow: bool | None = None  # whether the gradients overflowed; None: they are not unscaled yet

    @property
    def value(self) -> float:
        return self.get_scale()

    @value.setter
    def value(self, scale: float) -> None:
        super().update(scale)

    def unscale_(self, optimizer: Any) -> None:
        """Unscale once, and find out whether a gradient overflowed on any process."""
        if self._overflow is None:
            super().unscale_(optimizer)
            self._overflow = any_process(any(map(bool, self._found_inf_per_device(optimizer).values())))

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        self.unscale_(optimizer)
        return None if self._overflow else optimizer.step(*args, **kwargs)

    def update(self, new_scale: Any = None) -> None:
        overflow, self._overflow = bool(self._overflow), None
        self.move(overflow)
        super().update(self._scale)  # also forgets that the gradients were unscaled

    def move(self, overflow: bool) -> None:
        """Count a step, and move the scale; a PrecisionError where it cannot fall."""
        step, self.steps = self.steps, self.steps + 1
        if not overflow:
            clean = step - self.last_overflow - 1  # steps before this one
            if clean > 0 and clean % self.window == 0:
                self.patience = self.hysteresis
                if self.value * 2 <= torch.finfo(torch.float32).max:  # as in torch; gradients of zero never overflow
                    self.value *= 2
            return
        self.last_overflow, self.skipped = step, self.skipped + 1
        if self.patience > 1:
            self.patience -= 1
        elif self.value > self.minimum:
            self.value = max(self.value / 2, self.minimum)
        else:
            raise PrecisionError(
                f"gradients overflow with a loss scale of {self.value:g}, its minimum; {self.skipped} of {self.steps} "
                "steps were skipped so far. No loss scale can fix gradients this large: use a lower learning_rate or "
                "max_grad_norm, bf16=True, or float32, and check that rewards and losses are of ordinary size."
            )

    def report(self) -> dict[str, float]:
        """Overflows are counted since the last report."""
        overflows, self._reported = float(self.skipped - self._reported), self.skipped
        return {"fp16/loss_scale": self.value, "fp16/overflows": overflows, "fp16/skipped_steps": float(self.skipped)}

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.value} | {name: getattr(self, name) for name in _COUNTS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint; one of `torch.amp.GradScaler` has only a scale."""
        self.value = state["scale"]
        for name in _COUNTS:
            setattr(self, name, state.get(name, getattr(self, name)))
        self._reported = self.skipped


def install_loss_scaler(accelerator: Any) -> None:
    """Give an accelerator in fp16 this scale; a ConfigError where Accelerate would silently compute in float32."""
    if getattr(accelerator.state, "deepspeed_plugin", None) is not None:
        return
    device = accelerator.device
    if accelerator.mixed_precision != "fp16" or not accelerator.native_amp:
        raise ConfigError(
            f"fp16=True needs an accelerator: on {device.type} Accelerate silently computes in float32. Use "
            "bf16=True, or neither."
        )
    accelerator.scaler = LossScaler(device)


def reduce_in_float32(accelerator: Any) -> None:
    """Let FSDP2 sum gradients in float32, within and between processes; Accelerate's default is half precision."""
    plugin: Any = getattr(accelerator.state, "fsdp_plugin", None)
    if getattr(plugin, "fsdp_version", 1) == 2 and (policy := plugin.mixed_precision_policy) is not None:
        plugin.mixed_precision_policy = dataclasses.replace(policy, reduce_dtype=torch.float32)
