"""The settings that are measured: one change each from a base row, and the objectives that each is compared with.

A further estimator or loss is one line in `ROWS`: its settings, and the objective that it is documented to follow.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from grpo_ext import GRPOTrainer

from . import objectives as of
from .measure import Comparison, compare, gradients, left_over
from .objectives import GENERATIONS, Objective, TokenTerm, clipped, of_groups, plus, surrogate
from .policy import flat_parameters, gradient, reward
from .sampler import engine_parameters, noisy_engine

FILTERS = ("temperature", "top_k", "top_p")


@dataclass(frozen=True)
class Target:
    """An objective in words and as a function."""

    words: str
    objective: Objective
    unfiltered: bool = False  # of the policy without the row's temperature and filters


@dataclass(frozen=True)
class Row:
    """A setting; the first target is what one might expect it to follow, the last what it follows in fact."""

    name: str
    settings: dict[str, Any]
    targets: tuple[Target, ...]
    why: str = ""
    where: str = "start"  # a key of `places`
    cls: type[GRPOTrainer] = GRPOTrainer
    rewards: Any = reward


STEP_SIZE = 0.002


def moved_by(step_size: float) -> torch.Tensor:
    """The parameters of the start after a step as Adam's first one, along the exact gradient, (D,)."""
    start = flat_parameters()
    return start + step_size * gradient(of.expected_reward, start, start).sign()


@cache
def places() -> dict[str, tuple[list[torch.Tensor], torch.Tensor]]:
    """Where the policy is in turn, and the reference: the old policy, the engine, or the model of the KL term."""
    start, moved = flat_parameters(), moved_by(STEP_SIZE)
    return {
        "start": ([start], start),
        "moved": ([moved], start),
        "old": ([start, moved], start),
        "engine": ([start], engine_parameters()),
    }


def ratio(ratio_PNT: torch.Tensor, logps_PNT: torch.Tensor, positive_PN1: torch.Tensor) -> torch.Tensor:
    return ratio_PNT


def log_probability(ratio_PNT: torch.Tensor, logps_PNT: torch.Tensor, positive_PN1: torch.Tensor) -> torch.Tensor:
    return logps_PNT


def outside(change_PNT: torch.Tensor, positive_PN1: torch.Tensor, threshold: float) -> torch.Tensor:
    """Tokens whose probability changed further than the threshold as their advantage asks."""
    return torch.where(positive_PN1, change_PNT > threshold, change_PNT < -threshold)


# what a completion's log-probability is multiplied by, written out again
def over_tokens_of_group(rewards_CG: torch.Tensor, lengths_CG: torch.Tensor) -> torch.Tensor:
    return (rewards_CG - rewards_CG.mean(1, keepdim=True)) * GENERATIONS / lengths_CG.sum(1, keepdim=True)


def over_deviation_of_group(rewards_CG: torch.Tensor, lengths_CG: torch.Tensor) -> torch.Tensor:
    return (rewards_CG - rewards_CG.mean(1, keepdim=True)) / (rewards_CG.std(1, keepdim=True) + 1e-4)


def above_mean_by_length(rewards_CG: torch.Tensor, lengths_CG: torch.Tensor) -> torch.Tensor:
    return rewards_CG - (rewards_CG * lengths_CG).sum(1, keepdim=True) / lengths_CG.sum(1, keepdim=True)


class OwnLengthBaseline(GRPOTrainer):
    """A planted bias: the baseline grows with the completion's own length."""

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        lengths_B = inputs["completion_mask"].sum(1)
        shifted_B = inputs["advantages"] + 0.5 * (1 - lengths_B / lengths_B.float().mean())
        return super()._compute_loss(model, {**inputs, "advantages": shifted_B})


class WithoutLastToken(GRPOTrainer):
    """A planted bias: the last token of every completion carries no loss."""

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        mask_BT = inputs["completion_mask"]
        followed_BT = torch.nn.functional.pad(mask_BT[:, 1:], (0, 1))
        return super()._compute_loss(model, {**inputs, "completion_mask": mask_BT * followed_BT})


