"""Which forward scores a model's completions (packed, prefix, padded, TRL's own), decided once for each model.

Differs from TRL, which always pads. Called by the trainer for the policy and the reference model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from accelerate.logging import get_logger

from ..batching.micro_batches import Form
from ..errors import MemoryShortageError, ModelError
from ..runtime.collectives import any_process, gather_lists
from ..runtime.out_of_memory import Halving
from .adapters import is_prompt_learning, needs_whole_rows
from .form_check import Evidence, Trial, telling_rows, try_pack, try_prefix
from .lm_head import Scores
from .packed import score_packed, why_not_packed
from .padded import score_padded, score_through_trl
from .prefix import score_prefix, why_no_prefix
from .rows import TokenRows

logger = get_logger(__name__)


@dataclass
class _Known:
    """What is known of a model: the forms it does not run, with the reason, and what was compared of each."""

    refused: dict[Form, str] = field(default_factory=dict)
    evidence: dict[Form, Evidence] = field(default_factory=dict)


_NAMES: dict[Form, str] = {"packed": "packs", "prefix": "shared prefixes"}
_MEANINGS: dict[Form, str] = {
    "packed": "packs: a prompt once for its completions, no padding",
    "prefix": "shared prefixes: a prompt once for its completions, through a cache",
    "padded": "padded: every completion with its prompt",
}


class ForwardChoice:
    """Chooses how a model's completions are scored.

    The cost rule: a pack computes `prompt + sum of completions` tokens, the prefix form `prompt + rows * longest
    completion`, a padded batch `rows * (longest prompt + longest completion)`: none less than the one before. So a
    model runs packs if it can, else the prefix form if it can; inside a pack, `forward.attention.split_is_cheaper`
    decides for each group how its attention is computed.

    Args:
        forms: what may be run, the best first; padded batches run where a model can run none of them.
        score_completions_only: padded batches go through our head, else through TRL's method.
        may_cut: whether the comparison may run in smaller pieces where memory is short; not where a forward is a
            collective.
        checkpointing_kwargs: of gradient checkpointing; None where activations are kept.
        multiple: TRL's `pad_to_multiple_of`.
        refused: forms that no model of this run takes, with the reason.
    """

    def __init__(
        self,
        forms: Sequence[Form],
        score_completions_only: bool,
        device: torch.device,
        may_cut: bool = True,
        checkpointing_kwargs: dict[str, Any] | None = None,
        multiple: int | None = None,
        refused: Mapping[Form, str] | None = None,
    ) -> None:
        self.refused = refused or {}
        self.forms, self.score_completions_only, self.multiple = tuple(forms), score_completions_only, multiple or 1
        self.device, self.checkpointing_kwargs = device, checkpointing_kwargs
        self._memory = Halving("comparing two forms of the forward", "set forward='padded'", may_cut)
        self._known: dict[int, _Known] = {}
        self._said: set[str] = set()

    def form(self, policy: Any, wrapped: Any = None) -> Form:
        """How the completions of `policy` run; says once what they do not run as, and why.

        Args:
            policy: the causal language model.
            wrapped: it, as PEFT wraps it.
        """
        if id(policy) not in self._known:
            known = self._known[id(policy)] = _Known()
            for form in self.forms:
                reason = self.refused.get(form) or needs_whole_rows(wrapped) or self._why_not(form, policy)
                if reason is not None:
                    known.refused[form] = reason
            self._say(known)
        refused = self._known[id(policy)].refused
        return next((form for form in self.forms if form not in refused), "padded")

    def described(self, policy: Any, wrapped: Any = None) -> str:
        """How the completions of `policy` run, and why not in another form, for people."""
        form = self.form(policy, wrapped)
        refused = self._known[id(policy)].refused
        reasons = "; ".join(f"no {_NAMES[other]}: {reason}" for other, reason in refused.items())
        return _MEANINGS[form] + (f" ({reasons})" if reasons else "")

    @property
    def all_refused(self) -> dict[Form, str]:
        """The forms that no model takes, or that one was found not to run, with the reason."""
        return {**self.refused, **{form: why for known in self._known.values() for form, why in known.refused.items()}}

    def _why_not(self, form: Form, policy: Any) -> str | None:
        if form == "packed":
            return why_not_packed(policy)
        return why_no_prefix(policy, bool((self.checkpointing_kwargs or {}).get("use_reentrant")))

    def _say(self, known: _Known) -> None:
        if len(known.refused) < len(self.forms):
            return
        reasons = "; ".join(f"{_NAMES[form]}: {reason}" for form, reason in known.refused.items())
        if reasons and reasons not in self._said:  # policy and reference are often of one kind
            logger.warning(f"Padded batches run, which repeat each prompt for its completions ({reasons}).")
        self._said.add(reasons)

    def forward(
        self, policy: Any, wrapped: Any, trl_scorer: Callable[..., Any], padded: bool = False
    ) -> Callable[..., Scores]:
        """The function that scores rows: `(model, policy, rows, with_router, with_entropy)`.

        Args:
            policy: the causal language model.
            wrapped: it, as PEFT wraps it.
            trl_scorer: TRL's own method, for what the other forwards cannot do.
            padded: these rows take no other form.
        """
        form = self.form(policy, wrapped)
        if form != "padded" and not padded:
            return partial(score_packed if form == "packed" else score_prefix, multiple=self.multiple)
        if is_prompt_learning(wrapped):
            return partial(score_through_trl, trl_scorer, multiple=self.multiple, virtual_tokens=True)
        if self.score_completions_only:
            return partial(score_padded, multiple=self.multiple)
        return partial(score_through_trl, trl_scorer, multiple=self.multiple)

    def settled(self, policy: Any) -> bool:
        """Whether `check` has nothing left to look at."""
        if not self.forms:
            return True
        known = self._known.get(id(policy))
        form = None if known is None else self.form(policy)
        return known is not None and form is not None and (form == "padded" or self._evidence(known, form).settled)

    @staticmethod
    def _evidence(known: _Known, form: Form) -> Evidence:
        return known.evidence.setdefault(form, Evidence())

    def check(
        self,
        model: Any,
        policy: Any,
        wrapped: Any,
        rows: TokenRows,
        everywhere: bool,
    ) -> None:
        """Before a model's first pack or shared prefix, run it and padded on real completions; all processes together.

        What one process finds holds for all. Where the completions at hand cannot tell (one token each; none longer
        than the sliding window), the next ones are looked at too.

        Args:
            rows: the completions at hand.
            everywhere: whether all processes have the same completions at hand.

        Raises:
            ModelError: on every process, where packed and padded differ by more than rounding on one of them.
            MemoryShortageError: on every process, where the comparison does not fit on one of them.
        """
        while (form := self.form(policy, wrapped)) != "padded":
            known = self._known[id(policy)]
            evidence = self._evidence(known, form)
            if evidence.settled:
                return
            telling = telling_rows(rows.prompts_B, rows.completions_B, rows.same_prompt, evidence.longer_than)
            if not (telling is not None if everywhere else any_process(telling is not None, self.device)):
                return
            # a forward may be a collective, so all processes run it
            some = rows.part(slice(0, 1) if telling is None else telling)
            own, failure = self._try(form, model, policy, some, telling is not None)
            trials = gather_lists(own)
            if shortage := next((trial.shortage for trial in trials if trial.shortage), None):
                raise failure or MemoryShortageError(shortage)
            difference = next((trial.difference for trial in trials if trial.difference), None)
            reason = next((trial.refused for trial in trials if trial.refused), None)
            if difference is not None and form == "packed":
                raise ModelError(f"{difference}. Set packed_forward=False.")
            if difference is None and reason is None:
                evidence.add(own if everywhere else trials)
                return
            known.refused[form] = str(reason or difference)
            self._say(known)
            if self.form(policy, wrapped) != "padded":
                logger.warning(f"Completions do not run as planned: {self.described(policy, wrapped)}.")

    def _try(
        self, form: Form, model: Any, policy: Any, some: TokenRows, telling: bool
    ) -> tuple[list[Trial], MemoryShortageError | None]:
        def work(piece: Sequence[int]) -> Trial:
            part = some.part(slice(piece[0], piece[-1] + 1))
            if form == "packed":
                trial = try_pack(model, policy, part)
            else:
                trial = try_prefix(model, policy, part, self.checkpointing_kwargs)
            return trial if telling and len(piece) > 1 else trial.untold

        try:
            return self._memory.run(range(len(some)), work), None
        except MemoryShortageError as error:  # raised below, once the other processes know of it
            return [Trial(shortage=str(error))], error
