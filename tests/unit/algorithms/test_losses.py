"""Losses: any partition of a step adds up to the step; every formula is TRL's (its own lines are the oracle)."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
import textwrap
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from trl import GRPOTrainer
from trl.trainer import grpo_trainer

from grpo_ext.algorithms.losses import (
    LOSS_TYPES,
    PPO_CLIPPED,
    LossConfig,
    StepCounts,
    TokenBatch,
    adapted_entropy_coefficient,
    clip_indicators,
    entropy_threshold,
    importance_log_ratio,
    kl_estimate,
    load_balancing_loss,
    off_policy_keep,
    router_statistics,
    token_loss,
    token_weights,
    vespo_weight,
)
from grpo_ext.errors import ConfigError

EXACT = 1e-12  # float64 sums of order one in another order
WIDTH = 5
LENGTHS = (5, 3, 0, 4, 1, 2, 5)  # tokens that carry loss; one completion has none
LEVELS = ("token", "sequence")
OPTIONS = {
    "plain": {},
    "delta": {"delta": 1.3},
    "beta": {"beta": 0.1, "use_bias_correction_kl": False},
    "beta, bias correction": {"beta": 0.1, "use_bias_correction_kl": True},
    "off-policy mask": {"off_policy_mask_threshold": 0.05},
    "entropy keep": {"keep": True},
    "sampling ratio per token": {"correct_sampling": True, "sampling": "token"},
    "sampling ratio per sequence": {"correct_sampling": True, "sampling": "sequence"},
    "everything": {
        "delta": 1.3,
        "beta": 0.1,
        "off_policy_mask_threshold": 0.05,
        "keep": True,
        "correct_sampling": True,
        "sampling": "token",
    },
}
VARIANTS = list(itertools.product(LOSS_TYPES, LEVELS, OPTIONS))
EVERY_VARIANT = pytest.mark.parametrize(("loss_type", "level", "option"), VARIANTS)


def make(loss_type: str, level: str, option: str) -> tuple[LossConfig, TokenBatch]:
    """A configuration and a step of 7 completions in float64, with ratios on both sides of every clip."""
    options = dict(OPTIONS[option])
    keep, sampling = options.pop("keep", False), options.pop("sampling", None)
    cfg = LossConfig(
        loss_type=loss_type,
        importance_sampling_level=level,
        epsilon_low=0.1,
        epsilon_high=1.2 if loss_type == "cispo" else 0.15,
        max_completion_length=6,
        **options,
    )
    generator = torch.Generator().manual_seed(20)
    shape = (len(LENGTHS), WIDTH)

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(shape, generator=generator, dtype=torch.float64)

    mask = (torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]).long()
    logps = (-1.5 + noise(0.4)) * mask
    old, reference = logps + noise(0.3) * mask, logps + noise(0.3) * mask
    # outside the mask TRL's ratio is exactly one
    ratio = torch.exp(noise(0.2) * mask) if sampling == "token" else torch.exp(noise(0.2)[:, :1]) if sampling else None
    batch = TokenBatch(
        logps.requires_grad_(),
        mask,
        torch.tensor([0.7, -1.2, 0.4, 0.0, 1.5, -0.3, -0.9], dtype=torch.float64),
        old_logps_BT=old,
        ref_logps_BT=reference,
        sampling_logps_BT=(old + noise(0.1) * mask) if option in ("off-policy mask", "everything") else None,
        sampling_ratio=ratio,
        entropy_keep_BT=(noise(1.0) > -0.5).double() if keep else None,
    )
    return cfg, batch


def counts_of(mask: torch.Tensor) -> StepCounts:
    return StepCounts(mask.size(0), int(mask.sum()), int(mask.sum()))


def part_of(batch: TokenBatch, rows: list[int]) -> TokenBatch:
    """Some completions as a micro-batch, without the columns that are padding in all of them."""
    width = max(1, max(LENGTHS[row] for row in rows))
    fields = {}
    for spec in dataclasses.fields(batch):
        value = getattr(batch, spec.name)
        if value is None:
            fields[spec.name] = None
        else:
            fields[spec.name] = value[rows] if value.dim() == 1 else value[rows][:, :width]
    return TokenBatch(**fields)


def loss_sum(cfg: LossConfig, batch: TokenBatch, counts: StepCounts) -> torch.Tensor:
    return (token_loss(cfg, batch).loss_BT * token_weights(cfg, batch.mask_BT, counts)).sum()


def value_and_gradient(cfg: LossConfig, batch: TokenBatch, parts: list[list[int]]) -> tuple[float, torch.Tensor]:
    """Loss of the step as a sum over parts, and its gradient with respect to the step's log-probabilities."""
    counts, logps = counts_of(batch.mask_BT), batch.logps_BT
    gradient, total = torch.zeros_like(logps), 0.0
    for rows in parts:
        loss = loss_sum(cfg, part_of(batch, rows), counts)
        gradient += torch.autograd.grad(loss, logps)[0]
        total += loss.item()
    return total, gradient


