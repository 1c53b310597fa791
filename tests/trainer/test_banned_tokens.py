"""A token whose logit is -inf, as a bias of the head bans it: it adds nothing to entropies; NaN ends a run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from grpo_ext import GRPOTrainer
from grpo_ext.errors import PrecisionError
from tests.support.tiny import tiny_model
from tests.support.trainers import error, log_of, make
from tests.tolerances import DIFFERENT

TERMS = [{"top_entropy_quantile": 0.4}, {"entropy_coef": 0.1}]


def trained(folder: Any, banned: float, **settings: Any) -> tuple[torch.Tensor, list[float]]:
    """What a model learns whose head's bias bans two tokens, and the entropies that it logs."""
    model = tiny_model()
    bias = torch.zeros(model.config.vocab_size).index_fill(0, torch.tensor([4, 9]), banned)
    model.lm_head.bias = torch.nn.Parameter(bias)
    start = [p.detach().double().clone() for name, p in model.named_parameters() if name != "lm_head.bias"]
    trainer = make(folder, model, max_steps=2, **settings)
    trainer.train()
    end = [p.detach().double() for name, p in model.named_parameters() if name != "lm_head.bias"]
    return torch.cat([(a - b).flatten() for a, b in zip(end, start)]), log_of(trainer, "entropy")


@pytest.mark.parametrize("settings", TERMS, ids=str)
def test_a_banned_token_is_trained_as_one_of_probability_zero(tmp_path, settings):
    expected, entropies = trained(tmp_path / "a", -1e4, **settings)
    change, ours = trained(tmp_path / "b", -torch.inf, **settings)
    assert torch.equal(change, expected)
    assert ours == entropies
    allowed, _ = trained(tmp_path / "c", 0.0, **settings)
    assert error(expected, allowed) > DIFFERENT


class SomeNaN(GRPOTrainer):
    """A user's scores, in which the entropy of one token of each completion is unknown."""

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        logps, entropies, aux_loss = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if entropies is not None:
            entropies = entropies.clone()
            entropies[:, 0] = torch.nan
        return logps, entropies, aux_loss


@pytest.mark.parametrize("quantile", [0.1, 0.9])
def test_entropies_that_cannot_be_compared_end_the_run(tmp_path, quantile):
    with pytest.raises(PrecisionError, match=r"top_entropy_quantile=0\.\d .* 16 of \d+ are NaN"):
        make(tmp_path, cls=SomeNaN, top_entropy_quantile=quantile).train()
