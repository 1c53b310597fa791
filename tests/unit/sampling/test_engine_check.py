"""The check of an engine: the same weights pass whatever is filtered, other weights end the run."""

import math
from typing import Any

import pytest
import torch

from grpo_ext.errors import RolloutError
from grpo_ext.sampling.engine_check import EngineCheck, rounding_bound, surplus_of
from tests.support.server import generation_settings

TOKENS, VOCABULARY = 400, 64


@pytest.mark.parametrize(
    ("changes", "mode", "surplus"),
    [
        ({}, "processed_logprobs", 0.0),
        ({"top_p": 0.5}, "processed_logprobs", math.log(2)),
        ({"min_p": 0.1, "top_p": 0.5}, "processed_logprobs", math.log(4)),
        ({"repetition_penalty": 1.1}, "processed_logprobs", None),
        ({"generation_kwargs": {"logit_bias": {1: 2.0}}}, "processed_logprobs", None),
        ({"top_k": 5, "repetition_penalty": 1.1}, "raw_logprobs", 0.0),
        ({"temperature": 0.5}, "raw_logprobs", None),
        ({}, "raw_logits", None),
    ],
)
def test_filters_and_modes_bound_the_surplus(changes, mode, surplus):
    assert surplus_of(generation_settings(**changes), mode) == (None if surplus is None else pytest.approx(surplus))


Columns = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def sampled(other: float = 0.0, top_p: float = 1.0, top_k: int = VOCABULARY, noise: float = 0.0) -> Columns:
    """Masks, and log-probabilities of trainer and engine; the engine's logits differ by `other`, and it keeps some."""
    generator = torch.Generator().manual_seed(1)
    logits = 2 * torch.randn(TOKENS, VOCABULARY, generator=generator)
    theirs = logits + other * torch.randn(TOKENS, VOCABULARY, generator=generator)
    sorted_p, order = theirs.softmax(-1).sort(-1, descending=True)
    keep = (sorted_p.cumsum(-1) - sorted_p < top_p) & (torch.arange(VOCABULARY) < top_k)
    filtered = theirs.masked_fill(~torch.zeros_like(keep).scatter(1, order, keep), -math.inf)
    ids = torch.multinomial(filtered.softmax(-1), 1, generator=generator)
    engine = filtered.log_softmax(-1).gather(1, ids)[:, 0] + noise * torch.randn(TOKENS, generator=generator)
    own = logits.log_softmax(-1).gather(1, ids)[:, 0]
    mask = torch.ones(TOKENS, dtype=torch.long)
    mask[::7], engine[::7] = 0, -50.0  # tokens of a tool
    engine[1::7] = math.nan
    return mask, own, engine


def check(columns: Columns, **changes: Any) -> None:
    surplus = surplus_of(generation_settings(**changes), "processed_logprobs")
    EngineCheck(lambda: surplus, rounding_bound(30)).compare(*columns)


# the less of the mass is left, the less is known of it
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_p": 0.5}, {"top_k": 48}], ids=str)
def test_the_same_weights_pass_and_others_do_not(filters):
    check(sampled(noise=0.1, **filters), **filters)
    with pytest.raises(RolloutError, match=r"of the \d+ tokens it sampled differ .* vllm_check=False"):
        check(sampled(other=3.0, **filters), **filters)


def test_a_filter_that_the_settings_do_not_name_is_a_difference():
    with pytest.raises(RolloutError):
        check(sampled(top_p=0.5))
    check(sampled(other=3.0), repetition_penalty=1.1)  # cannot be compared
