"""Which form a model's forward takes (pack, padded batch, TRL's own), decided once for each model and said once.

Differs from TRL, which always pads. Called by the trainer for the policy and the reference model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from accelerate.logging import get_logger

from .checks import accepts_positions
from .lm_head import RouterRequest
from .packed_forward import check_packing, score_packed, score_padded, why_not_packed
from .scoring import with_positions, with_router

logger = get_logger(__name__)


def is_prompt_learning(model: Any) -> bool:
    """Whether a PEFT adapter puts virtual tokens before the input (prompt tuning, p-tuning, prefix tuning)."""
    config = getattr(model, "active_peft_config", None)
    return bool(getattr(config, "is_prompt_learning", False))


class Forms:
    """Chooses how a model's completions are scored.

    The cost rule between the forms: a pack computes `prompt + sum of completions` tokens, a padded batch
    `rows * (longest prompt + longest completion)`: never less. So a model that can run packs always does; inside a
    pack, `engine.attention.split_is_cheaper` decides for each group how its attention is computed.
    """

    def __init__(self, packed: bool, score_completions_only: bool, multiple: int | None = None) -> None:
        self.packed, self.score_completions_only, self.multiple = packed, score_completions_only, multiple or 1
        self._reasons: dict[int, str | None] = {}
        self._checked: set[int] = set()

    def packs(self, policy: Any, wrapped: Any = None) -> bool:
        """Whether `policy` runs packs; says once why not, where that was asked for."""
        if not self.packed:
            return False
        if id(policy) not in self._reasons:
            reason = "prompt-learning adapters add tokens" if is_prompt_learning(wrapped) else why_not_packed(policy)
            self._reasons[id(policy)] = reason
            if reason is not None:
                logger.warning(f"packed_forward is off, padded batches run instead: {reason}.")
        return self._reasons[id(policy)] is None

    def scorer(
        self, policy: Any, wrapped: Any, stock: Callable[..., Any], recomputed_outside: bool = False
    ) -> Callable[..., Any]:
        """A function with the signature of TRL's `_get_per_token_logps_and_entropies`.

        Args:
            policy: the causal language model.
            wrapped: it, as PEFT wraps it.
            stock: TRL's own method, for what the other forms cannot do.
            recomputed_outside: gradient checkpointing will run the layers again where packs are off.
        """
        if self.packs(policy, wrapped) and not recomputed_outside:
            return partial(_as_trl, partial(score_packed, multiple=self.multiple), policy)
        if is_prompt_learning(wrapped):
            return partial(_without_left_padding, stock)
        if self.score_completions_only:
            return partial(_as_trl, score_padded, policy)
        return partial(_through_trl, stock, accepts_positions(policy))

    def check(self, model: Any, policy: Any, wrapped: Any, batch: Callable[[], tuple[Any, Any, int]]) -> None:
        """Before the first pack of a model, compare both forms on a real group.

        Args:
            batch: makes ids, attention mask and completion width of one group.

        Raises:
            ModelError: they differ by more than rounding.
        """
        if id(policy) in self._checked or not self.packs(policy, wrapped):
            return
        check_packing(model, policy, *batch())
        self._checked.add(id(policy))


def _as_trl(
    score: Callable[..., Any],
    policy: Any,
    model: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    logits_to_keep: int,
    compute_entropy: bool = False,
    compute_aux_loss: bool | RouterRequest = False,
    **nothing: Any,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    batch = (input_ids, attention_mask, logits_to_keep)
    asked = {"with_router": bool(compute_aux_loss), "with_entropy": compute_entropy}
    logps, entropies, router = score(model, policy, *batch, **asked)
    if isinstance(compute_aux_loss, RouterRequest):
        compute_aux_loss.output, router = router, None
    top_k = getattr(policy.config.get_text_config(), "num_experts_per_tok", 1)
    return logps, entropies, None if router is None else router.aux_loss(top_k)


def _through_trl(
    stock: Callable[..., Any],
    positions: bool,
    model: Any,
    *args: Any,
    compute_aux_loss: bool | RouterRequest = False,
    **kwargs: Any,
) -> Any:
    if isinstance(compute_aux_loss, RouterRequest):
        model = with_router(model, compute_aux_loss)
    return stock(
        with_positions(model) if positions else model, *args, compute_aux_loss=bool(compute_aux_loss), **kwargs
    )


def _without_left_padding(
    stock: Callable[..., Any],
    model: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    logits_to_keep: int,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """TRL's method over rows that begin at their first token, so that all padding is on the right.

    PEFT puts virtual tokens first and takes no `position_ids`: padding behind them would move the prompt.
    """
    columns = input_ids.size(1)
    start_B1 = attention_mask.long().argmax(1, keepdim=True)
    turned_BL = (torch.arange(columns, device=input_ids.device) + start_B1) % columns
    ids, mask = input_ids.gather(1, turned_BL), attention_mask.gather(1, turned_BL)
    logps, entropies, *rest = stock(model, ids, mask, columns - 1, *args, **kwargs)
    # token t of a row's scores is its column t + 1
    kept_BT = torch.arange(columns - 1 - logits_to_keep, columns - 1, device=input_ids.device) - start_B1
    return logps.gather(1, kept_BT), None if entropies is None else entropies.gather(1, kept_BT), *rest
