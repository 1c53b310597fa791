"""Log-probabilities of completions under the policy and the reference, for a rollout or a micro-batch.

Differs from TRL, where one method serves both: a rollout runs without gradients, in chunks that fit into memory; a
micro-batch runs in one forward, with gradients. `padded_log_probs` answers TRL's `_get_per_token_logps_and_entropies`,
where a user overrides or calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator

from .. import compat
from ..batching.micro_batches import Form, StepSizes, canonical_units, cut_in_order
from ..batching.sizes import group_numbers
from ..config import GRPOConfig, forms_of
from ..precision.weight_gradients import float32_weight_gradients
from ..runtime.attributes import assigned
from ..runtime.collectives import max_over_processes, shards_parameters
from ..runtime.out_of_memory import Halving
from ..runtime.transfer import to_device
from .architecture import base_model_of, experts_per_token
from .choice import ForwardChoice
from .forms import in_form, run_rows
from .lm_head import LogProbs, RouterOutput
from .routing import Routing
from .rows import TokenRows, Unchanged, in_columns, padded_ids_and_mask

LogProbsOverride = Callable[..., Any]  # a user's `_get_per_token_logps_and_entropies`


@dataclass
class Request:
    """Rows that go through a user's `_get_per_token_logps_and_entropies` as padded tensors."""

    runner: ForwardRunner  # of this thread
    rows: TokenRows  # without padding
    tensors: Unchanged  # ids and attention mask of the padded batch, for which alone `rows` are valid
    limits: tuple[Any, ...] | None = None  # of `rollout_log_probs`, for the rows of a rollout; None for a micro-batch
    router: RouterOutput | None = None  # of a MoE model, once the micro-batch has run


class MicroBatchScores(NamedTuple):
    """Log-probabilities and entropies (B, T) of a micro-batch, in nats."""

    logps: torch.Tensor
    entropies: torch.Tensor
    router: RouterOutput | None  # of a MoE model, where requested
    routing: Routing | None = None  # the experts that were replayed; None where none were


_request: ContextVar[Request | None] = ContextVar("request", default=None)  # of this thread


