"""The terms of a micro-batch's loss: what is refused where a term lacks its input."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_ext.errors import ModelError
from grpo_ext.step.loss import _router_loss


def test_a_model_without_router_logits_is_told_what_to_set():
    part: Any = None
    with pytest.raises(ModelError, match=r"router_aux_loss_coef=0\.1 .* set router_aux_loss_coef=0"):
        _router_loss(0.1, None, part)
