"""Which form scores a model's completions (packed, prefix or padded), decided once for each model.

Differs from TRL, which always pads. What a form can get wrong depends on the model's code, so a few real completions
run in the form and padded, and their log-probabilities are compared, before a model's first pack or shared prefix. A
difference counts if it is larger than the rounding, which is measured: the padded batch runs again with every module's
output off by a unit in the last place. Shape: S completion tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, cast

import torch
from accelerate.logging import get_logger
from accelerate.utils import extract_model_from_parallel

from ..batching.micro_batches import Form
from ..errors import MemoryShortageError
from ..runtime.collectives import any_process, gather_lists
from ..runtime.out_of_memory import Halving, is_out_of_memory
from .attention import TakesNoPacks
from .forms import FORWARDS, score_padded, why_no_prefix, why_not_packed
from .quantised import EIGHT_BIT_UNIT, outlier_thresholds
from .reference import base_model_of
from .rows import TokenRows

logger = get_logger(__name__)

_NAMES: dict[Form, str] = {"packed": "packs", "prefix": "shared prefixes"}
_MEANINGS: dict[Form, str] = {
    "packed": "packs: a prompt once for its completions, no padding",
    "prefix": "shared prefixes: a prompt once for its completions, through a cache",
    "padded": "padded: every completion with its prompt",
}
# a fault is a difference of more than this many times the rounding; healthy models reach 1.3 (490 starts), and
# completions that see each other, or a lost window, 2.7 and more
_LIMIT = 2.0
_ROWS = 8  # completions compared at most
_ENOUGH = 32  # completion tokens to compare; attention that is sharp hides a neighbour from a few
_DRAWS = 2  # perturbed forwards that the rounding is estimated from


def needs_whole_rows(model: Any) -> str | None:
    """Why the adapter of a model needs a whole row for every completion, as a sentence; None if it does not."""
    configs = getattr(model, "peft_config", {}).values()
    if any(getattr(config, "alora_invocation_tokens", None) for config in configs):
        return "its adapter looks for tokens in every row of a batch"
    return None


@dataclass
class _ModelForms:
    """The forms that a model does not run, with the reason, and the tokens compared in the form that it runs."""

    refused: dict[Form, str]
    compared: int = 0


class ForwardChoice:
    """Chooses how a model's completions are scored.

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
        return self._best_beside(self._of(model).refused)

    def described(self, model: Any) -> str:
        """How a model runs, and why not in another form, for people."""
        refused = self._of(model).refused
        reasons = "; ".join(f"no {_NAMES[form]}: {reason}" for form, reason in refused.items())
        return _MEANINGS[self._best_beside(refused)] + (f" ({reasons})" if reasons else "")

    @property
    def all_refused(self) -> dict[Form, str]:
        """The forms that no model takes, or that a model of this run does not take, with the reason."""
        return {**self.refused, **{form: why for forms in self._models.values() for form, why in forms.refused.items()}}

    def _best_beside(self, refused: Mapping[Form, str]) -> Form:
        return next((form for form in self.forms if form not in refused), "padded")

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
            self._models[id(policy)] = _ModelForms(refused)
            self._warn_of_padding(refused)
        return self._models[id(policy)]

    def _warn_of_padding(self, refused: Mapping[Form, str]) -> None:
        reasons = "; ".join(f"{_NAMES[form]}: {reason}" for form, reason in refused.items())
        # policy and reference often have the same reasons
        if reasons and self._best_beside(refused) == "padded" and reasons not in self._warned:
            self._warned.add(reasons)
            logger.warning(f"Padded batches run, which repeat each prompt for its completions ({reasons}).")

    def settled(self, model: Any) -> bool:
        """Whether `check` has nothing left to compare."""
        return self.form(model) == "padded" or self._of(model).compared >= _ENOUGH

    def check(self, model: Any, rows: TokenRows) -> None:
        """Before a model's first pack or shared prefix, compare it with padding; all processes together.

        A form that one process refuses is refused on all, and the next one is compared. Completions of one token
        cannot show a fault, and a few tokens may hide it; then the completions of the next step are compared too.

        Args:
            model: as the loop calls it.

        Raises:
            MemoryShortageError: on every process, where the comparison does not fit on one of them.
        """
        while not self.settled(model):
            forms, form = self._of(model), self.form(model)
            chosen = discriminating_rows(rows.completions_B, rows.same_prompt)
            if not any_process(chosen is not None, self.device):
                return
            # a forward may be a collective, so all processes run it
            trials = gather_lists(self._try(form, model, rows, chosen))
            if shortage := next((trial.shortage for trial in trials if trial.shortage), None):
                raise MemoryShortageError(shortage)
            reason = next((trial.refused for trial in trials if trial.refused), None)
            if reason is None:
                # processes may hold the same completions, so those of one of them count
                forms.compared += max(trial.tokens for trial in trials)
                return
            forms.refused[form], forms.compared = reason, 0
            self._warn_of_padding(forms.refused)
            if self.form(model) != "padded":
                logger.warning(f"Completions do not run as planned: {self.described(model)}.")

    def _try(self, form: Form, model: Any, rows: TokenRows, chosen: slice | None) -> list[Trial]:
        some = replace(rows.part(chosen or slice(0, 1)), attended_N=None)

        def work(piece: Sequence[int]) -> Trial:
            part = some.part(slice(piece[0], piece[-1] + 1))
            trial = try_form(form, model, base_model_of(model), part, self.checkpointing_kwargs)
            return trial if chosen is not None and len(piece) > 1 else replace(trial, tokens=0)

        try:
            return self._memory.run(range(len(some)), work)
        except MemoryShortageError as error:  # raised once the other processes know of it
            return [Trial(shortage=str(error))]