@st.composite
def partitions(draw):
    rows = draw(st.permutations(range(len(LENGTHS))))
    cuts = sorted(draw(st.sets(st.integers(1, len(LENGTHS) - 1))))
    return [list(rows[a:b]) for a, b in itertools.pairwise([0, *cuts, len(rows)])]


def random_partition(seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(len(LENGTHS), generator=generator).tolist()
    cuts = [i for i in range(1, len(rows)) if torch.rand(1, generator=generator) < 0.4]
    return [rows[a:b] for a, b in itertools.pairwise([0, *cuts, len(rows)])]


# ---- Any partition adds up ------------------------------------------------------------------------------------------


@EVERY_VARIANT
def test_any_partition_adds_up_to_the_step(loss_type, level, option):
    cfg, batch = make(loss_type, level, option)
    value, gradient = value_and_gradient(cfg, batch, [list(range(len(LENGTHS)))])
    assert gradient.abs().max() > 1e-4
    singles = [[row] for row in range(len(LENGTHS))]
    for parts in [singles, *(random_partition(seed) for seed in range(4))]:
        part_value, part_gradient = value_and_gradient(cfg, batch, parts)
        assert abs(part_value - value) <= EXACT, f"parts {parts}: {part_value} against {value}"
        difference = (part_gradient - gradient).abs()
        assert difference.max() <= EXACT, f"parts {parts}: max {difference.max():.2e}, mean {difference.mean():.2e}"


@given(st.sampled_from(VARIANTS), partitions())
def test_a_drawn_partition_adds_up_to_the_step(variant, parts):
    cfg, batch = make(*variant)
    value, gradient = value_and_gradient(cfg, batch, [list(range(len(LENGTHS)))])
    part_value, part_gradient = value_and_gradient(cfg, batch, parts)
    assert abs(part_value - value) <= EXACT
    assert (part_gradient - gradient).abs().max() <= EXACT


@pytest.mark.parametrize("loss_type", ["bnpo", "dapo", "cispo", "vespo"])
def test_dividing_each_part_by_its_own_tokens_does_not_add_up(loss_type):
    cfg, batch = make(loss_type, "token", "plain")
    whole = loss_sum(cfg, batch, counts_of(batch.mask_BT))
    parts = [part_of(batch, rows) for rows in ([0, 1, 2], [3, 4], [5, 6])]
    own = sum(loss_sum(cfg, part, counts_of(part.mask_BT)) for part in parts) / len(parts)
    assert abs(own - whole) > 1e-3


@pytest.mark.parametrize("loss_type", ["grpo", "sapo", "dr_grpo", "luspo"])
def test_averaging_parts_of_unequal_size_does_not_add_up(loss_type):
    cfg, batch = make(loss_type, "token", "plain")
    whole = loss_sum(cfg, batch, counts_of(batch.mask_BT))
    parts = [part_of(batch, rows) for rows in ([0, 1, 2, 3, 4, 5], [6])]
    own = sum(loss_sum(cfg, part, counts_of(part.mask_BT)) for part in parts) / len(parts)
    assert abs(own - whole) > 1e-3


@EVERY_VARIANT
def test_what_is_outside_the_mask_does_not_matter(loss_type, level, option):
    cfg, batch = make(loss_type, level, option)
    outside = 1 - batch.mask_BT
    moved = dataclasses.replace(
        batch,
        logps_BT=batch.logps_BT - 0.8 * outside,
        old_logps_BT=batch.old_logps_BT + 0.9 * outside,
        ref_logps_BT=batch.ref_logps_BT - 0.7 * outside,
        sampling_logps_BT=None if batch.sampling_logps_BT is None else batch.sampling_logps_BT + 0.5 * outside,
        entropy_keep_BT=None if batch.entropy_keep_BT is None else batch.entropy_keep_BT * batch.mask_BT,
    )
    counts = counts_of(batch.mask_BT)
    value, gradient = loss_sum(cfg, batch, counts), torch.autograd.grad(loss_sum(cfg, batch, counts), batch.logps_BT)[0]
    moved_value = loss_sum(cfg, moved, counts)
    moved_gradient = torch.autograd.grad(moved_value, batch.logps_BT)[0]
    assert abs(moved_value - value) <= EXACT
    assert (moved_gradient - gradient).abs().max() <= EXACT
    assert (gradient * outside).abs().max() == 0


# ---- TRL's numbers --------------------------------------------------------------------------------------------------


def trl_lines() -> str:
    """The lines of TRL's `_compute_loss` from the log-probabilities to the loss, before bonus and logs."""
    source = inspect.getsource(GRPOTrainer._compute_loss)
    first = '        advantages = inputs["advantages"]\n'
    last = "        # Entropy bonus: add entropy regularization"
    assert source.count(first) == 1, f"TRL no longer has the line {first.strip()!r}"
    assert source.count(last) == 1, f"TRL no longer has the line {last.strip()!r}"
    return textwrap.dedent(source[source.index(first) : source.index(last)])


TRL_LINES = compile(trl_lines(), grpo_trainer.__file__, "exec")


def trl_loss(cfg: LossConfig, batch: TokenBatch) -> dict:
    """Names after TRL's lines ran on the batch as one micro-batch in evaluation (no accumulation)."""
    inputs = {
        "advantages": batch.advantages_B,
        "old_per_token_logps": batch.old_logps_BT,
        "ref_per_token_logps": batch.ref_logps_BT,
        "sampling_per_token_logps": batch.sampling_logps_BT,
        "importance_sampling_ratio": batch.sampling_ratio,
        "num_items_in_batch": batch.mask_BT.sum(),
    }
    trainer = SimpleNamespace(
        args=SimpleNamespace(**dataclasses.asdict(cfg)),
        model=SimpleNamespace(training=False),
        accelerator=SimpleNamespace(num_processes=1),
        use_vllm=cfg.correct_sampling,
        vllm_importance_sampling_correction=cfg.correct_sampling,
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        **dataclasses.asdict(cfg),
    )
    names = {
        "torch": torch,
        "self": trainer,
        "inputs": {name: value for name, value in inputs.items() if value is not None},
        "per_token_logps": batch.logps_BT,
        "mask": batch.mask_BT,
        "entropy_mask": None if batch.entropy_keep_BT is None else batch.entropy_keep_BT.bool(),
    }
    exec(TRL_LINES, names)
    return names


@EVERY_VARIANT
def test_the_loss_of_a_step_is_trls(loss_type, level, option):
    cfg, batch = make(loss_type, level, option)
    theirs, counts = trl_loss(cfg, batch), counts_of(batch.mask_BT)
    ours = token_loss(cfg, batch)
    torch.testing.assert_close(ours.loss_BT, theirs["per_token_loss"], rtol=EXACT, atol=EXACT)
    assert ours.loss_BT.shape == theirs["per_token_loss"].shape
    # the weights are float32 numbers
    torch.testing.assert_close(loss_sum(cfg, batch, counts), theirs["loss"], rtol=1e-6, atol=1e-7)
    gradients = [
        torch.autograd.grad(loss, batch.logps_BT)[0] for loss in (loss_sum(cfg, batch, counts), theirs["loss"])
    ]
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(ours.ratio, theirs["coef_1"].detach(), rtol=EXACT, atol=EXACT)
    if cfg.beta:
        torch.testing.assert_close(ours.kl_BT, theirs["per_token_kl"].detach(), rtol=EXACT, atol=EXACT)
    if loss_type == "vespo":
        torch.testing.assert_close(ours.vespo_phi_B1, theirs["phi_seq"], rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("level", LEVELS)
def test_on_policy_the_loss_is_trls(loss_type, level):
    cfg, batch = make(loss_type, level, "plain")
    batch.old_logps_BT = None
    ours, theirs = token_loss(cfg, batch).loss_BT, trl_loss(cfg, batch)["per_token_loss"]
    torch.testing.assert_close(ours, theirs, rtol=EXACT, atol=EXACT)
    gradients = [torch.autograd.grad(loss.sum(), batch.logps_BT)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=EXACT, atol=EXACT)
    assert gradients[0].abs().max() > 0  # the ratio is one, but its gradient is the policy's


@pytest.mark.parametrize("option", ["plain", "off-policy mask"])
def test_the_case_reaches_both_sides_of_every_switch(option):
    cfg, batch = make("grpo", "token", option)
    ratio = torch.exp(batch.logps_BT - batch.old_logps_BT)[batch.mask_BT.bool()]
    assert (ratio < 1 - cfg.epsilon_low).any()
    assert (ratio > 1 + cfg.epsilon_high).any()
    assert ((ratio > 1 - cfg.epsilon_low) & (ratio < 1 + cfg.epsilon_high)).any()
    if cfg.off_policy_mask_threshold is not None:
        keep = off_policy_keep(
            batch.advantages_B[:, None],
            batch.logps_BT,
            batch.sampling_logps_BT,
            batch.mask_BT,
            cfg.off_policy_mask_threshold,
        )
        assert set(keep[batch.advantages_B < 0].flatten().tolist()) == {0.0, 1.0}
        assert (keep[batch.advantages_B >= 0] == 1).all()


def test_a_token_the_engine_could_not_score_is_no_evidence_against_its_sequence():
    mask = torch.ones(2, 3, dtype=torch.long)
    logps = torch.zeros(2, 3, dtype=torch.float64)
    sampling = torch.tensor([[math.nan, 0.0, 0.0], [math.nan, 5.0, 5.0]], dtype=torch.float64)
    keep = off_policy_keep(torch.tensor([[-1.0], [-1.0]]), logps, sampling, mask, threshold=0.5)
    assert keep.tolist() == [[1.0], [0.0]]


# ---- Aggregations by hand -------------------------------------------------------------------------------------------

MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
PER_TOKEN = torch.arange(1.0, 17.0, dtype=torch.float64).view(4, 4)
# rows sum to 10, 5+6 = 11, 9, 0 under the mask; 7 tokens, 4 completions, at most 8 tokens each
BY_HAND = {
    "grpo": (10 / 4 + 11 / 2 + 9 / 1 + 0) / 4,
    "sapo": (10 / 4 + 11 / 2 + 9 / 1 + 0) / 4,
    "bnpo": 30 / 7,
    "dapo": 30 / 7,
    "cispo": 30 / 7,
    "vespo": 30 / 7,
    "dr_grpo": 30 / (4 * 8),
    "luspo": 30 / 4,
}


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_each_aggregation_is_its_formula(loss_type):
    cfg = LossConfig(loss_type=loss_type, max_completion_length=8)
    total = (PER_TOKEN * token_weights(cfg, MASK, StepCounts(4, 7, 7))).sum()
    assert total.item() == pytest.approx(BY_HAND[loss_type], rel=1e-6)


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("token_mean", "dapo"),
        ("sequence_mean", "grpo"),
        ("sequence_sum", "luspo"),
        ("sequence_sum_norm", "dr_grpo"),
    ],
)
def test_an_aggregation_is_that_of_its_loss_type_with_any_other(name, same):
    for loss_type in LOSS_TYPES:
        cfg = LossConfig(loss_type=loss_type, max_completion_length=8, aggregation=name)
        total = (PER_TOKEN * token_weights(cfg, MASK, StepCounts(4, 7, 7))).sum()
        assert total.item() == pytest.approx(BY_HAND[same], rel=1e-6)


