"""Which form a model's completions run in (packed, prefix or padded), decided once for each model before a run begins.

Differs from TRL, which always pads. `form_check` compares every form, padded batches too, with rows that run alone.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from accelerate.utils import extract_model_from_parallel

from ..batching.micro_batches import Form, RowBatching
from ..errors import MemoryShortageError
from ..runtime.collectives import gather_lists, raise_on_all
from ..runtime.messages import logger
from ..runtime.out_of_memory import is_out_of_memory
from ..runtime.sequence_group import SequenceGroup
from .architecture import base_model_of
from .form_check import DRAWS, RowsAlone, why_form_fails
from .forms import why_no_prefix, why_not_packed
from .rows import TokenRows
from .zeros import zeros_filled

_TAKES_LONG = 256  # tokens of a prompt; on a CPU the comparison then takes seconds
_NAMES: dict[Form, str] = {"packed": "packs", "prefix": "shared prefixes"}
_MEANINGS: dict[Form, str] = {
    "packed": "packs: a prompt once for its completions, no padding",
    "prefix": "shared prefixes: a prompt once for its completions, through a cache",
    "padded": "padded: every completion with its prompt",
}
_JOINED: dict[RowBatching, str] = {
    "equal_lengths": "rows of one length alone, because padding changes them",
    "single": "one row each, because other rows change it",
}


def needs_whole_rows(model: Any) -> str | None:
    """The reason why an adapter needs a whole row for every completion, as a clause."""
    configs = getattr(model, "peft_config", {}).values()
    if any(getattr(config, "alora_invocation_tokens", None) for config in configs):
        return "its adapter looks for tokens in every row of a batch"
    return None


@dataclass
class _ModelForms:
    forms: tuple[Form, ...]
    refused: dict[Form, str]
    compared: bool = False
    batching: RowBatching = "any"  # of rows in the padded form

    @property
    def best(self) -> Form:
        return next((form for form in self.forms if form not in self.refused), "padded")

    @property
    def reasons(self) -> str:
        return "; ".join(f"no {_NAMES[form]}: {reason}" for form, reason in self.refused.items())


class ForwardChoice:
    """Chooses the form of each model, given with its adapters, with or without the wrapper of an engine.

    A pack computes `prompt + sum of completions` tokens, the prefix form `prompt + rows * longest completion`, a padded
    batch `rows * (longest prompt + longest completion)`: a model runs the first of these that it can.
    """

    def __init__(
        self,
        forms: Sequence[Form],  # that may be run, the best first
        device: torch.device,
        sharded: bool = False,  # a forward is a collective
        checkpointing_kwargs: dict[str, Any] | None = None,  # of gradient checkpointing; None without it
        refused: Mapping[Form, str] | None = None,  # forms that no model of the run takes, with the reason
        group: SequenceGroup | None = None,  # whose members share the tokens of packs
    ) -> None:
        self.forms, self.device, self.sharded, self.group = tuple(forms), device, sharded, group
        self.checkpointing_kwargs, self.refused = checkpointing_kwargs, refused or {}
        self._models: WeakKeyDictionary[Any, _ModelForms] = WeakKeyDictionary()  # by the causal language model
        self._warn_once = functools.cache(logger.warning)  # policy and reference often have the same reasons

    def form(self, model: Any) -> Form:
        """The form in which a model runs; padded before `compare`."""
        forms = self._models.get(base_model_of(model))
        return forms.best if forms is not None and forms.compared else "padded"

    def batching(self, model: Any) -> RowBatching:
        """The rows that a padded batch of a model may hold together, in sampling too; "any" before `compare`."""
        forms = self._models.get(base_model_of(model))
        return "any" if forms is None else forms.batching

    def planned(self, model: Any) -> Form:
        """The form that runs if it compares equal to rows alone; warns once of a model that pads."""
        return self._of(model).best

    def described(self, model: Any) -> str:
        forms = self._of(model)
        joined = "" if forms.batching == "any" else f"; padded batches hold {_JOINED[forms.batching]}"
        return _MEANINGS[forms.best] + (f" ({forms.reasons})" if forms.reasons else "") + joined

    def is_compared(self, model: Any) -> bool:
        return self._of(model).compared

    def compare(self, model: Any, make_rows: Callable[[Any], Sequence[TokenRows]]) -> None:
        """Choose the best form whose results are those of rows alone, and the rows that padded batches may hold.

        All processes together: a form that one refuses is refused on all, and the next one is compared.
        """
        forms, problem, batches = self._of(model), None, list[RowsAlone]()
        try:
            short, *long = make_rows(base_model_of(model))
            batches = [RowsAlone(model, short, self.device)]
            batches += [RowsAlone(model, rows, self.device, paddings=(0,)) for rows in long]
            if forms.best != "padded" and (longest := max(batches[-1].rows.prompts_B)) > _TAKES_LONG:
                logger.info(f"Comparing {_NAMES[forms.best]} with rows alone, on over {longest} tokens, once.")
        except Exception as error:  # a processor may expect prompts like the user's
            problem = f"rows to compare it on could not be made ({type(error).__name__}: {error})"
        first = forms.best
        with zeros_filled(model):
            while (form := forms.best) != "padded":
                if (reason := self._why_refused(form, batches, problem)) is None:
                    break
                forms.refused[form] = reason
            if (reason := self._why_refused("padded", batches[:1])) is not None:
                # images of one batch may be padded to the largest
                pairs = [alone.pair() for alone in batches[:1] if alone.rows.images is None]
                equal = pairs and self._why_refused("padded", pairs) is None
                forms.batching = "equal_lengths" if equal else "single"
                self._warn_once(
                    f"A batch changes what the model computes ({reason}). Where batches are padded, in sampling too, "
                    f"they hold {_JOINED[forms.batching]}, so there are more of them, and steps take longer."
                )
            elif forms.best == "padded" != first:
                self._warn_of_padding(forms)
        if first != forms.best != "padded":
            logger.warning(f"The best form of the forward was refused; completions run as {self.described(model)}.")
        forms.compared = True

    def use_form_of(self, model: Any, twin: Any) -> None:
        self._models[base_model_of(twin)] = self._of(model)

    def _of(self, model: Any) -> _ModelForms:
        policy = base_model_of(model)
        if policy not in self._models:
            reentrant = bool((self.checkpointing_kwargs or {}).get("use_reentrant"))
            forms = _ModelForms(self.forms, {})
            for form in self.forms:
                reason = self.refused.get(form) or needs_whole_rows(extract_model_from_parallel(model))
                reason = reason or (why_not_packed(policy) if form == "packed" else why_no_prefix(policy, reentrant))
                if reason is not None:
                    forms.refused[form] = reason
            self._models[policy] = forms
            self._warn_of_padding(forms)
        return self._models[policy]

    def _warn_of_padding(self, forms: _ModelForms) -> None:
        if self.group is None and forms.reasons and forms.best == "padded":
            self._warn_once(f"Padded batches run, which repeat each prompt for its completions ({forms.reasons}).")

    def _why_refused(self, form: Form, batches: Sequence[RowsAlone], problem: str | None = None) -> str | None:
        """The first reason of any process against a form: a `problem` with the rows, or what a comparison finds."""
        for draws in DRAWS:
            with raise_on_all("the comparison of two forms", self.sharded):
                try:
                    # every batch, so that all processes run the same number of forwards
                    compared = () if problem else batches
                    reasons = [why_form_fails(form, a, self.checkpointing_kwargs, self.group, draws) for a in compared]
                except RuntimeError as error:
                    if not is_out_of_memory(error):
                        raise
                    remedy = "use a device with more memory, or FSDP2"
                    if self.group is None and form != "padded":
                        remedy = "set forward='padded', which is compared on short rows alone"
                    first_line = str(error).splitlines()[0]
                    raise MemoryShortageError(
                        f"comparing two forms of the forward ran out of memory ({first_line}); {remedy}."
                    ) from None
            if (reason := next(filter(None, gather_lists([problem, *reasons])), None)) is None:
                break
        return reason