# ---- One comparison -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """The result of one comparison on one process.

    Attributes:
        refused: why the model does not run the form, as a sentence without its end; None if it does.
        shortage: that the comparison did not fit into memory, as a sentence; None if it did.
        tokens: completion tokens compared that can show a fault.
    """

    refused: str | None = None
    shortage: str | None = None
    tokens: int = 0


def discriminating_rows(completions_B: Sequence[int], same: Sequence[bool]) -> slice | None:
    """Consecutive rows that can show a fault; None if there are none.

    Two completions of one prompt need a second token, the first that the other could disturb.

    Args:
        same: for each row but the first, whether its prompt is that of the row before.
    """
    for start in range(0, len(completions_B), _ROWS):
        stop = min(start + _ROWS, len(completions_B))
        groups = accumulate((int(not alike) for alike in same[start : stop - 1]), initial=0)
        long_ones = Counter(group for group, n in zip(groups, completions_B[start:stop]) if n > 1)
        if max(long_ones.values(), default=0) > 1:
            return slice(start, stop)
    return None


def try_form(
    form: Form,
    model: Callable[..., Any],
    policy: Any,
    rows: TokenRows,
    checkpointing_kwargs: dict[str, Any] | None = None,
) -> Trial:
    """Run some completions in a form and padded, and compare their log-probabilities.

    Every process runs the same number of forwards, unless the model refuses or memory is short.

    Args:
        model: the model as the loop calls it.
        policy: the causal language model inside it.
        checkpointing_kwargs: of gradient checkpointing, under which layers may drop a cache; None without.
    """
    name = type(policy).__name__
    recomputing = form == "prefix" and checkpointing_kwargs is not None

    def padded() -> torch.Tensor:
        with torch.no_grad():
            return score_padded(model, policy, rows).logps_S

    try:
        with _checkpointing(policy, checkpointing_kwargs) if recomputing else torch.no_grad():
            logps_S = FORWARDS[form](model, policy, rows).logps_S.detach()
    except TakesNoPacks as error:
        return Trial(str(error))
    except Exception as error:  # whatever a model does with what it does not expect
        if is_out_of_memory(error):
            raise
        padded()  # raises if the model fails in every form
        what = "a pack" if form == "packed" else "completions after a cached prompt"
        return Trial(f"{name} fails on {what} ({type(error).__name__}: {next(iter(str(error).splitlines()), '')})")
    padded_S = padded()
    rounding = _rounding(policy, padded, padded_S)
    if not padded_S.isfinite().all():
        return Trial()  # nothing to compare with; a loss that is not finite is reported elsewhere
    difference = _largest(logps_S - padded_S)
    if not difference <= _LIMIT * rounding:  # NaN is a difference
        return Trial(
            f"{form} and padded log-probabilities of {name} differ by up to {difference:.1e}, and rounding makes "
            f"{rounding:.1e}: the model does something between tokens that this form does not keep, such as ignoring "
            "position_ids"
        )
    return Trial(tokens=sum(max(n - 1, 0) for n in rows.completions_B))


@contextmanager
def _checkpointing(policy: Any, kwargs: dict[str, Any] | None) -> Iterator[None]:
    before = policy.is_gradient_checkpointing
    policy.gradient_checkpointing_enable(kwargs)
    try:
        with torch.enable_grad():
            yield
    finally:
        if not before:
            policy.gradient_checkpointing_disable()


# ---- The rounding ---------------------------------------------------------------------------------------------------


def _largest(values: torch.Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


def _rounding(policy: Any, padded: Callable[[], torch.Tensor], padded_S: torch.Tensor) -> float:
    """The largest difference of log-probabilities that rounding makes in this model, in nats."""
    unit = _coarsest_unit(policy, padded_S.device)
    differences = [_unit(torch.float32) * _largest(padded_S)]  # of the head, whose sums are float32 or wider
    for seed in range(_DRAWS):
        with _rounded_otherwise(policy, unit, seed):
            # a value near the end of its type's range may leave it
            differences.append(_largest((padded() - padded_S).nan_to_num(0, 0, 0)))
    return max(differences)


def _unit(kind: torch.dtype) -> float:
    """Relative rounding of one operation. Sums in float32 and float64 are rounded term by term, so a few units."""
    eps = torch.finfo(kind).eps
    return eps / 2 if kind.itemsize <= 2 else eps * 8


def _coarsest_unit(policy: Any, device: torch.device) -> float:
    """Relative rounding of the coarsest arithmetic that a model's settings name."""
    kinds = {p.dtype for p in policy.parameters() if p.is_floating_point()}
    kinds |= {kind for m in policy.modules() if isinstance(kind := getattr(m, "compute_dtype", None), torch.dtype)}
    if torch.is_autocast_enabled(device.type):
        kinds.add(torch.get_autocast_dtype(device.type))
    backends: tuple[Any, ...] = (torch.backends, torch.backends.cuda.matmul, cast(Any, torch.backends.mkldnn).matmul)
    products = {backend.fp32_precision for backend in backends}
    shortcuts = [size for name, size in (("tf32", 2.0**-11), ("bf16", 2.0**-9)) if name in products]
    if outlier_thresholds(policy):
        shortcuts.append(EIGHT_BIT_UNIT)
    return max([*map(_unit, kinds), *shortcuts])


@contextmanager
def _rounded_otherwise(policy: Any, unit: float, seed: int) -> Iterator[None]:
    """Inside, the output of every module without children is off by up to a unit in the last place."""
    generators: dict[torch.device, torch.Generator] = {}

    def disturb(module: Any, args: Any, output: Any) -> Any:
        if not isinstance(output, torch.Tensor) or not output.is_floating_point():
            return output
        if output.device not in generators:
            generators[output.device] = torch.Generator(output.device).manual_seed(seed)
        wide = torch.promote_types(output.dtype, torch.float32)
        size = max(unit, _unit(output.dtype))
        draw = torch.rand(output.shape, generator=generators[output.device], device=output.device, dtype=wide)
        return (output.to(wide) * (1 + size * (2 * draw - 1))).to(output.dtype)

    with ExitStack() as hooks:
        for module in policy.modules():
            if next(module.children(), None) is None:
                hooks.callback(module.register_forward_hook(disturb).remove)
        yield
