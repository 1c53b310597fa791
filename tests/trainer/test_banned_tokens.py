"""A token whose logit is -inf, as a bias of the head bans it, is one of probability 0; entropies of NaN end a run."""

from typing import Any

import pytest
import torch

from grpo_ext import GRPOTrainer
from grpo_ext.errors import PrecisionError
from tests.support.tiny import tiny_model
from tests.support.trainers import log_of, make, ran


def trained(folder: Any, banned: float) -> tuple[list[torch.Tensor], list[float]]:
    """The weights of a model whose head's bias bans two tokens, after a step, and the entropy that it logs."""
    model = tiny_model()
    bias = torch.zeros(model.config.vocab_size).index_fill(0, torch.tensor([4, 9]), banned)
    model.lm_head.bias = torch.nn.Parameter(bias)
    trainer = ran(make(folder, model, top_entropy_quantile=0.4))
    assert trainer._forwards.choice.form(model) == "packed"
    return [p.detach() for name, p in model.named_parameters() if name != "lm_head.bias"], log_of(trainer, "entropy")


def test_a_banned_token_is_trained_as_one_of_probability_zero(tmp_path):
    expected, entropies = trained(tmp_path / "a", -1e4)
    weights, ours = trained(tmp_path / "b", -torch.inf)
    assert all(map(torch.equal, weights, expected))
    assert ours == entropies
    allowed, _ = trained(tmp_path / "c", 0.0)
    assert not all(map(torch.equal, allowed, expected))


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
