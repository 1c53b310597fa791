"""Losses: any partition of a step adds up to the step. tests/parity compares every loss with stock TRL."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from grpo_ext.algorithms.load_balancing import load_balancing_loss, router_statistics
from grpo_ext.algorithms.losses import (
    PPO_CLIPPED,
    LossConfig,
    StepCounts,
    TokenBatch,
    TokenLoss,
    adapted_entropy_coefficient,
    clip_indicators,
    distillation_advantages,
    entropy_threshold,
    off_policy_keep,
    outside_trust_region,
    token_loss,
    token_weights,
)
from grpo_ext.algorithms.policy_losses import LOSS_TYPES
from grpo_ext.errors import ConfigError
from tests.support.loss_steps import LENGTHS, OPTIONS, TOKENS, make, token_batch

EXACT = 1e-12  # float64 sums of order one in another order
# completions one by one, and two micro-batchings in another order
PARTITIONS = ([[row] for row in range(8)], [[6, 2], [0, 5, 1, 4], [7], [3]], [[4, 2, 7, 6, 1, 3], [5, 0]])


def part_of(batch: TokenBatch, rows: list[int]) -> TokenBatch:
    """Some completions as a micro-batch."""

    def part(values: torch.Tensor) -> torch.Tensor:
        of_rows = values.split(TOKENS) if values.dim() == 1 else values
        return torch.cat([of_rows[row] for row in rows]).view(-1, *values.shape[1:])

    given = {name: value for name, value in vars(batch).items() if value is not None and name != "lengths_B"}
    return TokenBatch(lengths_B=batch.lengths_B[rows], **{name: part(value) for name, value in given.items()})


def loss_sum(cfg: LossConfig, batch: TokenBatch, step: TokenBatch) -> torch.Tensor:
    """The loss of a micro-batch by the counts of a step."""
    tokens = int(step.mask_S.sum())
    counts = StepCounts(len(step.lengths_B), tokens, tokens)
    return (token_loss(cfg, batch).loss_S * token_weights(cfg, batch, counts)).sum()


def value_and_gradient(cfg: LossConfig, batch: TokenBatch, parts: list[list[int]]) -> tuple[float, torch.Tensor]:
    """Loss of the step as a sum over parts, and its gradient with respect to the step's log-probabilities."""
    gradient, total = torch.zeros_like(batch.logps_S), 0.0
    for rows in parts:
        loss = loss_sum(cfg, part_of(batch, rows), batch)
        gradient += torch.autograd.grad(loss, batch.logps_S)[0]
        total += loss.item()
    return total, gradient


def combinations() -> Iterator[Any]:
    """In `make test` every option and every level with every loss, and all three together with two of them."""
    for option, level, loss_type in itertools.product(OPTIONS, ["token", "sequence"], LOSS_TYPES):
        if not option.startswith("trust") or (loss_type in PPO_CLIPPED and level == "token"):
            some = level == "token" or option == "plain" or loss_type in ("grpo", "luspo")
            yield pytest.param(option, level, loss_type, marks=() if some else pytest.mark.full)


@pytest.mark.parametrize(("option", "level", "loss_type"), combinations())
def test_any_partition_adds_up_to_the_step(loss_type, level, option):
    cfg, batch = make(loss_type, level, option)
    value, gradient = value_and_gradient(cfg, batch, [list(range(len(LENGTHS)))])
    assert gradient.abs().max() > 1e-4
    for parts in PARTITIONS:
        part_value, part_gradient = value_and_gradient(cfg, batch, parts)
        assert abs(part_value - value) <= EXACT, f"parts {parts}: {part_value} against {value}"
        difference = (part_gradient - gradient).abs()
        assert difference.max() <= EXACT, f"parts {parts}: max {difference.max():.2e}, mean {difference.mean():.2e}"


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "luspo", "dapo"])  # one of each aggregation
def test_averaging_parts_that_count_for_themselves_does_not_add_up(loss_type):
    cfg, batch = make(loss_type, "token", "plain")
    parts = [part_of(batch, rows) for rows in ([0, 1, 2, 3, 4, 5], [6])]
    own = sum(loss_sum(cfg, part, part) for part in parts) / len(parts)
    assert abs(own - loss_sum(cfg, batch, batch)) > 1e-3


