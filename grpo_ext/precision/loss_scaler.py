"""The dynamic loss scale of fp16 training: the scaler that Accelerate drives, or the watch over DeepSpeed's.

The rule and the names of its options are DeepSpeed's (`deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler`, without
`consecutive_hysteresis`), which OpenRLHF uses too: Micikevicius et al. 2018 (arXiv:1710.03740) with a hysteresis and a
minimum. `torch.amp.GradScaler` has neither, doubles one step earlier, looks for overflows on one process alone, and
lets fused optimizers skip steps unseen, so that Accelerate moves the scheduler.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ..batching.sizes import require_whole
from ..errors import ConfigError, ModelError, PrecisionError, did_you_mean
from ..runtime.collectives import any_process

FACTOR = 2.0
# DeepSpeed's defaults; a `loss_scale` other than 0 is fixed
DEFAULTS: dict[str, float] = {
    "loss_scale": 0,
    "initial_scale_power": 16,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
_STATE = ("scale", "patience", "steps", "last_overflow", "skipped")


def loss_scale_options(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the loss scale, with the defaults of those that are not chosen.

    Raises:
        ConfigError: an unknown option, one out of range, or options for both a fixed and a dynamic scale.
    """
    for name in chosen.keys() - DEFAULTS.keys():
        hint = did_you_mean(name, DEFAULTS, f"the options are {', '.join(DEFAULTS)}.")
        raise ConfigError(f"fp16_loss_scale has no option {name!r}; {hint}")
    options = {**DEFAULTS, **chosen}
    fixed = options["loss_scale"]
    if isinstance(fixed, bool) or not isinstance(fixed, (int, float)) or not 0 <= fixed <= 2.0**32:
        raise ConfigError(f"loss_scale={fixed!r}: use a fixed scale up to 2**32, or 0 for a dynamic scale.")
    if fixed and (moving := sorted(chosen.keys() - {"loss_scale", "hysteresis"})):
        raise ConfigError(
            f"loss_scale={fixed:g} is fixed, and {', '.join(moving)} say how a dynamic scale moves; remove one or the "
            "other."
        )
    require_whole("initial_scale_power", options["initial_scale_power"], 0, 32)
    for name in ("loss_scale_window", "hysteresis", "min_loss_scale"):
        require_whole(name, options[name])
    if 2.0 ** options["initial_scale_power"] < options["min_loss_scale"]:
        raise ConfigError(
            f"initial_scale_power={options['initial_scale_power']} starts below min_loss_scale="
            f"{options['min_loss_scale']}; raise the first or lower the second."
        )
    return options


class LossScaler:
    """Scales the loss, unscales the gradients, and skips steps whose gradients overflow.

    `scale`, `unscale_`, `step`, `update`, `is_enabled` and `get_scale` are called by Accelerate in the place of those
    of `torch.amp.GradScaler`.

    Args:
        options: as from `loss_scale_options`.
        overflow_anywhere: from whether this process found an overflow to whether any did (a collective).

    Attributes:
        value: what the loss is multiplied by before the backward pass.
        patience: overflows until the scale halves, 1 or more.
        steps: steps so far, skipped ones included.
        last_overflow: the step of the last overflow, counted from 0; -1: none.
        skipped: skipped steps so far.
    """

    def __init__(self, options: Mapping[str, Any], overflow_anywhere: Callable[[bool], bool]) -> None:
        self.dynamic = not options["loss_scale"]
        self.window, self.hysteresis = options["loss_scale_window"], options["hysteresis"]
        self.minimum = float(options["min_loss_scale"])
        self.overflow_anywhere = overflow_anywhere
        self.value = float(options["loss_scale"] or 2 ** options["initial_scale_power"])
        self.patience = self.hysteresis
        self.steps = self.skipped = self._reported = 0
        self.last_overflow = -1
        self._overflow: bool | None = None  # of the gradients that are unscaled; None: they are not yet

    def is_enabled(self) -> bool:
        """As `torch.amp.GradScaler`."""
        return True

    def get_scale(self) -> float:
        """As `torch.amp.GradScaler`."""
        return self.value

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the scale, in float32."""
        return loss.float() * self.value

    def unscale_(self, optimizer: Any) -> None:
        """Divide the gradients by the scale, and find out on all processes whether one of them overflowed."""
        if self._overflow is not None:
            return
        overflow_here = False
        grads: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    grad = parameter.grad
                    local = grad.to_local() if hasattr(grad, "to_local") else grad  # FSDP2's shards
                    grads.setdefault((local.device, local.dtype), []).append(local)
        for (device, _), same in grads.items():
            overflow = torch.zeros((), device=device)
            inverse = torch.tensor(1.0 / self.value, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(same, overflow, inverse)
            overflow_here = overflow_here or bool(overflow)
        self._overflow = self.overflow_anywhere(overflow_here)

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
        self.move(overflow)

    def move(self, overflow: bool) -> None:
        """Count a step whose gradients were (`overflow`) or were not beyond what fp16 holds, and move the scale.

        Raises:
            PrecisionError: an overflow where the scale cannot fall any more.
        """
        step, self.steps = self.steps, self.steps + 1
        if not overflow:
            clean = step - self.last_overflow - 1  # steps before this one
            if not self.dynamic:
                self.patience = self.hysteresis
            elif clean > 0 and clean % self.window == 0:
                self.value, self.patience = self.value * FACTOR, self.hysteresis
            return
        self.last_overflow, self.skipped = step, self.skipped + 1
        if self.patience > 1:
            self.patience -= 1
        elif self.dynamic and self.value > self.minimum:
            self.value = max(self.value / FACTOR, self.minimum)
        else:
            kind = "at its minimum (min_loss_scale)" if self.dynamic else "fixed (loss_scale)"
            remedy = "" if self.dynamic else ", a smaller or a dynamic scale"
            raise PrecisionError(
                f"gradients overflow with a loss scale of {self.value:g}, which is {kind}; {self.skipped} of "
                f"{self.steps} steps were skipped so far. No scale mends gradients this large: use a lower "
                f"learning_rate or max_grad_norm, bf16=True, or float32{remedy}, and see that rewards and losses are "
                "of ordinary size."
            )

    def report(self) -> dict[str, float]:
        """For a log line; overflows are those since the last one."""
        before, self._reported = self._reported, self.skipped
        return _log_values(self.value, self.skipped, before)

    def state_dict(self) -> dict[str, float]:
        """For a checkpoint: plain numbers."""
        return dict(zip(_STATE, (self.value, self.patience, self.steps, self.last_overflow, self.skipped)))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint, within the settings of now; one of `torch.amp.GradScaler` gives its scale alone."""
        state = {**self.state_dict(), **state}
        if self.dynamic:
            self.value = max(state["scale"], self.minimum)
        self.patience = min(state["patience"], self.hysteresis)
        self.steps, self.last_overflow, self.skipped = (state[name] for name in _STATE[2:])
        self._reported = self.skipped