REWARD = Target("expected reward", of.expected_reward)
PER_TOKEN = Target("expected reward per token", of.per_token)
WHOLE = Target("expected reward of the whole policy at temperature 1", of.expected_reward, unfiltered=True)
LENGTH = Target("expected length", of.expected_length)
LAG = {"rollout_lag": 1}
NO_CLIPPING = {**LAG, "epsilon": 1e6}
SEQUENCE = {"importance_sampling_level": "sequence"}
REPLAY = {"sampling_mask": "replay"}
CLIPPING = "limits the step: leaves out tokens that have moved in the direction of their advantage (PPO)"
PREFIXES = "ratios of tokens, not of their prefixes: first order in the move, as in PPO (1707.06347)"
KL = {"advantage_estimator": "leave_one_out", "beta": 0.5}


def _words(settings: dict[str, Any]) -> str:
    return "`" + ", ".join(f"{name}={value!r}" for name, value in settings.items()) + "`"


def _row(*targets: Target, why: str = "", **settings: Any) -> Row:
    return Row(_words(settings), settings, targets, why)


def _loss(*targets: Target, why: str = "", **settings: Any) -> Row:
    """With the loss type's own aggregation."""
    return Row(_words(settings), {"loss_aggregation": None, **settings}, targets, why)


def _off_policy(name: str, settings: dict[str, Any], follows: str, term: TokenTerm, why: str = "") -> Row:
    return Row(name, settings, (REWARD, Target(follows, surrogate(term))), why, where="old")


def _vllm(name: str, term: TokenTerm, why: str = "", **settings: Any) -> Row:
    vllm = {"use_vllm": True, "vllm_mode": "colocate", "vllm_check": False}
    settings = {f"vllm_importance_sampling_{key}": value for key, value in settings.items()}
    targets = (REWARD, Target("the engine's completions, with these weights", surrogate(term)))
    return Row(name, {**vllm, **settings}, targets, why, where="engine")


def _sampled(why: str = "", **settings: Any) -> Row:
    """A filter without replay: log-probabilities of the whole vocabulary on samples of the filtered one."""
    scored = Target("samples scored over the whole vocabulary", surrogate(log_probability), unfiltered=True)
    return _row(WHOLE, REWARD, scored, why=why, **settings)


def _near(model: str) -> tuple[Target, Target]:
    """The expected reward less a divergence from a fixed model, and what a sum of tokens' divergences follows."""
    per_token = plus(of.expected_reward, -0.5, of.token_reverse_kl)
    return (
        Target(f"expected reward - 0.5 KL(policy, {model})", plus(of.expected_reward, -0.5, of.reverse_kl)),
        Target("the same with KL per token, prefixes fixed", per_token),
    )


FORWARD = plus(of.expected_reward, -0.5, of.token_forward_kl)

PLANTED = (
    Row("planted: the last token carries no loss", {}, (REWARD,), cls=WithoutLastToken),
    Row("planted: a baseline that grows with the completion's own length", {}, (REWARD,), cls=OwnLengthBaseline),
    _off_policy("planted: ratios clipped at 0.02", {**LAG, "epsilon": 0.02}, "clipped at 0.02", clipped(0.98, 1.02)),
)