def test_a_token_without_an_engine_score_does_not_mask_its_sequence():
    mask, logps = torch.ones(2, 3, dtype=torch.long), torch.zeros(2, 3, dtype=torch.float64)
    sampling = torch.tensor([[math.nan, 0.0, 0.0], [math.nan, 5.0, 5.0]], dtype=torch.float64)
    batch = token_batch(logps, mask, torch.tensor([-1.0, -1.0]))
    assert off_policy_keep(batch, sampling.flatten(), threshold=0.5).tolist() == [1.0] * 3 + [0.0] * 3


def test_sums_of_a_row_have_the_same_bits_alone_and_beside_longer_and_shorter_rows():
    lengths = [700, 3, 0, 1501, 64]
    rows = list(torch.randn(sum(lengths), generator=torch.Generator().manual_seed(0)).split(lengths))

    def sums(some: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the rows, and of what is the gradient of one value for each row."""
        values_S, lengths_B = torch.cat(some), torch.tensor([len(row) for row in some])
        batch = TokenBatch(values_S, torch.ones_like(values_S), torch.ones(len(some), 1), lengths_B)
        ones = torch.ones(len(some), 1, requires_grad=True)
        return batch.sums(values_S), torch.autograd.grad((batch.spread(ones) * values_S).sum(), ones)[0]

    alone = torch.cat([sums([row])[0] for row in rows])
    for beside, backwards in zip(sums(rows), sums(rows[::-1])):
        assert torch.equal(beside, alone)
        assert torch.equal(beside, backwards.flip(0))
        assert beside[2] == 0
    # the control: differences of a running sum
    running = torch.cat([torch.zeros(1), *rows]).cumsum(0)
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    others = (running[bounds[1:]] - running[bounds[:-1]])[:, None]
    torch.testing.assert_close(others, alone, rtol=1e-4, atol=1e-4)
    assert not torch.equal(others, alone)


# ---- The trust region and the sequence mask --------------------------------------------------------------------------

NEW = torch.tensor([[-0.1, -2.0, -0.5, -1.77], [-0.3, -1.2, -1e-6, -9.5]], dtype=torch.float64)
OLD = torch.tensor([[-0.4, -2.1, -0.2, -3.0], [-0.2, -0.7, -0.7, -9.0]], dtype=torch.float64)
ADVANTAGES = torch.tensor([1.5, -0.5], dtype=torch.float64)


def outcome(cfg: LossConfig, logps: torch.Tensor = NEW, **others: torch.Tensor) -> tuple[TokenLoss, torch.Tensor]:
    """The losses of the tokens, and their gradient with respect to their log-probabilities (B, T)."""
    logps = logps.clone().requires_grad_()
    tokens = token_loss(cfg, token_batch(logps, torch.ones_like(logps), ADVANTAGES, **others))
    return tokens, torch.autograd.grad(tokens.loss_S.sum(), logps)[0]


# gradients of verl's dppo_tv and dppo_kl (1dda039b) on the same inputs; for "tv" the sums of the losses of prime-rl
# (559b4477) by completion are -7.90082801 and 1.76255939
BY_VERL = {
    ("tv", 0.15): [[0.0, -1.65775638, -1.11122733, -5.1318443], [0.45241871, 0.0, 1.00687535, 0.30326533]],
    ("kl", 0.05): [[0.0, -1.65775638, -1.11122733, 0.0], [0.45241871, 0.0, 1.00687535, 0.30326533]],
}


@pytest.mark.parametrize(("kind", "threshold"), BY_VERL)
def test_the_trust_region_leaves_out_what_verl_leaves_out(kind, threshold):
    cfg = LossConfig(trust_region=kind, trust_region_threshold=threshold)
    expected = torch.tensor(BY_VERL[kind, threshold], dtype=torch.float64)
    tokens, gradient = outcome(cfg, old_logps_S=OLD)
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=0)
    # the ratio is its own gradient
    torch.testing.assert_close(tokens.loss_S.detach(), expected.flatten(), atol=1e-6, rtol=0)
    assert torch.equal(tokens.outside_region_S, expected.flatten() == 0)
    batch = token_batch(NEW, torch.ones_like(NEW), ADVANTAGES)
    assert clip_indicators(cfg, tokens, batch)["trust_region/left_out"].sum() == (expected == 0).sum()
    # without an old policy the sampler's probabilities bound the token, and the ratio is one
    on_policy, _ = outcome(cfg, sampling_logps_S=OLD)
    assert torch.equal(on_policy.outside_region_S, expected.flatten() == 0)
    assert torch.equal(on_policy.ratio, torch.ones_like(OLD).flatten())
    unknown, _ = outcome(cfg, sampling_logps_S=torch.full_like(OLD, math.nan))
    assert not unknown.outside_region_S.any()
    # clipped ratios leave out other tokens: those that are unlikely
    _, clipped = outcome(LossConfig(), old_logps_S=OLD)
    assert not torch.equal(clipped == 0, expected == 0)


def test_in_a_trust_region_a_ratio_weights_a_token_by_20_at_most():
    cfg = LossConfig(trust_region="tv", trust_region_threshold=0.5)
    old = torch.tensor([[-4.0, -2.0, -800.0, -1.0], [-1.0] * 4], dtype=torch.float64)
    tokens, gradient = outcome(cfg, torch.full_like(old, -1.0), old_logps_S=old)
    assert float(tokens.ratio[2]) == math.inf
    expected = -ADVANTAGES[0] * torch.tensor([20.0, math.e, 20.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(gradient[0], expected)
    torch.testing.assert_close(tokens.loss_S[:4].detach(), expected)
    certain, zero = outcome(cfg, torch.zeros_like(old), old_logps_S=old)  # all outside: no zero times infinity
    assert bool((zero[0] == 0).all())
    assert bool((certain.loss_S[:4] == 0).all())


def test_with_a_teacher_each_token_has_its_own_gradient_under_a_ratio_of_sequences():
    """GSPO-token (arXiv 2507.18071, section 4.3): the value of GSPO's ratio, the gradient of the token."""
    cfg = LossConfig("grpo", "sequence", teacher_kl_coef=1.0, epsilon_high=10.0, epsilon_low=10.0)
    logps, advantages = NEW.clone().requires_grad_(), torch.linspace(-1, 1, NEW.numel()).double().view_as(NEW)
    tokens = token_loss(cfg, token_batch(logps, torch.ones_like(NEW), advantages, old_logps_S=OLD))
    (gradient,) = torch.autograd.grad(tokens.loss_S.sum(), logps)
    ratio_B1 = (NEW - OLD).mean(1, keepdim=True).exp()
    torch.testing.assert_close(gradient, -ratio_B1 * advantages)
    torch.testing.assert_close(tokens.loss_S.detach(), (-ratio_B1 * advantages).flatten())
    assert float((gradient - gradient.mean(1, keepdim=True)).norm() / gradient.norm()) > 0.1  # the ratio of GSPO: alike


def test_binary_kl_of_a_token_that_has_become_certain():
    """1 - probability is zero in float32, and the divergence of two nearly certain tokens is not infinite."""
    old, new = torch.tensor([[-6e-8, -0.7]]), torch.tensor([[0.0, 0.0]])
    assert outside_trust_region("kl", 0.05, new, old, torch.ones(1, 1)).tolist() == [[False, True]]


def test_the_sequence_mask_is_on_the_geometric_mean_ratio_to_the_sampler():
    # exp of the mean log-ratios: 1.1735 (log 0.16), 0.8353 (log -0.18)
    sampler = NEW - torch.tensor([[0.3, 0.1, 0.2, 0.04], [-0.1, -0.5, 0.0, -0.12]], dtype=torch.float64)
    for low, high, expected in (
        (None, 1.2, [False, False]),
        (None, 1.17, [True, False]),
        (0.84, None, [False, True]),
        (0.8, 1.2, [False, False]),
        (0.99, 1.01, [True, True]),
    ):
        cfg = LossConfig(sequence_mask_low=low, sequence_mask_high=high)
        tokens, gradient = outcome(cfg, sampling_logps_S=sampler)
        assert tokens.outside_bounds_B1.flatten().tolist() == expected
        assert (gradient == 0).all(1).tolist() == expected
    # the sampler is the old policy where no engine reports; unreported tokens do not count
    assert outcome(LossConfig(sequence_mask_high=1.17), old_logps_S=sampler)[0].outside_bounds_B1.tolist() == [
        [True],
        [False],
    ]
    sampler[0, :3] = math.nan
    assert outcome(LossConfig(sequence_mask_high=1.17), sampling_logps_S=sampler)[0].outside_bounds_B1.sum() == 0
    assert outcome(LossConfig(sequence_mask_high=1.03), sampling_logps_S=sampler)[0].outside_bounds_B1[0]


# ---- Aggregations by hand -------------------------------------------------------------------------------------------

MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
PER_TOKEN = torch.arange(1.0, 17.0, dtype=torch.float64).view(4, 4)
TOKENS_OF_MASK = [4, 3, 1, 2]  # some carry no loss
# rows sum to 10, 5+6 = 11, 9, 0 under the mask; 7 tokens, 4 completions, at most 8 tokens each
BY_HAND = {
    "token_mean": 30 / 7,
    "sequence_mean": (10 / 4 + 11 / 2 + 9 / 1 + 0) / 4,
    "sequence_sum": 30 / 4,
    "sequence_sum_norm": 30 / (4 * 8),
}


def weighted_sum(cfg: LossConfig, counts: StepCounts, rows: list[int], *groups: list[int]) -> torch.Tensor:
    """What some rows add to the aggregation; their log-probabilities are the losses of their tokens."""
    lengths = [TOKENS_OF_MASK[row] for row in rows]
    batch = token_batch(PER_TOKEN[rows], MASK[rows], torch.ones(len(rows)), lengths)
    return (batch.logps_S * token_weights(cfg, batch, counts, *groups)).sum()


@pytest.mark.parametrize("name", BY_HAND)
def test_an_aggregation_is_its_formula_whatever_the_loss_type(name):
    for loss_type in LOSS_TYPES:
        cfg = LossConfig(loss_type=loss_type, max_completion_length=8, aggregation=name)
        total = weighted_sum(cfg, StepCounts(4, 7, 7), [0, 1, 2, 3])
        assert total.item() == pytest.approx(BY_HAND[name], rel=1e-6)
        without = token_batch(torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.long), torch.ones(2))
        assert not token_weights(cfg, without, StepCounts(0, 0, 0)).any()


