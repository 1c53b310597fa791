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
from grpo_ext.algorithms.advantages import ESTIMATORS

from . import objectives as of
from .measure import Comparison, compare, gradients
from .objectives import GENERATIONS, Objective, TokenTerm, clipped, of_groups, plus, surrogate
from .policy import flat_parameters, gradient
from .sampler import engine_parameters, noisy_engine

FILTERS = ("temperature", "top_k", "top_p")
CENTRED = (GENERATIONS - 1) / GENERATIONS  # of `group_centered`: the mean holds a completion's own reward


@dataclass(frozen=True)
class Target:
    """An objective in words and as a function."""

    words: str
    objective: Objective
    unfiltered: bool = False  # of the policy without the row's temperature and filters


@dataclass(frozen=True)
class Row:
    """A setting; the first target is what it is documented to follow, a second one what it follows instead."""

    name: str
    settings: dict[str, Any]
    targets: tuple[Target, ...]
    remark: str = ""
    where: str = "start"  # a key of `places`
    cls: type[GRPOTrainer] = GRPOTrainer


@cache
def places() -> dict[str, tuple[list[torch.Tensor], torch.Tensor]]:
    """Where the policy is in turn, and the parameters of the reference: of the old policy, the engine or the KL term.

    "moved" is as far from the start as a step of Adam with a learning rate of 0.002 along the exact gradient.
    """
    start = flat_parameters()
    moved = start + 0.002 * gradient(of.expected_reward, start, start).sign()
    return {
        "start": ([start], start),
        "moved": ([moved], start),
        "old": ([start, moved], start),
        "engine": ([start], engine_parameters()),
    }


def in_groups(estimator: str, aggregation: str = "sum") -> Objective:
    """The exact mean of an estimator of this package with an aggregation, over groups of 8."""
    weights = {"sum": lambda n: 1.0, "mean": lambda n: 1 / n, "prompt": lambda n: n.size(1) / n.sum(1, keepdim=True)}
    return of_groups(lambda rewards, n: ESTIMATORS[estimator](rewards) * weights[aggregation](n))


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
WHOLE = Target("the same without temperature and filters", of.expected_reward, unfiltered=True)
LENGTH = Target("expected length", of.expected_length)
LAG = {"rollout_lag": 1}
NO_CLIPPING = {**LAG, "epsilon": 1e6}
SEQUENCE = {"importance_sampling_level": "sequence"}
REPLAY = {"sampling_mask": "replay"}
KL = {"advantage_estimator": "leave_one_out", "beta": 0.5}


def _words(settings: dict[str, Any]) -> str:
    return "`" + ", ".join(f"{name}={value!r}" for name, value in settings.items()) + "`"


def _row(*targets: Target, remark: str = "", **settings: Any) -> Row:
    return Row(_words(settings), settings, targets, remark)


def _loss(*targets: Target, remark: str = "", **settings: Any) -> Row:
    """With the loss type's own aggregation."""
    return Row(_words(settings), {"loss_aggregation": None, **settings}, targets, remark)


def _off_policy(name: str, settings: dict[str, Any], follows: str, term: TokenTerm, remark: str = "") -> Row:
    return Row(name, settings, (REWARD, Target(follows, surrogate(term))), remark, where="old")


def _vllm(name: str, term: TokenTerm, remark: str = "", **settings: Any) -> Row:
    vllm = {"use_vllm": True, "vllm_mode": "colocate", "vllm_check": False}
    settings = {f"vllm_importance_sampling_{key}": value for key, value in settings.items()}
    targets = (REWARD, Target("the engine's completions, weighted so", surrogate(term)))
    return Row(name, {**vllm, **settings}, targets, remark, where="engine")


def _sampled(remark: str = "", **settings: Any) -> Row:
    """A filter without replay: log-probabilities of the whole vocabulary on samples of the filtered one."""
    scored = Target("samples scored over the whole vocabulary", surrogate(log_probability), unfiltered=True)
    return _row(REWARD, scored, WHOLE, remark=remark, **settings)


def ratio(ratio_PNT: torch.Tensor, logps_PNT: torch.Tensor, positive_PN1: torch.Tensor) -> torch.Tensor:
    return ratio_PNT


def log_probability(ratio_PNT: torch.Tensor, logps_PNT: torch.Tensor, positive_PN1: torch.Tensor) -> torch.Tensor:
    return logps_PNT


PLANTED = (
    Row("planted: the last token carries no loss", {}, (REWARD,), cls=WithoutLastToken),
    Row("planted: a baseline that grows with the completion's own length", {}, (REWARD,), cls=OwnLengthBaseline),
    _off_policy("planted: ratios clipped at 0.02", {**LAG, "epsilon": 0.02}, "clipped at 0.02", clipped(0.98, 1.02)),
)