ROWS = (
    _row(REWARD, advantage_estimator="group_centered", why="the mean holds a completion's own reward: 7/8"),
    _row(REWARD, advantage_estimator="leave_one_out"),
    _row(
        REWARD,
        Target("expected reward, prompts over their deviation", of.over_deviation),
        Target("the mean over groups of 8", of_groups(over_deviation_of_group)),
        advantage_estimator="group_standardized",
        why="over the deviation of 8 rewards: prompts whose groups are often constant get less than 1/deviation",
    ),
    _row(
        REWARD,
        Target("log of the pass rate, its series cut at 7 terms", of.truncated_likelihood(7)),
        advantage_estimator="max_rl",
        why="rare successes weigh more; with 8 completions, 7 terms (MaxRL, 2602.02710)",
    ),
    _row(
        REWARD,
        Target("pass@4", of.pass_at(4)),
        advantage_estimator="pass_at_k",
        advantage_k=4,
        why="1/4 - 1/8 of the gradient of pass@4; prompts that mostly pass teach little (2508.10751)",
    ),
    _row(
        REWARD,
        Target("the mean over groups of 8", of_groups(above_mean_by_length)),
        advantage_estimator="optimal_baseline",
        why="the baseline holds a completion's own reward by its length: long answers learn less from theirs",
    ),
    _row(REWARD, advantage_estimator="reinforce_plus_plus_baseline", why="one deviation for the batch: a scale"),
    _row(REWARD, scale_rewards="batch", why="one deviation for the batch: a scale"),
    _loss(
        REWARD,
        PER_TOKEN,
        loss_type="grpo",
        why="each completion over its own length: short answers, right or wrong, weigh more (Dr. GRPO, 2503.20783)",
    ),
    _loss(REWARD, loss_type="dr_grpo", why="over `max_completion_length`: a scale"),
    _loss(REWARD, loss_type="bnpo", why="over the mean length: a scale"),
    _loss(REWARD, loss_type="dapo", why="over the mean length: a scale"),
    _loss(REWARD, loss_type="luspo", **SEQUENCE),
    _loss(
        REWARD,
        loss_type="cispo",
        why="TRL's default `epsilon_high=0.2` caps every ratio at 0.2: a fifth of the next row",
    ),
    _loss(REWARD, loss_type="cispo", epsilon_high=5.0),
    _loss(REWARD, PER_TOKEN, loss_type="sapo", why="`sequence_mean` is its default"),
    _loss(REWARD, loss_type="vespo"),
    _row(REWARD, loss_aggregation="token_mean"),
    _row(
        REWARD,
        loss_aggregation="token_mean",
        global_batch_size=32,
        why="the tokens of a small step depend on the answers; too little to be seen",
    ),
    _row(REWARD, PER_TOKEN, loss_aggregation="sequence_mean", why="as `grpo`"),
    _row(REWARD, loss_aggregation="sequence_sum_norm"),
    _row(
        REWARD,
        Target("expected reward, prompts over their mean length", of.over_mean_length),
        Target("the mean over groups of 8", of_groups(over_tokens_of_group)),
        loss_aggregation="prompt_mean",
        why="over the tokens of the prompt's group: prompts with short answers weigh more",
    ),
    _row(REWARD, **SEQUENCE),
    _row(REWARD, num_iterations=2, why="where the first pass does not move the policy"),
    _off_policy(
        "`num_iterations=2`, second pass", {"num_iterations": 2}, "ratios, clipped", clipped(0.8, 1.2), CLIPPING
    ),
    _off_policy("`rollout_lag=1`", LAG, "ratios, clipped", clipped(0.8, 1.2), CLIPPING),
    _off_policy("`rollout_lag=1`, no clipping", NO_CLIPPING, "ratios of tokens", ratio, PREFIXES),
    _off_policy(
        "`rollout_lag=1`, no clipping, `importance_sampling_level='sequence'`",
        {**NO_CLIPPING, **SEQUENCE},
        "mean ratios of completions (GSPO)",
        lambda ratio, logps, positive: of.mean_ratio(ratio),
        "the root of a completion's ratio, not the ratio",
    ),
    _off_policy(
        "`rollout_lag=1, loss_type='cispo', epsilon_high=5.0`",
        {**LAG, "loss_type": "cispo", "epsilon_high": 5.0},
        "ratios of tokens, at most 5",
        lambda ratio, logps, positive: ratio.clamp(max=5).detach() * logps,
        PREFIXES,
    ),
    _off_policy(
        "`rollout_lag=1, loss_type='sapo'`", {**LAG, "loss_type": "sapo"}, "SAPO's gate", of.sapo_term, PREFIXES
    ),
    _off_policy(
        "`rollout_lag=1, loss_type='vespo'`",
        {**LAG, "loss_type": "vespo"},
        "VESPO's weights",
        of.vespo_term,
        "completions far from the old policy weigh less, on purpose",
    ),
    _off_policy(
        "`rollout_lag=1, trust_region='tv', trust_region_threshold=0.05`",
        {**LAG, "trust_region": "tv", "trust_region_threshold": 0.05},
        "ratios, without tokens that moved further",
        lambda r, logps, positive: r * ~outside(logps.exp() - (logps.exp() / r), positive, 0.05),
        CLIPPING,
    ),
    _off_policy(
        "`rollout_lag=1`, no clipping, `sequence_mask_low=0.9, sequence_mask_high=1.1`",
        {**NO_CLIPPING, "sequence_mask_low": 0.9, "sequence_mask_high": 1.1},
        "ratios of tokens, without completions outside the bounds",
        lambda r, logps, _: r * ((of.mean_ratio(r) >= 0.9) & (of.mean_ratio(r) <= 1.1)),
        "limits the step: leaves out completions that have moved most",
    ),
    _row(
        WHOLE,
        REWARD,
        temperature=0.7,
        why="the reward at the temperature that samples",
    ),
    _sampled(top_k=4, why="the filter is in the samples but not in their log-probabilities"),
    _row(WHOLE, REWARD, top_k=4, **REPLAY, why="the reward of the filtered policy"),
    _sampled(top_p=0.8, why="as `top_k`"),
    _row(WHOLE, REWARD, top_p=0.8, **REPLAY, why="the reward of the filtered policy"),
    _row(
        REWARD,
        Target("the same where cut-off answers score the prompt's mean", of.ended_only),
        mask_truncated_completions=True,
        why="a cut-off answer has no loss, whatever its reward",
    ),
    Row(
        "`beta=0.5`, a reference that differs",
        KL,
        _near("reference"),
        "ignores a token's effect on the KL of later tokens (2506.09477)",
        where="moved",
    ),
    Row(
        "`beta=0.5, use_bias_correction_kl=False`, a reference that differs",
        {**KL, "use_bias_correction_kl": False},
        (
            _near("reference")[0],
            Target("the same with KL(reference, policy) per token, prefixes fixed", FORWARD),
        ),
        "without the ratio the k3 term has the gradient of the other KL (2506.09477)",
        where="moved",
    ),
    Row(
        "`teacher_kl_coef=0.5`, a teacher that differs",
        {"advantage_estimator": "leave_one_out", "teacher_kl_coef": 0.5},
        _near("teacher"),
        "ignores a token's effect on the KL of later tokens, as in GKD (2306.13649)",
        where="moved",
    ),
    Row(
        "a teacher alone, `num_generations=1`",
        {"teacher_kl_coef": 1.0, "num_generations": 1},
        (
            Target("- KL(policy, teacher)", lambda policy: -of.reverse_kl(policy)),
            Target("the same per token, prefixes fixed", lambda policy: -of.token_reverse_kl(policy)),
        ),
        "as above",
        where="moved",
        rewards=None,
    ),
    _row(
        REWARD,
        Target(
            "expected reward + 0.3 entropy per token, prefixes fixed", plus(of.expected_reward, 0.3, of.token_entropy)
        ),
        advantage_estimator="leave_one_out",
        entropy_coef=0.3,
        why="ignores a token's effect on the entropy of later tokens",
    ),
    _row(REWARD, top_entropy_quantile=0.5, why="tokens below the quantile do not learn (2506.01939)"),
    _row(
        REWARD,
        dynamic_sampling=True,
        why="constant groups are replaced: a scale, and less variance for each completion that trains",
    ),
    _vllm(
        "vLLM with perturbed weights, no correction",
        log_probability,
        "the samples are those of another policy",
        correction=False,
    ),
    _vllm(
        "its `token_truncate` correction", lambda r, logps, _: r.clamp(max=3).detach() * logps, mode="token_truncate"
    ),
    _vllm("its `token_mask` correction", lambda r, logps, _: (r * (r <= 3)).detach() * logps, mode="token_mask"),
    _vllm(
        "its `sequence_truncate` correction",
        lambda r, logps, _: of.whole_ratio(r).clamp(max=3) * logps,
        mode="sequence_truncate",
    ),
    _vllm(
        "its `sequence_mask` correction",
        lambda r, logps, _: of.whole_ratio(r) * (of.whole_ratio(r) <= 3) * logps,
        mode="sequence_mask",
    ),
    *PLANTED,
)


def measured(row: Row, completions: int) -> list[tuple[Comparison, float]]:
    """The gradients that a row's trainer computes from this many completions, beside each of the row's targets.

    And what is left of the last target's exact gradient beside the target.
    """
    turns, reference = places()[row.where]
    with TemporaryDirectory() as folder, noisy_engine() if row.where == "engine" else nullcontext():
        gradients_MD = gradients(Path(folder), completions, turns, row.cls, row.rewards, **row.settings)
    filters = {name: value for name, value in row.settings.items() if name in FILTERS}

    def exact(target: Target) -> torch.Tensor:
        return gradient(target.objective, turns[-1], reference, filters, {} if target.unfiltered else filters)

    exact_TD = [exact(target) for target in row.targets]
    length_D = exact(LENGTH)
    return [(compare(gradients_MD, exact_D, length_D), left_over(exact_TD[-1], exact_D)) for exact_D in exact_TD]