class ForwardRunner:
    """Runs models on completions, in the form of each.

    Args:
        refused: forms that no model of this run takes, with the reason.
        suppressed: sets of token ids that sampling suppresses, which completions refer to (`sampling_mask="replay"`).
        override: returns the user's `_get_per_token_logps_and_entropies`, which is called as TRL calls it, or None.
        make_rows: from a model to the rows on which its forms are compared (forward.probe).
    """

    def __init__(
        self,
        accelerator: Accelerator,
        args: GRPOConfig,
        refused: Mapping[Form, str] | None = None,
        suppressed: Sequence[torch.Tensor] = (),
        override: Callable[[], LogProbsOverride | None] = lambda: None,
        make_rows: Callable[[Any], Sequence[TokenRows]] = lambda policy: (),
    ) -> None:
        self.accelerator, self.args, self.suppressed, self.override = accelerator, args, suppressed, override
        self.make_rows = make_rows
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

    def copy(self, accelerator: Accelerator, twins: Sequence[tuple[Any, Any]]) -> ForwardRunner:
        """A runner for another thread; `twins`: pairs of a model and its copy there, which runs in the same form."""
        runner = ForwardRunner(accelerator, self.args, None, self.suppressed, self.override)
        runner.memory, runner.choice = self.memory, self.choice
        for model, twin in twins:
            self.choice.share(model, twin)
        return runner

    def choose_forms(self, models: Sequence[Any]) -> None:
        """Choose the forms of models once they have their weights; all processes together. Until then they pad."""
        for model in models:
            if not self.choice.is_compared(model):
                with self.without_gradients(model):
                    self.choice.compare(model, self.make_rows)

    @property
    def of_this_thread(self) -> ForwardRunner:
        """The runner of the request that this thread is inside; without a request, this one."""
        request = _request.get()
        return self if request is None else request.runner

    @contextmanager
    def in_form_of(self, model: Any) -> Iterator[None]:
        """Inside, forwards and backwards of `model` run in its form."""
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

    @contextmanager
    def _requested(
        self, ids: torch.Tensor, mask: torch.Tensor, rows: TokenRows, limits: Any = None
    ) -> Iterator[Request]:
        """Inside, `padded_log_probs` of this thread knows the rows of these tensors; `limits` as in `Request`."""
        request = Request(self, rows, Unchanged(ids, mask), limits)
        token = _request.set(request)
        try:
            yield request
        finally:
            _request.reset(token)

    def knows(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> bool:
        """Whether these are the tensors of a request, unchanged."""
        request = _request.get()
        return request is not None and request.tensors.are(input_ids, attention_mask)

    def rollout_log_probs(
        self, model: Any, rows: TokenRows, limits: tuple[int | None, int | None, int], record_experts: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probabilities (S,) of this process's part of a rollout batch, without gradients; all processes together.

        `limits` are completions and tokens of a forward, at most, and completions per group, within which canonical
        units are cut. Returns the recorded experts too, as in `LogProbs.experts_NC`; none by an override.
        """
        if (override := self.override()) is not None:
            ids, mask, width = rows.padded(self.multiple)
            images = {} if rows.images is None else rows.images.as_trl(ids, rows.prompts_B, ids.size(1) - width)
            ids, mask, images = to_device((ids, mask, images), self.accelerator.device)
            with self._requested(ids, mask, rows, limits):
                logps_BT, _, _ = override(model, ids, mask, width, batch_size=limits[0], **images)
            return torch.cat([row[:n] for row, n in zip(logps_BT, rows.completions_B)]), None
        parts = self._run_chunks(model, rows, limits, with_entropy=False, record_experts=record_experts)
        experts = [part.experts_NC for part in parts if part.experts_NC is not None]
        return torch.cat([part.logps_S for part in parts]), torch.cat(experts) if experts else None

    def micro_batch_log_probs(
        self, model: Any, inputs: dict[str, Any], rows: TokenRows, with_router: bool
    ) -> MicroBatchScores:
        """Log-probabilities of a micro-batch for TRL's loss, from TRL's padded dictionary and the rows in it."""
        width = inputs["completion_ids"].size(1)
        if (override := self.override()) is None:
            output, device = self._forward(model, rows, with_router=with_router), inputs["completion_ids"].device
            assert output.entropies_S is not None
            shape = (output.places_2S, len(rows), width)
            logps, entropies = (in_columns(v, *shape).to(device) for v in (output.logps_S, output.entropies_S))
            return MicroBatchScores(logps, entropies, output.router, output.routing)
        ids, mask = padded_ids_and_mask(inputs)
        images = compat.images_among(inputs)
        if not images and rows.images is not None:
            images = rows.images.as_trl(ids, rows.prompts_B, ids.size(1) - width)
        options: Any = {"compute_entropy": True, "compute_aux_loss": with_router, **images}
        with self._requested(ids, mask, rows) as request:
            logps, entropies, _ = override(model, ids, mask, width, **options)
        return MicroBatchScores(logps, entropies, request.router)

    def padded_log_probs(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        width: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """What `_get_per_token_logps_and_entropies` returns for a padded batch, in forwards of `batch_size` rows.

        Log-probabilities (B, T), entropies (B, T) or None, and the mean auxiliary loss or None. The tensors of a
        request run as its rows, and the request gets the router output. A ConfigError where sampling masks or experts
        are replayed, and those of these tokens are not known.
        """
        request = _request.get() if self.knows(input_ids, attention_mask) else None
        if request is None:
            name = "_get_per_token_logps_and_entropies"
            self.args.replay.refuse_other_tokens(f"{name} was called with other tensors than it was given")
        rows = TokenRows.of_padded(input_ids, attention_mask, width) if request is None else request.rows
        options = {"with_entropy": compute_entropy, "with_router": compute_aux_loss}
        if request is not None and request.limits is not None:
            parts = self._run_chunks(model, rows, request.limits, **options)
        else:
            parts = [self._forward(model, rows.part(part), **options) for part in self._cut(model, rows, batch_size)]
        routers = [part.router for part in parts if part.router is not None]
        aux_loss = None
        if routers:
            experts = experts_per_token(base_model_of(model))
            aux_loss = torch.stack([router.aux_loss(experts) for router in routers]).mean()
        if request is not None and len(parts) == 1:
            request.router = parts[0].router
        logps_S, entropies = torch.cat([part.logps_S for part in parts]), None
        places_2S = rows.places().to(logps_S.device)
        if compute_entropy:
            entropies_S = torch.cat([part.entropies_S for part in parts if part.entropies_S is not None])
            entropies = in_columns(entropies_S, places_2S, len(rows), width)
        return in_columns(logps_S, places_2S, len(rows), width), entropies, aux_loss

    # ---- Forwards -------------------------------------------------------------------------------------------------

    def _cut(self, model: Any, rows: TokenRows, batch_size: int | None, max_tokens: int | None = None) -> list[slice]:
        """Rows in order, in chunks of at most so many completions and tokens."""
        form = self.choice.form(model) if rows.attended_N is None else "padded"
        groups = list(accumulate((not same for same in rows.same_prompt), initial=0))
        sizes = StepSizes(groups, rows.prompts_B, rows.completions_B, self.multiple)
        return cut_in_order(sizes, batch_size or len(rows), max_tokens, form)

    def _run_chunks(
        self, model: Any, rows: TokenRows, limits: tuple[int | None, int | None, int], **options: bool
    ) -> list[LogProbs]:
        """Run a rollout in chunks that fit into memory, canonical units in bitwise mode; see `rollout_log_probs`."""
        batch_size, max_tokens, group_size = limits
        if (unit := self.args.unit_rows) is None:
            chunks = self._cut(model, rows, batch_size, max_tokens)
        else:
            sizes = StepSizes(group_numbers(len(rows), group_size), [], [])
            chunks = [slice(part[0], part[-1] + 1) for part in canonical_units(sizes, range(len(rows)), unit)]

        def work(piece: Sequence[int]) -> LogProbs:
            return self._forward(model, rows.part(slice(piece[0], piece[-1] + 1)), **options)

        # where a forward is a collective, every process runs as many; a process with fewer chunks repeats its last one
        forwards = max_over_processes(len(chunks)) if self.sharded else len(chunks)
        outputs: list[LogProbs] = []
        for number in range(forwards):
            chunk = chunks[min(number, len(chunks) - 1)]
            parts = self.memory.run(range(chunk.start, chunk.stop), work)
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