def test_the_prompt_mean_by_hand():
    # rows 0 and 1 are a group with 6 tokens that sum to 21, rows 2 and 3 one with 1 token, 9
    cfg, counts = LossConfig(aggregation="prompt_mean"), StepCounts(4, 7, 7, {0: 6, 1: 1})
    by_hand = (21 / 6 + 9 / 1) / 2
    assert (PER_TOKEN * token_weights(cfg, MASK, counts, [0, 0, 1, 1])).sum().item() == pytest.approx(by_hand)
    # any partition adds up to it, whatever order the rows come in
    parts = [([2, 0], [1, 0]), ([3], [1]), ([1], [0])]
    total = sum((PER_TOKEN[rows] * token_weights(cfg, MASK[rows], counts, groups)).sum() for rows, groups in parts)
    assert total.item() == pytest.approx(by_hand, rel=1e-6)


def test_the_prompt_mean_needs_groups_and_unknown_aggregations_are_refused():
    with pytest.raises(ConfigError, match="needs to know the groups"):
        token_weights(LossConfig(aggregation="prompt_mean"), MASK, StepCounts(4, 7, 7))
    with pytest.raises(ConfigError, match=r"loss_aggregation='mean' is unknown; use one of token_mean, .*"):
        LossConfig(aggregation="mean")


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_denominators_are_arguments(loss_type):
    # the same micro-batch in a step that is twice as large weighs half
    cfg = LossConfig(loss_type=loss_type, max_completion_length=8)
    alone = token_weights(cfg, MASK, StepCounts(4, 7, 7))
    torch.testing.assert_close(token_weights(cfg, MASK, StepCounts(8, 14, 14)), alone / 2)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_step_without_tokens_has_loss_zero(loss_type):
    cfg = LossConfig(loss_type=loss_type, max_completion_length=8)
    weights = token_weights(cfg, torch.zeros(2, 3, dtype=torch.long), StepCounts(0, 0, 0))
    assert (weights == 0).all()


