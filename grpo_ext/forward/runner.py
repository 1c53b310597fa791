"""Log-probabilities of completions under the policy and the reference, for a rollout or a micro-batch.

Differs from TRL, where one method serves both: a rollout runs without gradients, in chunks that fit into memory; a
micro-batch runs in one forward, with gradients. Where a user overrides or calls TRL's method, see `forward.override`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, Self

import torch
from accelerate import Accelerator

from ..batching.micro_batches import Form, StepSizes, canonical_units, cut_in_order
from ..batching.sizes import group_numbers
from ..config import GRPOConfig, forms_of
from ..precision.weight_gradients import float32_weight_gradients
from ..runtime.attributes import assigned
from ..runtime.collectives import max_over_processes, shards_parameters
from ..runtime.out_of_memory import Halving
from .architecture import base_model_of
from .choice import ForwardChoice
from .forms import in_form, run_rows
from .lm_head import LogProbs, RouterOutput
from .routing import Routing
from .rows import TokenRows, in_columns


@dataclass(frozen=True)
class ForwardLimits:
    """The most that one forward of a rollout holds; None: no limit."""

    completions: int | None
    tokens: int | None
    group_size: int  # completions per group; canonical units are cut within groups


class MicroBatchScores(NamedTuple):
    """Log-probabilities and entropies (B, T) of a micro-batch, in nats."""

    logps: torch.Tensor
    entropies: torch.Tensor
    router: RouterOutput | None  # of a MoE model, where requested
    routing: Routing | None = None  # the experts that were replayed; None where none were


class ForwardRunner:
    def __init__(
        self,
        accelerator: Accelerator,
        args: GRPOConfig,
        refused: Mapping[Form, str] | None = None,  # forms that no model of this run takes, with the reason
        suppressed: Sequence[torch.Tensor] = (),  # sets of token ids that sampling suppresses
        make_rows: Callable[[Any], Sequence[TokenRows]] = lambda policy: (),  # on which a model's forms are compared
    ) -> None:
        self.accelerator, self.args, self.suppressed, self.make_rows = accelerator, args, suppressed, make_rows
        multiple: Any = args.pad_to_multiple_of
        self.multiple: int = multiple or 1
        self.sharded = shards_parameters(accelerator)
        self.float32_weight_gradients = args.float32_weight_gradients and accelerator.native_amp and not self.sharded
        may_cut = not (self.sharded or args.bitwise_invariant)
        remedy = "lower max_completion_length, or canonical_unit_size in bitwise mode"
        self.memory = Halving("computing log-probabilities", remedy, may_cut)
        kwargs: Any = args.gradient_checkpointing_kwargs or {}
        checkpointing = {"use_reentrant": False, **kwargs} if args.gradient_checkpointing else None
        forms = forms_of(args.forward)
        self.choice = ForwardChoice(forms, accelerator.device, self.sharded, checkpointing, refused)
        self._in_form: Any = None  # the model whose backward passes run in its form

    def copy(self, accelerator: Accelerator, twins: Sequence[tuple[Any, Any]]) -> Self:
        """A runner for another thread; the second of each twin runs there, in the form of the first."""
        runner = copy.copy(self)
        runner.accelerator, runner._in_form = accelerator, None
        for model, twin in twins:
            self.choice.share(model, twin)
        return runner

    def choose_forms(self, models: Sequence[Any]) -> None:
        """Choose the forms of models that have none yet (they pad), with real weights; all processes together."""
        for model in models:
            if not self.choice.is_compared(model):
                with self.without_gradients(model):
                    self.choice.compare(model, self.make_rows)

    @contextmanager
    def in_form_of(self, model: Any) -> Iterator[None]:
        policy = base_model_of(model)
        exact = float32_weight_gradients(policy) if self.float32_weight_gradients else nullcontext()
        with in_form(policy, self.choice.form(model)), assigned(self, _in_form=policy), exact:
            yield

    @contextmanager
    def without_gradients(self, model: Any) -> Iterator[None]:
        """Inside, `model` runs in its training precision, without gradients and without checkpointing its layers."""
        checkpointing, kwargs = model.is_gradient_checkpointing, self.args.gradient_checkpointing_kwargs
        if checkpointing:
            model.gradient_checkpointing_disable()
        try:
            with torch.no_grad(), self.accelerator.autocast():
                yield
        finally:
            if checkpointing:
                model.gradient_checkpointing_enable(kwargs)

    def rollout_log_probs(
        self, model: Any, rows: TokenRows, limits: ForwardLimits, record_experts: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Scores of this process's part of a rollout batch, (S,), and recorded experts as in `LogProbs.experts_NC`."""
        parts = self._run_chunks(model, rows, limits, with_entropy=False, record_experts=record_experts)
        experts = [part.experts_NC for part in parts if part.experts_NC is not None]
        return torch.cat([part.logps_S for part in parts]), torch.cat(experts) if experts else None

    def micro_batch_log_probs(
        self, model: Any, columns: Mapping[str, Any], rows: TokenRows, with_router: bool
    ) -> MicroBatchScores:
        """Scores in the layout and on the device of the padded `columns`."""
        output, mask_BT = self._forward(model, rows, with_router=with_router), columns["completion_mask"]
        assert output.entropies_S is not None
        shape = (output.places_2S, len(rows), mask_BT.size(1))
        logps, entropies = (in_columns(v, *shape).to(mask_BT.device) for v in (output.logps_S, output.entropies_S))
        return MicroBatchScores(logps, entropies, output.router, output.routing)

    def _cut(
        self, model: Any, rows: TokenRows, batch_size: int | None, max_tokens: int | None = None
    ) -> list[list[int]]:
        form = self.choice.form(model) if rows.attended_N is None else "padded"
        groups = list(accumulate((not same for same in rows.same_prompt), initial=0))
        sizes = StepSizes(groups, rows.prompts_B, rows.completions_B, self.multiple)
        return cut_in_order(sizes, batch_size or len(rows), max_tokens, form)

    def _run_chunks(self, model: Any, rows: TokenRows, limits: ForwardLimits, **options: bool) -> list[LogProbs]:
        """Run a rollout in chunks that fit into memory, in bitwise mode in canonical units."""
        if (unit := self.args.unit_rows) is None:
            chunks = self._cut(model, rows, limits.completions, limits.tokens)
        else:
            sizes = StepSizes(group_numbers(len(rows), limits.group_size), [], [])
            chunks = canonical_units(sizes, range(len(rows)), unit)
        # where a forward is a collective, every process runs as many; a process with fewer chunks repeats its last one
        forwards = max_over_processes(len(chunks)) if self.sharded else len(chunks)
        outputs: list[LogProbs] = []
        for number in range(forwards):
            chunk = chunks[min(number, len(chunks) - 1)]
            parts = self.memory.run(chunk, lambda piece: self._forward(model, rows.part(piece), **options))
            outputs += parts if number < len(chunks) else []
        return outputs

    def _forward(self, model: Any, rows: TokenRows, **options: bool) -> LogProbs:
        """Run rows in one forward, with gradients where they are on; `options` as of `lay_out`."""
        form, policy = self.choice.form(model), base_model_of(model)
        # outside `in_form_of`, a backward pass under gradient checkpointing would run the layers again in another form
        again = torch.is_grad_enabled() and policy.is_gradient_checkpointing and self._in_form is not policy
        if again or rows.attended_N is not None:
            form = "padded"
        fixed: dict[str, Any] = {"multiple": self.multiple, "suppressed": self.suppressed}
        with self.accelerator.autocast():
            return run_rows(form, model, rows, self.accelerator.device, **fixed, **options)
