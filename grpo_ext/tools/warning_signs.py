"""What the report warns of: rules over the values that a run has logged, with what helps."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

RECENT, FEWEST = 5, 3  # logged values at either end of a run that a rule looks at; without three it says nothing
CUT_SHARE = 0.5  # of the completions
ENTROPY_LEFT = 0.1  # of the entropy at first
DRIFT, SMALL_DRIFT = 0.1, 0.01  # nats a token; below the second it is rounding, however it grows
GROWTH = 3.0  # of the drift, over the run or along a completion
SPIKE = 10.0  # times the median gradient norm

_DRIFT = "sampling/logp_difference"


@dataclass(frozen=True)
class Summary:
    """A logged value over the run."""

    count: int  # of its latest values
    least: float  # of them
    last: float  # their median
    first: float  # median of as many at the start
    usual: float  # median of all but zeros
    most: float
    step: int  # of the most


Rule = tuple[tuple[str, ...], str, Callable[[Summary, Summary], bool], str]
# The last of these names that was logged is the value, another name one to compare it with; when to warn; a sentence.
_RULES: tuple[Rule, ...] = (
    (
        ("frac_reward_zero_std",),
        "reward",
        lambda alike, reward: alike.least >= 1,
        "All rewards were alike in every group, the last {value.count} times it was logged (mean {other.last:.3g}): "
        "nothing is learned. Take prompts that the model solves sometimes, or a reward with more values.",
    ),
    (
        ("completions/clipped_ratio",),
        "completions/mean_length",
        lambda cut, length: cut.last > CUT_SHARE,
        "{value.last:.0%} of the completions are cut at the length limit, mostly before their answer. Raise "
        "`max_completion_length`, or reward short completions.",
    ),
    (
        ("entropy",),
        "entropy",
        lambda entropy, _: entropy.last < ENTROPY_LEFT * entropy.first,
        "The entropy fell from {value.first:.3g} to {value.last:.3g} nats a token: soon all completions of a prompt are "
        "the same. Lower `learning_rate`, or raise `epsilon_high`, `entropy_coef` or `beta`.",
    ),
    (
        (_DRIFT,),
        _DRIFT,
        lambda drift, _: drift.last > DRIFT or drift.last > max(GROWTH * drift.first, SMALL_DRIFT),
        "Sampler and trainer differ by {value.last:.3g} nats a token ({value.first:.3g} at first): training is off "
        "policy. Sample in the precision of training, and replay what the sampler chose (`sampling_mask`, "
        "`routing_replay`).",
    ),
    (
        (f"{_DRIFT}/below_512", f"{_DRIFT}/below_4096", f"{_DRIFT}/beyond"),
        f"{_DRIFT}/below_64",
        lambda deep, shallow: deep.last > max(GROWTH * shallow.last, SMALL_DRIFT),
        "Sampler and trainer drift apart along a completion: {other.last:.3g} nats a token in its first 64 tokens, "
        "{value.last:.3g} in the deepest. Sample in the precision of training, or lower `max_completion_length`.",
    ),
    (
        ("grad_norm",),
        "grad_norm",
        lambda norm, _: norm.most > SPIKE * norm.usual > 0,
        "The gradient norm was {value.most:.3g} at step {value.step}, its median is {value.usual:.3g}. `grpo-ext rerun "
        "{run} --step {value.step}` shows which completions made it; `max_grad_norm` limits it.",
    ),
)


def warnings_of(series: Mapping[str, tuple[list[int], list[float]]], run: str) -> list[str]:
    """A sentence for each rule that holds."""
    known = {name: _summary(*logged) for name, logged in series.items() if len(logged[1]) >= FEWEST}
    found = []
    for names, other, holds, sentence in _RULES:
        logged = [known[name] for name in names if name in known]
        if logged and other in known and holds(logged[-1], known[other]):
            found.append(sentence.format(value=logged[-1], other=known[other], run=run))
    return found


def _summary(steps: list[int], values: list[float]) -> Summary:
    latest = values[-RECENT:]
    usual = median([value for value in values if value] or [0.0])
    most = max(values)
    typical = (min(latest), median(latest), median(values[:RECENT]), usual)
    return Summary(len(latest), *typical, most, steps[values.index(most)])