def test_a_sequence_ratio_is_the_mean_over_the_masked_tokens():
    log_ratio = torch.tensor([[1.0, 2.0, 9.0], [4.0, 9.0, 9.0], [9.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    assert importance_log_ratio(log_ratio, mask, "sequence").tolist() == [[1.5], [4.0], [0.0]]
    assert importance_log_ratio(log_ratio, mask, "token") is log_ratio


def test_the_vespo_weight_is_one_on_policy_and_carries_no_gradient():
    cfg, batch = make("vespo", "token", "plain")
    phi = vespo_weight(cfg, batch, torch.zeros_like(batch.logps_BT))
    torch.testing.assert_close(phi, torch.ones_like(phi))
    assert not vespo_weight(cfg, batch, batch.logps_BT - batch.old_logps_BT).requires_grad


# ---- Gradients ------------------------------------------------------------------------------------------------------


def small_logps(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (-1 + 0.2 * torch.randn(3, 4, generator=generator, dtype=torch.float64)).requires_grad_()


SMOOTH = {
    "sapo": LossConfig(loss_type="sapo"),
    "sapo, KL with bias correction": LossConfig(loss_type="sapo", beta=0.2, use_bias_correction_kl=True),
    "sapo, plain KL": LossConfig(loss_type="sapo", beta=0.2, use_bias_correction_kl=False),
    "sapo per sequence": LossConfig(loss_type="sapo", importance_sampling_level="sequence", beta=0.2),
    "grpo between the clips": LossConfig(loss_type="grpo", epsilon_low=0.9, epsilon_high=9.0),
    "grpo per sequence between the clips": LossConfig(
        loss_type="grpo", importance_sampling_level="sequence", epsilon_low=0.9, epsilon_high=9.0, delta=20.0
    ),
    "grpo beyond the clips": LossConfig(loss_type="grpo", epsilon_low=0.001, epsilon_high=0.001),
}


@pytest.mark.parametrize("name", SMOOTH)
def test_gradients_of_the_smooth_losses_are_right(name):
    cfg, logps = SMOOTH[name], small_logps()
    old, reference = small_logps(1).detach(), small_logps(2).detach()
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]])
    advantages = torch.tensor([1.0, -0.5, 0.3], dtype=torch.float64)
    weights = token_weights(cfg, mask, StepCounts(3, 9, 9)).double()

    def loss(x: torch.Tensor) -> torch.Tensor:
        batch = TokenBatch(x, mask, advantages, old_logps_BT=old, ref_logps_BT=reference)
        return (token_loss(cfg, batch).loss_BT * weights).sum()

    assert torch.autograd.gradcheck(loss, logps)


def test_the_gradient_of_the_kl_estimate_is_right_and_it_is_never_negative():
    logps, reference = small_logps(), small_logps(1).detach()
    assert torch.autograd.gradcheck(lambda x: kl_estimate(reference, x), logps)
    assert (kl_estimate(reference, logps) >= 0).all()
    assert (kl_estimate(logps, logps) == 0).all()


def test_cispo_and_vespo_push_log_probabilities_by_a_constant_weight():
    for loss_type in ("cispo", "vespo"):
        cfg, batch = make(loss_type, "token", "plain")
        losses = token_loss(cfg, batch)
        gradient = torch.autograd.grad(losses.loss_BT.sum(), batch.logps_BT)[0]
        weight = losses.vespo_phi_B1 if loss_type == "vespo" else losses.ratio.clamp(max=cfg.epsilon_high)
        torch.testing.assert_close(gradient, (-weight * batch.advantages_B[:, None]).expand_as(gradient))


def test_a_clipped_token_has_no_gradient():
    cfg, batch = make("grpo", "token", "plain")
    losses = token_loss(cfg, batch)
    gradient = torch.autograd.grad(losses.loss_BT.sum(), batch.logps_BT)[0]
    clipped = clip_indicators(cfg, losses.ratio, batch.advantages_B)["clip_ratio/region"].bool()
    assert clipped.any()
    assert (gradient[clipped] == 0).all()
    moved = ~clipped & (batch.advantages_B[:, None] != 0)
    assert (gradient[moved] != 0).all()


# ---- Clip indicators ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("level", LEVELS)
def test_clip_indicators_are_their_definition(loss_type, level):
    cfg, batch = make(loss_type, level, "plain")
    ratio = token_loss(cfg, batch).ratio
    found = clip_indicators(cfg, ratio, batch.advantages_B)
    expected: dict[str, list[list[float]]] = {}
    for values, advantage in zip(ratio.tolist(), batch.advantages_B.tolist()):
        low = [float(r < 1 - cfg.epsilon_low and advantage < 0) for r in values]
        high = [float(r > 1 + cfg.epsilon_high and advantage > 0) for r in values]
        if loss_type in PPO_CLIPPED:
            expected.setdefault("clip_ratio/low", []).append(low)
            expected.setdefault("clip_ratio/high", []).append(high)
            expected.setdefault("clip_ratio/region", []).append([max(pair) for pair in zip(low, high)])
        elif loss_type == "cispo":
            cispo = [float(r > cfg.epsilon_high and advantage > 0) for r in values]
            expected.setdefault("cispo_clip_ratio", []).append(cispo)
    assert {name: value.tolist() for name, value in found.items()} == expected
    if loss_type in PPO_CLIPPED and level == "token":
        assert all(value.sum() > 0 for value in found.values())


# ---- Entropy quantile -----------------------------------------------------------------------------------------------

ENTROPIES = st.lists(st.sampled_from([0.0, 0.1, 0.5, 0.5, 1.0, 1.0, 2.5, 3.0]), min_size=1, max_size=40)


@given(ENTROPIES, st.floats(0.0, 1.0))
def test_the_entropy_threshold_is_torchs_quantile_less_the_tolerance(entropies, top):
    values = torch.tensor(entropies, dtype=torch.float64)
    threshold = entropy_threshold(values.float(), top, tolerance=0.01)
    expected = torch.quantile(values.float().double(), 1.0 - top) - 0.01
    assert threshold == pytest.approx(expected.item(), abs=1e-12)


@pytest.mark.parametrize("noise", [0.0, 1e-7, 1e-6])
def test_tokens_with_one_entropy_in_exact_arithmetic_are_kept_or_left_together(noise):
    exact = torch.tensor([2.0] * 3 + [1.0] * 4 + [0.5] * 3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        seen = exact + noise * (2 * torch.rand(10, generator=generator) - 1)
        # the 70th and the 50th of 100 parts: inside a run of ties, and at one
        assert (seen >= entropy_threshold(seen, 0.5)).tolist() == (exact >= 1.0).tolist()
        assert (seen >= entropy_threshold(seen, 0.2)).tolist() == (exact >= 2.0).tolist()


def test_without_the_tolerance_rounding_would_choose_between_ties():
    seen = torch.tensor([1.0, 1.0 + 2e-7, 1.0 - 2e-7, 1.0 + 1e-7])
    assert (seen >= entropy_threshold(seen, 0.3, tolerance=0.0)).sum() < 4
    assert (seen >= entropy_threshold(seen, 0.3)).sum() == 4


def test_no_tokens_have_an_infinite_threshold():
    assert entropy_threshold(torch.zeros(0), 0.2) == math.inf


@pytest.mark.full
def test_the_threshold_takes_more_tokens_than_torchs_quantile():
    entropies = torch.zeros(2**24 + 1, dtype=torch.float16)
    entropies[-1] = 1.0
    with pytest.raises(RuntimeError, match="too large"):
        torch.quantile(entropies.float(), 0.5)
    assert entropy_threshold(entropies, 0.5, tolerance=0.0) == 0.0
    assert entropy_threshold(entropies, 0.0, tolerance=0.0) == 1.0


@pytest.mark.parametrize(
    ("coefficient", "entropy", "expected"),
    [
        (0.10, 0.50, 0.11),  # below the target: up
        (0.10, 1.00, 0.11),  # at the target: up
        (0.10, 1.01, 0.09),  # above: down
        (0.195, 0.5, 0.2),  # not above the highest
        (0.2, 0.5, 0.2),
        (0.005, 2.0, 0.0),  # not below the lowest
        (0.0, 2.0, 0.0),
    ],
)
def test_the_entropy_coefficient_moves_towards_the_target_within_bounds(coefficient, entropy, expected):
    bounds = (1.0, 0.01, 0.0, 0.2)  # target, change in a step, lowest, highest
    assert adapted_entropy_coefficient(coefficient, entropy, *bounds) == pytest.approx(expected, abs=1e-15)


# ---- Load balancing -------------------------------------------------------------------------------------------------

EXPERTS, TOP_K, LAYERS = 4, 2, 3


def router_case(seed: int = 0) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 0], [0, 0, 1, 1, 0], [1, 1, 1, 1, 1], [0, 1, 0, 1, 0]])
    logits = [torch.randn(mask.numel(), EXPERTS, generator=generator).requires_grad_() for _ in range(LAYERS)]
    return tuple(logits), mask


