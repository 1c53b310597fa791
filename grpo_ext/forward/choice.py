"""Which form a model's forward takes (pack, padded batch, TRL's own), decided once for each model and said once.

Differs from TRL, which always pads. Called by the trainer for the policy and the reference model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from accelerate.logging import get_logger

from ..errors import MemoryShortageError, ModelError
from ..runtime.collectives import any_process, gather_lists
from ..runtime.out_of_memory import Halving
from .adapters import is_prompt_learning, needs_whole_rows
from .architecture import experts_per_token
from .chunks import with_positions, with_router
from .lm_head import RouterRequest
from .pack_check import Evidence, Trial, telling_rows, try_pack
from .packed import score_packed, score_padded, why_not_packed
from .positions import accepts_positions

logger = get_logger(__name__)


class ForwardChoice:
    """Chooses how a model's completions are scored.

    The cost rule between the forms: a pack computes `prompt + sum of completions` tokens, a padded batch
    `rows * (longest prompt + longest completion)`: never less. So a model that can run packs always does; inside a
    pack, `engine.attention.split_is_cheaper` decides for each group how its attention is computed.
    """

    def __init__(
        self,
        packed: bool,
        score_completions_only: bool,
        device: torch.device,
        may_cut: bool = True,
        multiple: int | None = None,
    ) -> None:
        self.packed, self.score_completions_only, self.multiple = packed, score_completions_only, multiple or 1
        self.device = device
        self._memory = Halving("comparing packed with padded", "set packed_forward=False", may_cut)
        self._reasons: dict[int, str | None] = {}
        self._evidence: dict[int, Evidence] = {}

    def packs(self, policy: Any, wrapped: Any = None) -> bool:
        """Whether `policy` runs packs; says once why not, where that was asked for."""
        if not self.packed:
            return False
        if id(policy) not in self._reasons:
            self._conclude(policy, needs_whole_rows(wrapped) or why_not_packed(policy))
        return self._reasons[id(policy)] is None

    def _conclude(self, policy: Any, reason: str | None) -> None:
        if reason is not None and reason not in self._reasons.values():  # policy and reference are often of one kind
            logger.warning(f"packed_forward is off, padded batches run instead: {reason}.")
        self._reasons[id(policy)] = reason

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

    def settled(self, policy: Any) -> bool:
        """Whether `check` has nothing left to look at."""
        known = id(policy) in self._evidence and self._evidence[id(policy)].settled
        return known or self._reasons.get(id(policy)) is not None or not self.packed

    def check(
        self,
        model: Any,
        policy: Any,
        wrapped: Any,
        lengths: tuple[Sequence[int], Sequence[int], Sequence[bool]],
        batch: Callable[[slice], tuple[Any, Any, int]],
        everywhere: bool,
    ) -> None:
        """Before the first pack of a model, run both forms on real completions; every process reaches this together.

        What one process finds holds for all. Where the completions at hand cannot tell (one token each; none longer
        than the sliding window), the next ones are looked at too.

        Args:
            lengths: of the completions at hand, as from `read_batch`.
            batch: makes ids, attention mask and completion width of some of them.
            everywhere: whether all processes have the same completions at hand.

        Raises:
            ModelError: on every process, where the two differ by more than rounding on one of them.
        """
        evidence = self._evidence.setdefault(id(policy), Evidence())
        if evidence.settled or not self.packs(policy, wrapped):
            return
        rows = telling_rows(*lengths, evidence.longer_than)
        if not (rows is not None if everywhere else any_process(rows is not None, self.device)):
            return
        part = slice(0, 1) if rows is None else rows  # a forward may be a collective, so all processes run it
        ids, mask, width = batch(part)

        def work(piece: Sequence[int]) -> Trial:
            some = slice(piece[0], piece[-1] + 1)
            trial = try_pack(model, policy, ids[some], mask[some], width)
            return trial if rows is not None and len(piece) > 1 else trial.untold

        failure: MemoryShortageError | None = None
        try:
            own = self._memory.run(range(ids.size(0)), work)
        except MemoryShortageError as error:  # told to the others first
            own, failure = [Trial(difference=str(error))], error
        trials = gather_lists(own)
        difference = next((trial.difference for trial in trials if trial.difference), None)
        if difference is not None:
            raise failure or ModelError(f"{difference}. Set packed_forward=False.")
        reason = next((trial.refused for trial in trials if trial.refused), None)
        if reason is not None:
            self._conclude(policy, reason)
        evidence.add(own if everywhere else trials)


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
    return logps, entropies, None if router is None else router.aux_loss(experts_per_token(policy))


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
    compute_aux_loss: bool | RouterRequest = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """TRL's method over rows that begin at their first token, so that all padding is on the right.

    PEFT puts virtual tokens first and takes no `position_ids`: padding behind them would move the prompt.
    """
    if isinstance(compute_aux_loss, RouterRequest):
        model = with_router(model, compute_aux_loss)
    kwargs["compute_aux_loss"] = bool(compute_aux_loss)
    columns = input_ids.size(1)
    start_B1 = attention_mask.long().argmax(1, keepdim=True)
    turned_BL = (torch.arange(columns, device=input_ids.device) + start_B1) % columns
    ids, mask = input_ids.gather(1, turned_BL), attention_mask.gather(1, turned_BL)
    logps, entropies, *rest = stock(model, ids, mask, columns - 1, *args, **kwargs)
    # token t of a row's scores is its column t + 1
    kept_BT = torch.arange(columns - 1 - logits_to_keep, columns - 1, device=input_ids.device) - start_B1
    return logps.gather(1, kept_BT), None if entropies is None else entropies.gather(1, kept_BT), *rest
