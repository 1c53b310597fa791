"""Log-probabilities of completions under the policy and the reference, for a rollout or a micro-batch.

Differs from TRL, where one method serves both: a rollout is scored without gradients, in chunks that fit into memory; a
micro-batch is scored in one forward, with gradients. TRL's `_get_per_token_logps_and_entropies` calls `score_for_trl`
where a user overrides or calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator

from .. import compat
from ..batching.micro_batches import Form, StepSizes, canonical_units, cut_in_order
from ..batching.sizes import group_numbers
from ..config import GRPOConfig
from ..runtime.attributes import assigned
from ..runtime.collectives import max_over_processes, shards_parameters
from ..runtime.out_of_memory import Halving
from .architecture import experts_per_token
from .choice import ForwardChoice
from .forms import in_form, run_rows
from .lm_head import RouterOutput, Scores
from .reference import base_model_of
from .rows import TokenRows, Unchanged, padded_ids_and_mask

# log-probabilities (B, T), entropies (B, T) or None, mean auxiliary loss or None
TrlScores = tuple[torch.Tensor, "torch.Tensor | None", "torch.Tensor | None"]
LogProbs = Callable[..., Any]  # a user's `_get_per_token_logps_and_entropies`


@dataclass
class Request:
    """Rows that go through a user's `_get_per_token_logps_and_entropies` as padded tensors.

    Attributes:
        scorer: the scorer of this thread.
        rows: the rows without padding.
        tensors: ids and attention mask of the padded batch; `rows` are valid for these tensors alone.
        limits: of `score_rollout`, for the rows of a rollout; None for a micro-batch.
        router: the router output of a MoE model, set when the micro-batch is scored.
    """

    scorer: Scorer
    rows: TokenRows
    tensors: Unchanged
    limits: tuple[Any, ...] | None = None
    router: RouterOutput | None = None


_request: ContextVar[Request | None] = ContextVar("request", default=None)  # of this thread


class Scorer:
    """Computes log-probabilities of completions.

    Args:
        args: `forms`, `unit_rows`, `pad_to_multiple_of` and the arguments of gradient checkpointing.
        refused: forms that no model of this run takes, with the reason.
    """

    def __init__(self, accelerator: Accelerator, args: GRPOConfig, refused: Mapping[Form, str] | None = None) -> None:
        self.accelerator, self.args = accelerator, args
        multiple: Any = args.pad_to_multiple_of
        self.multiple: int = multiple or 1
        self.sharded = shards_parameters(accelerator)
        may_cut = not (self.sharded or args.bitwise_invariant)
        remedy = "lower max_completion_length, or canonical_unit_size in bitwise mode"
        self.memory = Halving("computing log-probabilities", remedy, may_cut)
        kwargs: Any = args.gradient_checkpointing_kwargs or {}
        checkpointing = {"use_reentrant": False, **kwargs} if args.gradient_checkpointing else None
        self.choice = ForwardChoice(args.forms, accelerator.device, not self.sharded, checkpointing, refused)
        self._running = False  # whether backward passes run in the form of the model

    def copy(self, accelerator: Accelerator) -> Scorer:
        """A scorer for another thread, with that thread's accelerator."""
        scorer = Scorer(accelerator, self.args, self.choice.all_refused)
        scorer.memory = self.memory
        return scorer

    @property
    def of_this_thread(self) -> Scorer:
        """The scorer of the request that this thread is inside; without a request, this scorer."""
        request = _request.get()
        return self if request is None else request.scorer

    @contextmanager
    def running(self, model: Any) -> Iterator[None]:
        """Inside, forwards and backwards of `model` run in its form."""
        with in_form(base_model_of(model), self.choice.form(model)), assigned(self, _running=True):
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
    def requested(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        rows: TokenRows,
        limits: tuple[int | None, int | None, int] | None = None,
    ) -> Iterator[Request]:
        """Inside, `score_for_trl` of this thread knows the rows of these padded tensors.

        Args:
            limits: of `score_rollout`; None for a micro-batch.
        """
        request = Request(self, rows, Unchanged(input_ids, attention_mask), limits)
        token = _request.set(request)
        try:
            yield request
        finally:
            _request.reset(token)

    def knows(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> bool:
        """Whether these are the tensors of `requested`, unchanged."""
        request = _request.get()
        return request is not None and request.tensors.are(input_ids, attention_mask)

    def score_rollout(
        self, model: Any, rows: TokenRows, batch_size: int | None, max_tokens: int | None, group_size: int
    ) -> torch.Tensor:
        """Log-probabilities (S,) of this process's part of a rollout batch, without gradients; all processes together.

        Args:
            batch_size, max_tokens: completions and tokens of a forward, at most.
            group_size: completions per group, which canonical units are cut within.
        """
        parts = self._score_chunks(model, rows, (batch_size, max_tokens, group_size))
        return torch.cat([scores.logps_S for scores in parts])

    def score_inputs(
        self,
        model: Any,
        inputs: dict[str, Any],
        rows: TokenRows,
        with_router: bool,
        override: LogProbs | None,
    ) -> tuple[torch.Tensor, torch.Tensor, RouterOutput | None]:
        """Score a micro-batch that TRL's loss takes.

        Args:
            inputs: TRL's padded dictionary; rows: its tokens.
            override: the user's `_get_per_token_logps_and_entropies`, which is called as TRL calls it.

        Returns:
            Log-probabilities and entropies (B, T), and the router output of a MoE model.
        """
        width = inputs["completion_ids"].size(1)
        if override is None:
            scores, device = self._forward(model, rows, True, with_router), inputs["completion_ids"].device
            assert scores.entropies_S is not None
            logps, entropies = (rows.to_columns(v, width).to(device) for v in (scores.logps_S, scores.entropies_S))
            return logps, entropies, scores.router
        ids, mask = padded_ids_and_mask(inputs)
        images = compat.images_among(inputs)
        if not images and rows.images is not None:
            images = rows.images.as_trl(ids, rows.prompts_B, ids.size(1) - width)
        options: Any = {"compute_entropy": True, "compute_aux_loss": with_router, **images}
        with self.requested(ids, mask, rows) as request:
            logps, entropies, _ = override(model, ids, mask, width, **options)
        return logps, entropies, request.router

    def score_for_trl(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        width: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
    ) -> TrlScores:
        """Score a padded batch, as `_get_per_token_logps_and_entropies` does, in forwards of `batch_size` rows.

        The tensors of a request are scored through its rows, and the request gets the router output.
        """
        request = _request.get() if self.knows(input_ids, attention_mask) else None
        rows = TokenRows.of_padded(input_ids, attention_mask, width) if request is None else request.rows
        if request is not None and request.limits is not None:
            parts = self._score_chunks(model, rows, request.limits, compute_entropy, compute_aux_loss)
        else:
            chunks = self._cut(model, rows, batch_size)
            parts = [self._forward(model, rows.part(part), compute_entropy, compute_aux_loss) for part in chunks]
        routers = [scores.router for scores in parts if scores.router is not None]
        aux_loss = None
        if routers:
            experts = experts_per_token(base_model_of(model))
            aux_loss = torch.stack([router.aux_loss(experts) for router in routers]).mean()
        if request is not None and len(parts) == 1:
            request.router = parts[0].router
        logps_S, entropies = torch.cat([scores.logps_S for scores in parts]), None
        if compute_entropy:
            entropies_S = torch.cat([scores.entropies_S for scores in parts if scores.entropies_S is not None])
            entropies = rows.to_columns(entropies_S, width)
        return rows.to_columns(logps_S, width), entropies, aux_loss

    # ---- Forwards -------------------------------------------------------------------------------------------------

    def _cut(self, model: Any, rows: TokenRows, batch_size: int | None, max_tokens: int | None = None) -> list[slice]:
        """Rows in order, in chunks of at most so many completions and tokens."""
        form = self.choice.form(model) if rows.attended_N is None else "padded"
        lengths = (list(rows.prompts_B), list(rows.completions_B), list(rows.same_prompt))
        return cut_in_order(*lengths, batch_size or len(rows), max_tokens, form, self.multiple)

    def _score_chunks(
        self,
        model: Any,
        rows: TokenRows,
        limits: tuple[int | None, int | None, int],
        with_entropy: bool = False,
        with_router: bool = False,
    ) -> list[Scores]:
        """Score a rollout in chunks that fit into memory, canonical units in bitwise mode; see `score_rollout`."""
        with self.accelerator.autocast():
            self.choice.check(model, rows)
        batch_size, max_tokens, group_size = limits
        if (unit := self.args.unit_rows) is None:
            chunks = self._cut(model, rows, batch_size, max_tokens)
        else:
            sizes = StepSizes(group_numbers(len(rows), group_size), [], [])
            chunks = [slice(part[0], part[-1] + 1) for part in canonical_units(sizes, range(len(rows)), unit)]

        def work(piece: Sequence[int]) -> Scores:
            return self._forward(model, rows.part(slice(piece[0], piece[-1] + 1)), with_entropy, with_router)

        # where a forward is a collective, every process runs as many; a process with fewer chunks repeats its last one
        forwards = max_over_processes(len(chunks), self.accelerator.device) if self.sharded else len(chunks)
        scores: list[Scores] = []
        for number in range(forwards):
            chunk = chunks[min(number, len(chunks) - 1)]
            parts = self.memory.run(range(chunk.start, chunk.stop), work)
            scores += parts if number < len(chunks) else []
        return scores

    def _forward(self, model: Any, rows: TokenRows, with_entropy: bool, with_router: bool) -> Scores:
        """Score rows in one forward, with gradients where they are on."""
        form = self.choice.form(model)
        # outside `running`, a backward pass under gradient checkpointing would run the layers again in another form
        again = torch.is_grad_enabled() and base_model_of(model).is_gradient_checkpointing and not self._running
        if again or rows.attended_N is not None:
            form = "padded"
        with self.accelerator.autocast():
            return run_rows(
                form, model, rows, with_router=with_router, with_entropy=with_entropy, multiple=self.multiple
            )