def balanced(logits, mask, parts) -> torch.Tensor:
    """The load-balancing loss of the step as a sum over parts, as the trainer computes it."""
    pieces = []
    for rows in parts:
        layers = tuple(layer.view(*mask.shape, EXPERTS)[rows].flatten(0, 1) for layer in logits)
        pieces.append(router_statistics(layers, mask[rows], TOP_K))
    rows = sum(piece[2] for piece in pieces)
    share = sum(piece[0] for piece in pieces) / rows
    return sum(load_balancing_loss(probs, share.to(probs), EXPERTS, rows) for _, probs, _ in pieces)


@pytest.mark.parametrize(
    "parts", [[[0, 1, 2, 3, 4]], [[0, 1], [2, 3, 4]], [[4], [2], [0, 3], [1]], [[0], [1], [2], [3], [4]]]
)
@pytest.mark.parametrize("seed", range(3))
def test_the_load_balancing_loss_of_any_partition_is_transformers(parts, seed):
    logits, mask = router_case(seed)
    ours, theirs = balanced(logits, mask, parts), load_balancing_loss_func(logits, EXPERTS, TOP_K, mask)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    for mine, reference in zip(torch.autograd.grad(ours, logits), torch.autograd.grad(theirs, logits)):
        torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-7)
        assert reference.abs().max() > 1e-4


