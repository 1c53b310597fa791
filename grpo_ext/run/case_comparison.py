"""A step as it was and with other settings, compared: gradients, updates, tokens; in numbers and in words.

Differs from a comparison of trails, which estimates distances: norms are over all weights, in float64.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..algorithms.digests import layer_groups
from .record import Line
from .trail_comparison import both

Tensors = Mapping[str, torch.Tensor]  # by parameter
ALL = "all weights"


@dataclass
class StepResult:
    gradient: Tensors  # before clipping
    clipped: Tensors
    norm: float  # of the gradient before clipping
    update: Tensors  # what the optimizer makes of it
    values: Mapping[str, float]  # as they are logged
    tokens: Mapping[int, dict[str, Any]]  # of `StepRecord`


def alike(run: Tensors, case: Tensors) -> dict[str, dict[str, float]]:
    """By group of parameters, in float64: the cosine, the case's norm over the run's, and that of the difference."""
    norms, figures = dict[str, torch.Tensor](), {}
    for name, group in layer_groups(run).items():
        one, other = run[name].double(), case[name].double()
        parts = torch.stack([one.norm(), other.norm(), (one - other).norm()])
        for key in (ALL, group):
            norms[key] = parts.hypot(norms.get(key, parts * 0))
    for key, values in (norms or {ALL: torch.zeros(3)}).items():  # no parameter has a gradient
        one, other, apart = values.tolist()
        cosine = (one**2 + other**2 - apart**2) / (2 * one * other or math.nan)
        difference = apart / one if one else math.inf if apart else 0.0
        figures[key] = {"cosine": cosine, "ratio": other / (one or math.nan), "difference": difference}
    return figures


def _in_words(what: str, figures: Mapping[str, float]) -> str:
    cosine, ratio = figures["cosine"], figures["ratio"]
    if math.isnan(cosine) and not math.isnan(figures["difference"]):
        return f"{what} zero in the {'run' if math.isnan(ratio) else 'case'}"
    return f"{what} cosine {cosine:.4f}, norm x {ratio:.4g}"


def case_text(compared: Line, lines: Sequence[Line]) -> str:
    """A comparison in words; `lines` are what is recorded of the completions.

    A gradient is the sum over tokens of coefficients times gradients of log-probabilities, which the cases share.
    """
    if "reason" in compared:
        return f"{compared['title']}: not compared: {compared['reason']}"
    title, values, noise = compared["title"], compared["values"], compared["noise"]
    moves = {what: compared[what] for what in ("gradient", "update")}
    if all(part[ALL]["difference"] <= 2 * noise[what] for what, part in moves.items()):
        clipped = [share for name, pair in values.items() if "clip_ratio" in name for share in pair]
        never = compared["case"].keys() <= {"epsilon", "epsilon_high"} and clipped and not any(clipped)
        same = "gradient and update are the same" + " up to rounding" * any(noise.values())
        reason = "the clip never binds" if never else same
        return f"{title}: no difference: {reason} in this step"
    changed = (f"{name} {both(a, b, ' -> ')}" for name, (a, b) in values.items() if str(a) != str(b))
    text = [f"{title}: {', '.join(changed) or 'no logged value differs'}"]
    for group in moves["gradient"]:
        text.append(f"  {group}: {'; '.join(_in_words(what, of[group]) for what, of in moves.items())}")
    # an override of the loss may have run other rows, which are not recorded
    changes = [[abs(change) for change in line["cases"].get(title, ())] for line in lines]
    total = sum(map(sum, changes))
    largest = sorted(
        (pair for pair in zip(changes, lines, strict=True) if any(pair[0])), key=lambda pair: -sum(pair[0])
    )
    for sizes, line in largest[:3]:
        token = line["tokens"]["text"][sizes.index(max(sizes))]
        text.append(f"  {sum(sizes) / total:.0%} of the difference: {line['completion'][:60]!r}, most {token!r}")
    return "\n".join(text)