def test_the_prompt_mean_by_hand():
    # rows 0 and 1 are a group with 6 tokens that sum to 21, rows 2 and 3 one with 1 token, 9
    cfg, counts = LossConfig(aggregation="prompt_mean"), StepCounts(4, 7, 7, {0: 6, 1: 1})
    by_hand = (21 / 6 + 9 / 1) / 2
    assert weighted_sum(cfg, counts, [0, 1, 2, 3], [0, 0, 1, 1]).item() == pytest.approx(by_hand)
    # any partition adds up to it, whatever order the rows come in
    parts = [([2, 0], [1, 0]), ([3], [1]), ([1], [0])]
    total = sum(weighted_sum(cfg, counts, *part) for part in parts)
    assert total.item() == pytest.approx(by_hand, rel=1e-6)


def test_unknown_aggregations_are_refused():
    with pytest.raises(ConfigError, match=r"loss_aggregation='mean' is unknown; use one of token_mean, .*"):
        LossConfig(aggregation="mean")


ENTROPIES = st.lists(st.sampled_from([0.0, 0.1, 0.5, 0.5, 1.0, 1.0, 2.5, 3.0]), min_size=1, max_size=40)


@given(ENTROPIES, st.floats(0.0, 1.0))
def test_the_entropy_threshold_is_torchs_quantile_less_the_tolerance(entropies, top):
    values = torch.tensor(entropies, dtype=torch.float64)
    threshold = entropy_threshold(values.float(), top, tolerance=0.01)
    expected = torch.quantile(values.float().double(), 1.0 - top) - 0.01
    assert threshold == pytest.approx(expected.item(), abs=1e-12)


