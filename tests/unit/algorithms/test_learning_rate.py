"""What another global batch means for the learning rate."""

from __future__ import annotations

import pytest

from grpo_ext.algorithms.learning_rate import global_batch_advice, scaled_learning_rates


def test_the_two_rules():
    assert scaled_learning_rates(1e-6, 64, 256) == pytest.approx((4e-6, 2e-6))
    assert scaled_learning_rates(1e-6, 256, 64) == pytest.approx((2.5e-7, 5e-7))
    assert scaled_learning_rates(3e-6, 8, 8) == (3e-6, 3e-6)


def test_the_advice_names_both_batches_and_both_rates():
    text = global_batch_advice(1e-6, 64, 256)
    for part in (
        "64 -> 256",
        "4 times the completions",
        "0.25 times the steps",
        "learning_rate=1e-06",
        "2e-06 (sq",
        "4e-06 (lin",
    ):
        assert part in text, part
