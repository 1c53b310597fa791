"""The loss scaler that Accelerate drives in fp16 training, with the rule of precision.scale_rule.

Takes the place of `torch.amp.GradScaler`, which has no hysteresis and no minimum, looks for overflows on one process
alone, and lets fused optimizers skip steps unseen, so that Accelerate moves the scheduler. Built by the trainer;
`scale`, `unscale_`, `step` and `update` are called by Accelerate.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..errors import ConfigError, ModelError, PrecisionError
from ..runtime.collectives import any_process
from .scale_rule import LossScale, ScaleRule, after_step, start


class LossScaler:
    """See the module.

    Args:
        scale: at the start.
        anyone: from whether this process found an overflow to whether any did (a collective).
    """

    def __init__(self, scale: float, rule: ScaleRule, anyone: Callable[[bool], bool]) -> None:
        self.rule, self.anyone = rule, anyone
        self.state: LossScale = start(scale, rule)
        self._reported = 0
        self._overflow: bool | None = None  # of the gradients that are unscaled; None: they are not yet

    def is_enabled(self) -> bool:
        """As `torch.amp.GradScaler`."""
        return True

    def get_scale(self) -> float:
        """As `torch.amp.GradScaler`."""
        return self.state.scale

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the scale, in float32."""
        return loss.float() * self.state.scale

    def unscale_(self, optimizer: Any) -> None:
        """Divide the gradients by the scale, and find out on all processes whether one of them overflowed."""
        if self._overflow is not None:
            return
        found = False
        grads: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    grad = parameter.grad
                    local = grad.to_local() if hasattr(grad, "to_local") else grad  # FSDP2's shards
                    grads.setdefault((local.device, local.dtype), []).append(local)
        for (device, _), same in grads.items():
            overflow = torch.zeros((), device=device)
            inverse = torch.tensor(1.0 / self.state.scale, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(same, overflow, inverse)
            found = found or bool(overflow)
        self._overflow = self.anyone(found)

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """`optimizer.step`, unless there was an overflow."""
        self.unscale_(optimizer)
        return None if self._overflow else optimizer.step(*args, **kwargs)

    def update(self) -> None:
        """Move the scale after a step.

        Raises:
            PrecisionError: on every process alike: it overflowed and cannot fall any more.
        """
        overflow, self._overflow = bool(self._overflow), None
        self.state = after_step(self.state, overflow, self.rule)

    def report(self) -> dict[str, float]:
        """For a log line; overflows are those since the last one."""
        skipped, before = self.state.skipped, self._reported
        self._reported = skipped
        return {
            "fp16/loss_scale": self.state.scale,
            "fp16/overflows": float(skipped - before),
            "fp16/skipped_steps": float(skipped),
        }

    def state_dict(self) -> dict[str, float]:
        """For a checkpoint: plain numbers."""
        return dataclasses.asdict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint, within the settings of now; one of `torch.amp.GradScaler` gives its scale alone."""
        names = {field.name for field in dataclasses.fields(LossScale)}
        known = {name: value for name, value in state.items() if name in names}
        kept = dataclasses.replace(self.state, **known)
        scale = max(kept.scale, self.rule.minimum) if self.rule.dynamic else self.state.scale
        self.state = dataclasses.replace(kept, scale=scale, patience=min(kept.patience, self.rule.hysteresis))
        self._reported = self.state.skipped


def install_loss_scaler(accelerator: Any, scale: float, rule: ScaleRule, given: set[str]) -> DeepSpeedScale | None:
    """Give an accelerator in fp16 its loss scale, before models and optimizers are prepared.

    Args:
        given: names of the settings that the user chose.

    Returns:
        What watches the scale of a DeepSpeed engine, where one scales.

    Raises:
        ConfigError: Accelerate would compute in float32 without a word, or the DeepSpeed file disagrees.
    """
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    if plugin is not None:
        fill_deepspeed(plugin.hf_ds_config.config.setdefault("fp16", {}), scale, rule, given)
        return DeepSpeedScale(rule)
    device = accelerator.device
    if accelerator.mixed_precision != "fp16" or not accelerator.native_amp:
        raise ConfigError(
            f"fp16=True needs an accelerator: on {device.type} Accelerate computes in float32 without a word. Use "
            "bf16=True, or neither."
        )
    accelerator.scaler = LossScaler(scale, rule, lambda found: any_process(found, device))
    return None


class DeepSpeedScale:
    """Watches the loss scale of a DeepSpeed engine, which scales and skips by itself.

    Args:
        rule: as the engine was told; a fixed scale has no end of its own there.
    """

    def __init__(self, rule: ScaleRule) -> None:
        self.rule = rule
        self._reported = self._seen = self._in_a_row = 0

    def after_step(self, engine: Any) -> None:
        """Called after every step.

        Raises:
            PrecisionError: a fixed scale overflowed `fp16_hysteresis` times in a row.
        """
        skipped = int(engine.skipped_steps)
        self._in_a_row = self._in_a_row + 1 if skipped > self._seen else 0
        self._seen = skipped
        if not self.rule.dynamic and self._in_a_row >= self.rule.hysteresis:
            raise PrecisionError(
                f"gradients overflow with the fixed loss scale of {float(engine.optimizer.loss_scale):g}: "
                f"{self._in_a_row} steps in a row were skipped; use a smaller or a dynamic scale, or bf16=True."
            )

    def report(self, engine: Any) -> dict[str, float]:
        """For a log line, as `LossScaler.report`."""
        skipped, before = int(engine.skipped_steps), self._reported
        self._reported = skipped
        scale = float(engine.optimizer.loss_scale)
        return {
            "fp16/loss_scale": scale,
            "fp16/overflows": float(skipped - before),
            "fp16/skipped_steps": float(skipped),
        }


@contextmanager
def deepspeed_minimum() -> Iterator[None]:
    """Inside, DeepSpeed's bare exception at the minimum of its scale becomes this package's error.

    Raises:
        PrecisionError: gradients overflow at the minimum scale.
    """
    try:
        yield
    except Exception as error:
        if "loss scale already at minimum" not in str(error):
            raise
        raise PrecisionError(
            "gradients overflow with the loss scale at its minimum (fp16_min_scale). No scale mends gradients this "
            "large: use a lower learning_rate or max_grad_norm, bf16=True, or float32."
        ) from error


def half_weights(model: torch.nn.Module) -> dict[str, torch.dtype]:
    """The trained weights that are no float32 or wider, by name."""
    return {name: p.dtype for name, p in model.named_parameters() if p.requires_grad and p.dtype.itemsize < 4}


def refuse_half_weights(model: torch.nn.Module) -> None:
    """Refuse trainable weights in half precision: their updates are lost to rounding, and no scaler takes them.

    Not for DeepSpeed, which keeps float32 copies of its own.

    Raises:
        ModelError: names one.
    """
    half = half_weights(model)
    for name, dtype in half.items():
        raise ModelError(
            f"fp16=True trains float32 weights and computes in float16, but {name} (one of {len(half)}) is "
            f"{str(dtype).removeprefix('torch.')}; load the model with dtype='float32' (for a name: "
            "model_init_kwargs={'dtype': 'float32'}; for the adapter of a quantised model: float32_adapters=True)."
        )


def reduce_in_float32(accelerator: Any) -> None:
    """Let FSDP2 add gradients up in float32, on a process and between them; Accelerate takes the half precision."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    policy = getattr(plugin, "mixed_precision_policy", None)
    if plugin is not None and dataclasses.is_dataclass(policy) and getattr(plugin, "fsdp_version", 1) == 2:
        plugin.mixed_precision_policy = dataclasses.replace(policy, reduce_dtype=torch.float32)  # type: ignore[type-var]


def fill_deepspeed(section: dict[str, Any], scale: float, rule: ScaleRule, given: set[str]) -> None:
    """Write the settings into the `fp16` section of a DeepSpeed configuration, in place.

    Args:
        given: names of the settings that the user chose; the others give way to what the file says.

    Raises:
        ConfigError: the file says something else, or the initial scale is no power of two.
    """
    power = math.log2(scale)
    if rule.dynamic and not power.is_integer():
        raise ConfigError(
            f"fp16_initial_scale={scale:g}: DeepSpeed starts with a power of two; use {2 ** round(power)}."
        )
    if int(rule.minimum) != rule.minimum:
        raise ConfigError(
            f"fp16_min_scale={rule.minimum:g}: DeepSpeed takes whole numbers; use {max(1, round(rule.minimum))}."
        )
    wanted: dict[str, tuple[str, float]] = {
        "loss_scale": ("fp16_fixed_scale", 0 if rule.dynamic else scale),
        "initial_scale_power": ("fp16_initial_scale", int(power)),
        "loss_scale_window": ("fp16_scale_window", rule.window),
        "hysteresis": ("fp16_hysteresis", rule.hysteresis),
        "min_loss_scale": ("fp16_min_scale", int(rule.minimum)),
    }
    conflicts = []
    for key, (name, value) in wanted.items():
        there = section.get(key, "auto")
        if there == "auto":
            section[key] = value
        elif there != value and (name in given or (key == "loss_scale" and given)):
            asked = name if name in given else ", ".join(sorted(given))
            conflicts.append(f"{key}={there} in the file, {asked} asks for {value:g}")
    if conflicts:
        raise ConfigError(
            "the fp16 section of the DeepSpeed configuration and the trainer's settings disagree: "
            f"{'; '.join(conflicts)}. Remove one of each pair."
        )
