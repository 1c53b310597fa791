"""What the report warns of: rules over the values that a run has logged, with what helps."""

from collections.abc import Callable, Mapping
from statistics import median

RECENT, FEWEST = 5, 3  # logged values at either end of a run that a rule looks at; without three it says nothing
CUT_SHARE = 0.5  # of the completions
ENTROPY_LEFT = 0.1  # of the entropy at first
DRIFT, SMALL_DRIFT = 0.1, 0.01  # nats a token; what is below the second is rounding, however it grows
GROWTH = 3.0  # of the drift, over the run or along a completion
SPIKE = 10.0  # times the median gradient norm

_DRIFT = "sampling/logp_difference"
_DEEP = "the deepest"  # of its values by depth; "first" is that of the first tokens

# name of the logged value, when its summary warns, what the warning says
_RULES: tuple[tuple[str, Callable[[dict[str, float]], bool], str], ...] = (
    (
        "frac_reward_zero_std",
        lambda alike: alike["least"] >= 1,
        "All rewards are alike in every group, the last {count} times it was logged: nothing is learned. Take prompts "
        "that the model solves sometimes, or a reward with more values.",
    ),
    (
        "completions/clipped_ratio",
        lambda cut: cut["last"] > CUT_SHARE,
        "{last:.0%} of the completions are cut at the length limit. Raise `max_completion_length`, or reward short "
        "completions.",
    ),
    (
        "entropy",
        lambda entropy: entropy["last"] < ENTROPY_LEFT * entropy["first"],
        "The entropy fell from {first:.3g} to {last:.3g} nats a token: soon all completions of a prompt are the same. "
        "Lower `learning_rate`, or raise `epsilon_high`, `entropy_coef` or `beta`.",
    ),
    (
        _DRIFT,
        lambda drift: drift["last"] > min(DRIFT, max(GROWTH * drift["first"], SMALL_DRIFT)),
        "Sampler and trainer differ by {last:.3g} nats a token, at first by {first:.3g}. Sample in the precision of "
        "training, and replay what the sampler chose (`sampling_mask`, `routing_replay`).",
    ),
    (
        _DEEP,
        lambda drift: drift["last"] > max(GROWTH * drift["first"], SMALL_DRIFT),
        "Sampler and trainer drift apart along a completion: by {first:.3g} nats a token in its first 64 tokens, by "
        "{last:.3g} in the deepest. Sample in the precision of training, or lower `max_completion_length`.",
    ),
    (
        "grad_norm",
        lambda norm: norm["most"] > SPIKE * norm["usual"] > 0,
        "The gradient norm was {most:.3g} at step {step}; its median is {usual:.3g}. `grpo-ext rerun {run} --step "
        "{step}` shows which completions did it, `max_grad_norm` limits it.",
    ),
)


def warnings_of(series: Mapping[str, tuple[list[int], list[float]]], run: str) -> list[str]:
    """A sentence for each rule that holds; `series` has the steps and the values of what was logged, by name."""
    known = {name: _summary(*logged) for name, logged in series.items() if len(logged[1]) >= FEWEST}
    if "teacher_kl" in known:  # from which groups with equal rewards learn
        known.pop("frac_reward_zero_std", None)
    depths = [f"{_DRIFT}/{depth}" for depth in ("below_64", "below_512", "below_4096", "beyond")]
    if by_depth := [known[name] for name in depths if name in known]:
        known[_DEEP] = by_depth[-1] | {"first": by_depth[0]["last"]}
    holding = [(known[name], sentence) for name, warns, sentence in _RULES if name in known and warns(known[name])]
    return [sentence.format(**summary, run=run) for summary, sentence in holding]


def _summary(steps: list[int], values: list[float]) -> dict[str, float]:
    most, latest, usual = max(values), values[-RECENT:], [value for value in values if value]
    ends = {"first": median(values[:RECENT]), "last": median(latest), "least": min(latest), "count": len(latest)}
    return ends | {"usual": median(usual or [0.0]), "most": most, "step": steps[values.index(most)]}
