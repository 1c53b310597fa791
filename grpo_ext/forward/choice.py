"""Which forward scores a model's completions (packed, padded, TRL's own), decided once for each model and said once.

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
from .lm_head import Scores
from .pack_check import Evidence, Trial, telling_rows, try_pack
from .packed import score_packed, why_not_packed
from .padded import score_padded, score_through_trl
from .rows import TokenRows

logger = get_logger(__name__)


class ForwardChoice:
    """Chooses how a model's completions are scored.

    The cost rule: a pack computes `prompt + sum of completions` tokens, a padded batch
    `rows * (longest prompt + longest completion)`: never less. So a model that can run packs always does; inside a
    pack, `forward.attention.split_is_cheaper` decides for each group how its attention is computed.
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

    def forward(
        self, policy: Any, wrapped: Any, trl_scorer: Callable[..., Any], recomputed_outside: bool = False
    ) -> Callable[..., Scores]:
        """The function that scores rows: `(model, policy, rows, with_router, with_entropy)`.

        Args:
            policy: the causal language model.
            wrapped: it, as PEFT wraps it.
            trl_scorer: TRL's own method, for what the other forwards cannot do.
            recomputed_outside: gradient checkpointing will run the layers again where packs are off.
        """
        if self.packs(policy, wrapped) and not recomputed_outside:
            return partial(score_packed, multiple=self.multiple)
        if is_prompt_learning(wrapped):
            return partial(score_through_trl, trl_scorer, multiple=self.multiple, virtual_tokens=True)
        if self.score_completions_only:
            return partial(score_padded, multiple=self.multiple)
        return partial(score_through_trl, trl_scorer, multiple=self.multiple)

    def settled(self, policy: Any) -> bool:
        """Whether `check` has nothing left to look at."""
        known = id(policy) in self._evidence and self._evidence[id(policy)].settled
        return known or self._reasons.get(id(policy)) is not None or not self.packed

    def check(
        self,
        model: Any,
        policy: Any,
        wrapped: Any,
        rows: TokenRows,
        everywhere: bool,
    ) -> None:
        """Before the first pack of a model, run both forwards on real completions; every process reaches this together.

        What one process finds holds for all. Where the completions at hand cannot tell (one token each; none longer
        than the sliding window), the next ones are looked at too.

        Args:
            rows: the completions at hand.
            everywhere: whether all processes have the same completions at hand.

        Raises:
            ModelError: on every process, where the two differ by more than rounding on one of them.
        """
        evidence = self._evidence.setdefault(id(policy), Evidence())
        if evidence.settled or not self.packs(policy, wrapped):
            return
        telling = telling_rows(rows.prompts_B, rows.completions_B, rows.same_prompt, evidence.longer_than)
        if not (telling is not None if everywhere else any_process(telling is not None, self.device)):
            return
        # a forward may be a collective, so all processes run it
        some = rows.part(slice(0, 1) if telling is None else telling)

        def work(piece: Sequence[int]) -> Trial:
            trial = try_pack(model, policy, some.part(slice(piece[0], piece[-1] + 1)))
            return trial if telling is not None and len(piece) > 1 else trial.untold

        failure: MemoryShortageError | None = None
        try:
            own = self._memory.run(range(len(some)), work)
        except MemoryShortageError as error:  # raised below, once the other processes know of it
            own, failure = [Trial(difference=str(error))], error
        trials = gather_lists(own)
        difference = next((trial.difference for trial in trials if trial.difference), None)
        if difference is not None:
            raise failure or ModelError(f"{difference}. Set packed_forward=False.")
        reason = next((trial.refused for trial in trials if trial.refused), None)
        if reason is not None:
            self._conclude(policy, reason)
        evidence.add(own if everywhere else trials)