def _log_values(scale: float, skipped: int, skipped_before: int) -> dict[str, float]:
    return {
        "fp16/loss_scale": scale,
        "fp16/overflows": float(skipped - skipped_before),
        "fp16/skipped_steps": float(skipped),
    }


def install_loss_scaler(accelerator: Any, chosen: Mapping[str, Any]) -> DeepSpeedScale | None:
    """Give an accelerator in fp16 its loss scale, before models and optimizers are prepared.

    Args:
        chosen: the options that the user chose.

    Returns:
        What watches the scale of a DeepSpeed engine, where one scales.

    Raises:
        ConfigError: Accelerate would compute in float32 without a word, or the DeepSpeed file disagrees.
    """
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    if plugin is not None:
        section = plugin.hf_ds_config.config.setdefault("fp16", {})
        fill_deepspeed(section, chosen)
        return DeepSpeedScale(section)
    device = accelerator.device
    if accelerator.mixed_precision != "fp16" or not accelerator.native_amp:
        raise ConfigError(
            f"fp16=True needs an accelerator: on {device.type} Accelerate computes in float32 without a word. Use "
            "bf16=True, or neither."
        )
    accelerator.scaler = LossScaler(loss_scale_options(chosen), lambda overflow: any_process(overflow, device))
    return None


class DeepSpeedScale:
    """Watches the loss scale of a DeepSpeed engine, which scales and skips by itself, without end where it is fixed.

    Args:
        section: the `fp16` section of its configuration.
    """

    def __init__(self, section: Mapping[str, Any]) -> None:
        self.fixed, self.hysteresis = bool(section["loss_scale"]), section["hysteresis"]
        self._reported = self._skipped = self._in_a_row = 0

    def after_step(self, engine: Any) -> None:
        """Called after every step.

        Raises:
            PrecisionError: a fixed scale overflowed `hysteresis` times in a row.
        """
        skipped = int(engine.skipped_steps)
        self._in_a_row = self._in_a_row + 1 if skipped > self._skipped else 0
        self._skipped = skipped
        if self.fixed and self._in_a_row >= self.hysteresis:
            raise PrecisionError(
                f"gradients overflow with the fixed loss scale of {float(engine.optimizer.loss_scale):g}: "
                f"{self._in_a_row} steps in a row were skipped; use a smaller or a dynamic scale, or bf16=True."
            )

    def report(self, engine: Any) -> dict[str, float]:
        """For a log line, as `LossScaler.report`."""
        before, self._reported = self._reported, int(engine.skipped_steps)
        return _log_values(float(engine.optimizer.loss_scale), self._reported, before)


def fill_deepspeed(section: dict[str, Any], chosen: Mapping[str, Any]) -> None:
    """Write the options into the `fp16` section of a DeepSpeed configuration, in place.

    Raises:
        ConfigError: the file has another value for an option that the user chose.
    """
    conflicts = []
    for name, value in loss_scale_options(chosen).items():
        if section.get(name, "auto") == "auto":
            section[name] = value
        elif name in chosen and section[name] != value:
            conflicts.append(f"{name} is {section[name]} in the file and {value} in fp16_loss_scale")
    if not chosen.keys() <= {"loss_scale", "hysteresis"} and section["loss_scale"]:
        conflicts.append(f"loss_scale={section['loss_scale']} in the file is fixed, and fp16_loss_scale is dynamic")
    if conflicts:
        raise ConfigError(
            f"the fp16 section of the DeepSpeed configuration contradicts the settings: {'; '.join(conflicts)}. Remove "
            "one of each pair."
        )


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
            "gradients overflow with the loss scale at its minimum (min_loss_scale). No scale mends gradients this "
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