def test_tokens_with_one_entropy_in_exact_arithmetic_are_kept_or_left_together():
    exact = torch.tensor([2.0] * 3 + [1.0] * 4 + [0.5] * 3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        seen = exact + 1e-6 * (2 * torch.rand(10, generator=generator) - 1)
        # the 70th and the 50th of 100 parts: inside a run of ties, and at one
        assert (seen >= entropy_threshold(seen, 0.5)).tolist() == (exact >= 1.0).tolist()
        assert (seen >= entropy_threshold(seen, 0.2)).tolist() == (exact >= 2.0).tolist()
        assert (seen >= entropy_threshold(seen, 0.5, tolerance=0.0)).tolist() != (exact >= 1.0).tolist()
    assert entropy_threshold(torch.zeros(0), 0.2) == math.inf


def test_the_entropy_coefficient_moves_towards_the_target_within_bounds():
    bounds = (1.0, 0.01, 0.0, 0.2)  # target, change in a step, lowest, highest
    for coefficient, entropy, expected in (
        (0.10, 0.50, 0.11),  # below the target: up
        (0.10, 1.00, 0.11),  # at the target: up
        (0.10, 1.01, 0.09),  # above: down
        (0.195, 0.5, 0.2),  # not above the highest
        (0.005, 2.0, 0.0),  # not below the lowest
    ):
        assert adapted_entropy_coefficient(coefficient, entropy, *bounds) == pytest.approx(expected, abs=1e-15)


EXPERTS, TOP_K, LAYERS = 4, 2, 3


@pytest.mark.parametrize(
    "parts", [[[0, 1, 2, 3, 4]], [[0, 1], [2, 3, 4]], [[4], [2], [0, 3], [1]], [[0], [1], [2], [3], [4]]]
)
def test_the_load_balancing_loss_of_any_partition_is_transformers(parts):
    generator = torch.Generator().manual_seed(0)
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 0], [0, 0, 1, 1, 0], [1, 1, 1, 1, 1], [0, 1, 0, 1, 0]])
    logits = tuple(torch.randn(mask.numel(), EXPERTS, generator=generator).requires_grad_() for _ in range(LAYERS))
    theirs = load_balancing_loss_func(logits, EXPERTS, TOP_K, mask)
    pieces, means = [], []
    for rows in parts:
        layers = tuple(layer.view(*mask.shape, EXPERTS)[rows].flatten(0, 1) for layer in logits)
        pieces.append(router_statistics(layers, mask[rows], TOP_K))
        means.append(load_balancing_loss_func(layers, EXPERTS, TOP_K, mask[rows]))
    rows = sum(piece[2] for piece in pieces)
    share = sum(piece[0] for piece in pieces) / rows
    ours = sum(load_balancing_loss(probs, share.to(probs), rows) for _, probs, _ in pieces)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    for mine, reference in zip(torch.autograd.grad(ours, logits), torch.autograd.grad(theirs, logits)):
        torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-7)
        assert reference.abs().max() > 1e-4
    # the control: the mean of what each part has for itself is another number
    assert (abs(sum(means) / len(means) - theirs) > 1e-4) == (len(parts) > 1)


def test_a_teachers_advantages_give_the_gradient_of_the_reverse_kl():
    """The mean over all tokens of a vocabulary, against the divergence itself; a mean is not subtracted."""
    generator = torch.Generator().manual_seed(3)
    student_BV, teacher_BV = torch.randn(2, 4, 9, generator=generator, dtype=torch.float64)
    logps_BV = student_BV.requires_grad_().log_softmax(-1)
    teacher_BV = teacher_BV.log_softmax(-1)
    (expected,) = torch.autograd.grad((logps_BV.exp() * (logps_BV - teacher_BV)).sum(), student_BV, retain_graph=True)
    advantages_BV = distillation_advantages(logps_BV, teacher_BV, 0.5)
    (found,) = torch.autograd.grad(-(logps_BV.exp().detach() * advantages_BV * logps_BV).sum(), student_BV)
    assert float((found - 0.5 * expected).norm() / expected.norm()) < EXACT
    assert not advantages_BV.requires_grad
