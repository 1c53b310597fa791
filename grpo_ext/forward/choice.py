"""Which form scores a model's completions (packed, prefix or padded), decided once for each model.

Differs from TRL, which always pads. Asked for the policy and the reference model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import extract_model_from_parallel

from ..batching.micro_batches import Form
from ..errors import MemoryShortageError, ModelError
from ..runtime.collectives import any_process, gather_lists
from ..runtime.out_of_memory import Halving
from .form_check import Trial, telling_rows, try_form
from .packed import why_not_packed
from .prefix import why_no_prefix
from .reference import base_model_of
from .rows import TokenRows

logger = get_logger(__name__)

_NAMES: dict[Form, str] = {"packed": "packs", "prefix": "shared prefixes"}
_MEANINGS: dict[Form, str] = {
    "packed": "packs: a prompt once for its completions, no padding",
    "prefix": "shared prefixes: a prompt once for its completions, through a cache",
    "padded": "padded: every completion with its prompt",
}
_ENOUGH = 32  # completion tokens to compare; attention that is sharp hides a neighbour from a few


def needs_whole_rows(model: Any) -> str | None:
    """Why the adapter of a model needs every prompt whole in a row of its own, as a sentence; None if it does not."""
    configs = getattr(model, "peft_config", {}).values()
    if any(getattr(config, "alora_invocation_tokens", None) for config in configs):
        return "its adapter looks for tokens in every row of a batch"
    return None


@dataclass
class _Known:
    """What is known of a model: the forms it does not run, with the reason, and the tokens compared of its form."""

    refused: dict[Form, str]
    compared: int = 0


class ForwardChoice:
    """Chooses how a model's completions are scored.

    The cost rule: a pack computes `prompt + sum of completions` tokens, the prefix form `prompt + rows * longest
    completion`, a padded batch `rows * (longest prompt + longest completion)`: none less than the one before. So a
    model runs packs if it can, else the prefix form if it can; inside a pack, `forward.attention.split_is_cheaper`
    decides for each group how its attention is computed.

    Every method takes a model with its adapters, as an engine wraps it or without that.

    Args:
        forms: the forms that may be run, the best first; a model that can run none of them pads.
        may_cut: whether the comparison may run in smaller pieces where memory is short; not where a forward is a
            collective.
        checkpointing_kwargs: of gradient checkpointing; None where activations are kept.
        refused: forms that no model of this run takes, with the reason.
    """

    def __init__(
        self,
        forms: Sequence[Form],
        device: torch.device,
        may_cut: bool = True,
        checkpointing_kwargs: dict[str, Any] | None = None,
        refused: Mapping[Form, str] | None = None,
    ) -> None:
        self.forms, self.device, self.checkpointing_kwargs = tuple(forms), device, checkpointing_kwargs
        self.refused = refused or {}
        self._memory = Halving("comparing two forms of the forward", "set forward='padded'", may_cut)
        self._known: dict[int, _Known] = {}  # by the id of the causal language model
        self._warned: set[str] = set()

    def form(self, model: Any) -> Form:
        """The form that a model runs; warns once of a model that pads, with the reasons."""
        return self._form_beside(self._of(model).refused)

    def described(self, model: Any) -> str:
        """How a model runs, and why not in another form, for people."""
        refused = self._of(model).refused
        reasons = "; ".join(f"no {_NAMES[form]}: {why}" for form, why in refused.items())
        return _MEANINGS[self._form_beside(refused)] + (f" ({reasons})" if reasons else "")

    @property
    def all_refused(self) -> dict[Form, str]:
        """The forms that no model takes, or that one was found not to run, with the reason."""
        return {**self.refused, **{form: why for known in self._known.values() for form, why in known.refused.items()}}

    def _form_beside(self, refused: Mapping[Form, str]) -> Form:
        return next((form for form in self.forms if form not in refused), "padded")

    def _of(self, model: Any) -> _Known:
        policy = base_model_of(model)
        if id(policy) not in self._known:
            reentrant = bool((self.checkpointing_kwargs or {}).get("use_reentrant"))
            refused: dict[Form, str] = {}
            for form in self.forms:
                reason = self.refused.get(form) or needs_whole_rows(extract_model_from_parallel(model))
                reason = reason or (why_not_packed(policy) if form == "packed" else why_no_prefix(policy, reentrant))
                if reason is not None:
                    refused[form] = reason
            self._known[id(policy)] = _Known(refused)
            self._warn_of_padding(refused)
        return self._known[id(policy)]

    def _warn_of_padding(self, refused: Mapping[Form, str]) -> None:
        reasons = "; ".join(f"{_NAMES[form]}: {reason}" for form, reason in refused.items())
        # policy and reference are often of one kind
        if reasons and self._form_beside(refused) == "padded" and reasons not in self._warned:
            self._warned.add(reasons)
            logger.warning(f"Padded batches run, which repeat each prompt for its completions ({reasons}).")

    def settled(self, model: Any) -> bool:
        """Whether `check` has nothing left to compare."""
        return self.form(model) == "padded" or self._of(model).compared >= _ENOUGH

    def check(self, model: Any, rows: TokenRows) -> None:
        """Before a model's first pack or shared prefix, run it and padded on real completions; all processes together.

        What one process finds holds for all. Where these completions cannot show a fault (one token each), or are few,
        the next ones are compared too.

        Args:
            model: as the loop calls it.

        Raises:
            ModelError: on every process, where packed and padded differ by more than rounding on one of them.
            MemoryShortageError: on every process, where the comparison does not fit on one of them.
        """
        while not self.settled(model):
            known, form = self._of(model), self.form(model)
            telling = telling_rows(rows.completions_B, rows.same_prompt)
            if not any_process(telling is not None, self.device):
                return
            # a forward may be a collective, so all processes run it
            trials = gather_lists(self._try(form, model, rows, telling))
            if shortage := next((trial.shortage for trial in trials if trial.shortage), None):
                raise MemoryShortageError(shortage)
            difference = next((trial.difference for trial in trials if trial.difference), None)
            if difference is not None and form == "packed":
                raise ModelError(f"{difference}. Set forward='padded'.")
            reason = difference or next((trial.refused for trial in trials if trial.refused), None)
            if reason is None:
                # processes may hold the same completions, so those of one of them count
                known.compared += max(trial.tokens for trial in trials)
                return
            known.refused[form], known.compared = reason, 0
            self._warn_of_padding(known.refused)
            if self.form(model) != "padded":
                logger.warning(f"Completions do not run as planned: {self.described(model)}.")

    def _try(self, form: Form, model: Any, rows: TokenRows, telling: slice | None) -> list[Trial]:
        some = replace(rows.part(telling or slice(0, 1)), attended_N=None)

        def work(piece: Sequence[int]) -> Trial:
            part = some.part(slice(piece[0], piece[-1] + 1))
            trial = try_form(form, model, base_model_of(model), part, self.checkpointing_kwargs)
            return trial if telling is not None and len(piece) > 1 else replace(trial, tokens=0)

        try:
            return self._memory.run(range(len(some)), work)
        except MemoryShortageError as error:  # raised once the other processes know of it
            return [Trial(shortage=str(error))]
