"""The dynamic loss scale of fp16 training, as a pure function from one step to the next.

The rule is DeepSpeed's (`deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler`, without `consecutive_hysteresis`),
which OpenRLHF uses too: Micikevicius et al. 2018 (arXiv:1710.03740) with a hysteresis and a minimum.
`torch.amp.GradScaler` has neither, and doubles one step earlier. Used by loss_scaler.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..errors import PrecisionError

FACTOR = 2.0
INITIAL_SCALE = 65536.0


@dataclass(frozen=True)
class ScaleRule:
    """How the scale moves.

    Attributes:
        window: steps without an overflow before the one that doubles the scale.
        hysteresis: overflows before it halves, the one that halves it included.
        minimum: it never falls below.
        dynamic: False: it stays as it is.
    """

    window: int = 1000
    hysteresis: int = 2
    minimum: float = 1.0
    dynamic: bool = True


@dataclass(frozen=True)
class LossScale:
    """The scale and what the rule has to remember.

    Attributes:
        scale: what the loss is multiplied by before the backward pass.
        patience: overflows until it halves, 1 or more.
        steps: steps so far, skipped ones included.
        last_overflow: the step of the last overflow, counted from 0; -1: none.
        skipped: skipped steps so far.
    """

    scale: float
    patience: int
    steps: int = 0
    last_overflow: int = -1
    skipped: int = 0


def start(scale: float, rule: ScaleRule) -> LossScale:
    """The state before the first step."""
    return LossScale(scale, rule.hysteresis)


def after_step(state: LossScale, overflow: bool, rule: ScaleRule) -> LossScale:
    """The state after a step whose gradients were (`overflow`) or were not beyond what fp16 holds.

    Raises:
        PrecisionError: an overflow where the scale cannot fall any more.
    """
    moved = replace(state, steps=state.steps + 1)
    if not overflow:
        if not rule.dynamic:
            return replace(moved, patience=rule.hysteresis)
        clean = state.steps - state.last_overflow - 1  # steps before this one
        if clean > 0 and clean % rule.window == 0:
            return replace(moved, scale=state.scale * FACTOR, patience=rule.hysteresis)
        return moved
    moved = replace(moved, last_overflow=state.steps, skipped=state.skipped + 1)
    if state.patience > 1:
        return replace(moved, patience=state.patience - 1)
    if not rule.dynamic or state.scale <= rule.minimum:
        kind = "at its minimum (fp16_min_scale)" if rule.dynamic else "fixed (fp16_fixed_scale)"
        remedy = "" if rule.dynamic else ", a smaller or a dynamic scale"
        raise PrecisionError(
            f"gradients overflow with a loss scale of {state.scale:g}, which is {kind}; {moved.skipped} of "
            f"{moved.steps} steps were skipped so far. No scale mends gradients this large: use a lower learning_rate "
            f"or max_grad_norm, bf16=True, or float32{remedy}, and see that rewards and losses are of ordinary size."
        )
    return replace(moved, scale=max(state.scale / FACTOR, rule.minimum))