def test_the_mean_of_the_parts_own_load_balancing_losses_is_another_number():
    logits, mask = router_case()
    whole = load_balancing_loss_func(logits, EXPERTS, TOP_K, mask)
    means = []
    for rows in ([0, 1], [2, 3, 4]):
        layers = tuple(layer.view(*mask.shape, EXPERTS)[rows].flatten(0, 1) for layer in logits)
        means.append(load_balancing_loss_func(layers, EXPERTS, TOP_K, mask[rows]))
    assert abs(sum(means) / 2 - whole) > 1e-4


def test_padding_does_not_count_in_the_router_statistics():
    logits, mask = router_case()
    chosen, probs, rows = router_statistics(logits, mask, TOP_K)
    assert rows == int(mask.sum()) * LAYERS
    assert chosen.sum().item() == rows * TOP_K
    assert probs.sum().item() == pytest.approx(rows, rel=1e-6)
    moved = tuple(layer + 5 * (1 - mask).view(-1, 1) * torch.arange(EXPERTS) for layer in logits)
    moved_chosen, moved_probs, _ = router_statistics(moved, mask, TOP_K)
    assert torch.equal(moved_chosen, chosen)
    torch.testing.assert_close(moved_probs, probs)


def test_the_gradient_of_the_load_balancing_loss_is_right():
    share = torch.tensor([0.5, 0.25, 0.75, 0.5], dtype=torch.float64)
    probs = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: load_balancing_loss(x, share, EXPERTS, 10), probs)
    assert load_balancing_loss(probs, share, EXPERTS, 10).item() == pytest.approx(4 * (0.5 + 0.5 + 2.25 + 2.0) / 10)


def test_a_model_without_router_logits_is_an_error():
    with pytest.raises(ValueError, match="no router logits"):
        router_statistics((), torch.ones(1, 3), 2)


# ---- Refusals -------------------------------------------------------------------------------------------------------


def test_an_unknown_loss_type_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"loss_type='ppo' is unknown; use one of grpo, bnpo, .*vespo"):
        LossConfig(loss_type="ppo")


def test_an_unknown_level_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"importance_sampling_level='word' is unknown; use 'token' or 'sequence'"):
        LossConfig(importance_sampling_level="word")
