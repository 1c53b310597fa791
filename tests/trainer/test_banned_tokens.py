"""Entropies that are NaN end a run: those of banned tokens are numbers (tests/unit/forward/test_tiled_log_probs)."""

from typing import Any

import pytest
import torch

from grpo_ext import GRPOTrainer
from grpo_ext.errors import PrecisionError
from tests.support.trainers import make


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
