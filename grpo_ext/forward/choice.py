"""Which form a model's completions run in (packed, prefix or padded), decided once for each model.

Differs from TRL, which always pads. `form_check` compares a form with padding before it is used first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import extract_model_from_parallel

from ..batching.micro_batches import Form
from ..runtime.collectives import any_process, gather_lists, together
from ..runtime.out_of_memory import Halving
from .architecture import base_model_of
from .form_check import Trial, discriminating_rows, try_form
from .forms import why_no_prefix, why_not_packed
from .rows import TokenRows

logger = get_logger(__name__)

_NAMES: dict[Form, str] = {"packed": "packs", "prefix": "shared prefixes"}
_MEANINGS: dict[Form, str] = {
    "packed": "packs: a prompt once for its completions, no padding",
    "prefix": "shared prefixes: a prompt once for its completions, through a cache",
    "padded": "padded: every completion with its prompt",
}
_ENOUGH = 32  # completion tokens to compare; where attention is sharp, a few tokens may not show a fault


def needs_whole_rows(model: Any) -> str | None:
    """Why the adapter of a model needs a whole row for every completion, as a sentence; None if it does not."""
    configs = getattr(model, "peft_config", {}).values()
    if any(getattr(config, "alora_invocation_tokens", None) for config in configs):
        return "its adapter looks for tokens in every row of a batch"
    return None


@dataclass
class _ModelForms:
    """The forms that may be run, the reasons against some of them in one model, and the completion tokens compared."""

    forms: tuple[Form, ...]
    refused: dict[Form, str]
    compared: int = 0

    @property
    def best(self) -> Form:
        """The first form that the model runs."""
        return next((form for form in self.forms if form not in self.refused), "padded")

    @property
    def reasons(self) -> str:
        """Why it does not run the others, as the parts of a sentence; empty where it runs the first."""
        return "; ".join(f"no {_NAMES[form]}: {reason}" for form, reason in self.refused.items())


class ForwardChoice:
    """Chooses the form of each model.

    The cost rule: a pack computes `prompt + sum of completions` tokens, the prefix form `prompt + rows * longest
    completion`, a padded batch `rows * (longest prompt + longest completion)`, each at least as many as the one before.
    So a model runs packs if it can, else the prefix form if it can. Inside a pack, `forward.attention.split_is_cheaper`
    decides for each group how its attention is computed.

    Every method takes a model with its adapters, as an engine wraps it or without that.

    Args:
        forms: the forms that may be run, the best first; a model that can run none of them pads.
        may_cut: whether the comparison may run in smaller pieces where memory is short; not where a forward is a
            collective.
        checkpointing_kwargs: arguments of gradient checkpointing; None without it.
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
        self._models: dict[int, _ModelForms] = {}  # by the id of the causal language model
        self._warned: set[str] = set()

    def form(self, model: Any) -> Form:
        """The form that a model runs; warns once of a model that pads, with the reasons."""
        return self._of(model).best

    def described(self, model: Any) -> str:
        """How a model runs, and why not in another form, for people."""
        forms = self._of(model)
        return _MEANINGS[forms.best] + (f" ({forms.reasons})" if forms.reasons else "")

    @property
    def all_refused(self) -> dict[Form, str]:
        """The forms that no model takes, or that a model of this run does not take, with the reason."""
        return {**self.refused, **{form: why for forms in self._models.values() for form, why in forms.refused.items()}}

    def _of(self, model: Any) -> _ModelForms:
        policy = base_model_of(model)
        if id(policy) not in self._models:
            reentrant = bool((self.checkpointing_kwargs or {}).get("use_reentrant"))
            refused: dict[Form, str] = {}
            for form in self.forms:
                reason = self.refused.get(form) or needs_whole_rows(extract_model_from_parallel(model))
                reason = reason or (why_not_packed(policy) if form == "packed" else why_no_prefix(policy, reentrant))
                if reason is not None:
                    refused[form] = reason
            self._models[id(policy)] = _ModelForms(self.forms, refused)
            self._warn_of_padding(self._models[id(policy)])
        return self._models[id(policy)]

    def _warn_of_padding(self, forms: _ModelForms) -> None:
        # policy and reference often have the same reasons
        if forms.reasons and forms.best == "padded" and forms.reasons not in self._warned:
            self._warned.add(forms.reasons)
            logger.warning(f"Padded batches run, which repeat each prompt for its completions ({forms.reasons}).")

    def settled(self, model: Any) -> bool:
        """Whether `check` has nothing left to compare."""
        return self.form(model) == "padded" or self._of(model).compared >= _ENOUGH

    def check(self, model: Any, rows: TokenRows) -> None:
        """Before a model's first pack or shared prefix, compare it with padding; all processes together.

        A form that one process refuses is refused on all, and the next one is compared. Completions of one token
        cannot show a fault, and a few tokens may hide it; then the completions of the next step are compared too.

        Raises:
            MemoryShortageError: on every process, where the comparison does not fit on one of them.
        """
        rows = replace(rows, kept_B=None)  # sampling masks are the same in every form
        while not self.settled(model):
            forms = self._of(model)
            chosen = discriminating_rows(rows.completions_B, rows.same_prompt)
            if not any_process(chosen is not None):
                return
            # a forward may be a collective, so all processes run it
            with together("the comparison of two forms", sharded=not self._memory.enabled):
                tried = self._try(forms.best, model, rows, chosen)
            trials = gather_lists(tried)
            reason = next((trial.refused for trial in trials if trial.refused), None)
            if reason is None:
                # processes may hold the same completions, so those of one of them count
                forms.compared += max(trial.tokens for trial in trials)
                return
            forms.refused[forms.best], forms.compared = reason, 0
            self._warn_of_padding(forms)
            if forms.best != "padded":
                logger.warning(f"Completions do not run as planned: {self.described(model)}.")

    def _try(self, form: Form, model: Any, rows: TokenRows, chosen: slice | None) -> list[Trial]:
        some = replace(rows.part(chosen or slice(0, 1)), attended_N=None)

        def work(piece: Sequence[int]) -> Trial:
            part = some.part(slice(piece[0], piece[-1] + 1))
            trial = try_form(form, model, part, self.device, self.checkpointing_kwargs)
            return trial if chosen is not None and len(piece) > 1 else replace(trial, tokens=0)

        return self._memory.run(range(len(some)), work)