ROWS = (
    _row(REWARD, advantage_estimator="group_centered"),
    _row(REWARD, advantage_estimator="leave_one_out"),
    _row(
        REWARD,
        Target("expected reward, prompts over their deviation", of.over_deviation),
        Target("the mean over groups of 8", in_groups("group_standardized")),
        advantage_estimator="group_standardized",
    ),
    _row(REWARD, advantage_estimator="reinforce_plus_plus_baseline"),
    _row(REWARD, scale_rewards="batch"),
    _loss(REWARD, PER_TOKEN, loss_type="grpo"),
    _loss(REWARD, loss_type="dr_grpo"),
    _loss(REWARD, loss_type="bnpo"),
    _loss(REWARD, loss_type="dapo"),
    _loss(REWARD, loss_type="luspo", **SEQUENCE),
    _loss(REWARD, loss_type="cispo"),
    _loss(REWARD, loss_type="cispo", epsilon_high=5.0),
    _loss(REWARD, PER_TOKEN, loss_type="sapo"),
    _loss(REWARD, loss_type="vespo"),
    _row(REWARD, loss_aggregation="token_mean"),
    _row(REWARD, loss_aggregation="token_mean", global_batch_size=32),
    _row(REWARD, PER_TOKEN, loss_aggregation="sequence_mean"),
    _row(REWARD, loss_aggregation="sequence_sum_norm"),
    _row(
        REWARD,
        Target("expected reward, prompts over their mean length", of.over_mean_length),
        Target("the mean over groups of 8", in_groups("group_centered", "prompt")),
        loss_aggregation="prompt_mean",
    ),
    _row(REWARD, **SEQUENCE),
    _row(REWARD, num_iterations=2),
    _off_policy("`num_iterations=2`, second pass", {"num_iterations": 2}, "ratios, clipped", clipped(0.8, 1.2)),
    _off_policy("`rollout_lag=1`", LAG, "ratios, clipped", clipped(0.8, 1.2)),
    _off_policy("`rollout_lag=1`, no clipping", NO_CLIPPING, "ratios of tokens", ratio),
    _off_policy(
        "`rollout_lag=1`, no clipping, `importance_sampling_level='sequence'`",
        {**NO_CLIPPING, **SEQUENCE},
        "mean ratios of completions (GSPO)",
        lambda ratio, logps, positive: of.mean_ratio(ratio),
    ),
    _off_policy(
        "`rollout_lag=1, loss_type='cispo', epsilon_high=5.0`",
        {**LAG, "loss_type": "cispo", "epsilon_high": 5.0},
        "ratios of tokens, at most 5",
        lambda ratio, logps, positive: ratio.clamp(max=5).detach() * logps,
    ),
    _off_policy("`rollout_lag=1, loss_type='sapo'`", {**LAG, "loss_type": "sapo"}, "SAPO's gate", of.sapo_term),
    _off_policy("`rollout_lag=1, loss_type='vespo'`", {**LAG, "loss_type": "vespo"}, "VESPO's weights", of.vespo_term),
    _row(REWARD, WHOLE, temperature=0.7),
    _sampled(top_k=4),
    _row(REWARD, WHOLE, top_k=4, **REPLAY),
    _sampled(top_p=0.8),
    _row(REWARD, WHOLE, top_p=0.8, **REPLAY),
    _row(
        REWARD,
        Target("the same, cut-off answers score their prompt's mean", of.ended_only),
        mask_truncated_completions=True,
    ),
    Row(
        "`beta=0.5`, reference elsewhere",
        KL,
        (
            Target("expected reward - 0.5 KL(policy, reference)", plus(of.expected_reward, -0.5, of.reverse_kl)),
            Target("the same KL per token, prefixes fixed", plus(of.expected_reward, -0.5, of.token_reverse_kl)),
        ),
        where="moved",
    ),
    Row(
        "`beta=0.5, use_bias_correction_kl=False`, reference elsewhere",
        {**KL, "use_bias_correction_kl": False},
        (
            Target("expected reward - 0.5 KL(policy, reference)", plus(of.expected_reward, -0.5, of.reverse_kl)),
            Target(
                "KL(reference, policy) per token, prefixes fixed", plus(of.expected_reward, -0.5, of.token_forward_kl)
            ),
        ),
        where="moved",
    ),
    _row(
        REWARD,
        Target(
            "expected reward + 0.3 entropy per token, prefixes fixed", plus(of.expected_reward, 0.3, of.token_entropy)
        ),
        advantage_estimator="leave_one_out",
        entropy_coef=0.3,
    ),
    _row(REWARD, top_entropy_quantile=0.5),
    _row(REWARD, dynamic_sampling=True),
    _vllm("vLLM that rounds, no correction", log_probability, correction=False),
    _vllm("the same, `token_truncate`", lambda r, logps, _: r.clamp(max=3).detach() * logps, mode="token_truncate"),
    _vllm("the same, `token_mask`", lambda r, logps, _: (r * (r <= 3)).detach() * logps, mode="token_mask"),
    _vllm(
        "the same, `sequence_truncate`",
        lambda r, logps, _: of.whole_ratio(r).clamp(max=3) * logps,
        mode="sequence_truncate",
    ),
    _vllm(
        "the same, `sequence_mask`",
        lambda r, logps, _: of.whole_ratio(r) * (of.whole_ratio(r) <= 3) * logps,
        mode="sequence_mask",
    ),
    *PLANTED,
)


def measured(row: Row, completions: int) -> list[Comparison]:
    """The gradients that a row's trainer computes from this many completions, beside each of the row's targets."""
    turns, reference = places()[row.where]
    with TemporaryDirectory() as folder, noisy_engine() if row.where == "engine" else nullcontext():
        gradients_MD = gradients(Path(folder), completions, turns, row.cls, **row.settings)
    filters = {name: value for name, value in row.settings.items() if name in FILTERS}

    def exact(target: Target) -> torch.Tensor:
        return gradient(target.objective, turns[-1], reference, filters, {} if target.unfiltered else filters)

    length_D = exact(LENGTH)
    return [compare(gradients_MD, exact(target), length_D) for target in row.targets]
