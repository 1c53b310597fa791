"""Log-probabilities of completions under the policy and the reference, at two entry points: a rollout, a micro-batch.

Differs from TRL, where one method serves both: a rollout is scored once, without gradients, in chunks that fit; a
micro-batch is scored in one forward, whose gradients are kept. Called at TRL's `_get_per_token_logps_and_entropies`.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator

from ..batching.micro_batches import Form
from ..config import GRPOConfig
from ..runtime.collectives import max_over_processes, shards_parameters
from ..runtime.out_of_memory import Halving
from .architecture import experts_per_token
from .attention import packed_attention, runs_packs
from .choice import ForwardChoice
from .chunks import Chunking, joined, score_in_chunks, without_checkpointing
from .images import RowImages
from .lm_head import RouterRequest, Scores
from .prefix_cache import cached_under_checkpointing, keeps_caches
from .reference import base_model_of
from .rows import TokenRows

# input_ids (B, L), attention_mask (B, L), completion columns, images
Batch = tuple[torch.Tensor, torch.Tensor, int, "RowImages | None"]
# log-probabilities (B, T), entropies (B, T) or None, mean auxiliary loss or None
TrlScores = tuple[torch.Tensor, "torch.Tensor | None", "torch.Tensor | None"]


class Scorer:
    """Scores completions in TRL's layout: prompts padded on the left, completions on the right.

    Args:
        args: `forms`, `score_completions_only`, `unit_rows` and the arguments of gradient checkpointing.
        multiple: TRL's `pad_to_multiple_of`.
        trl_scorer: TRL's own method, for what the other forwards cannot do.
        refused: forms that no model of this run takes, with the reason.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        args: GRPOConfig,
        multiple: int | None,
        trl_scorer: Callable[..., Any],
        refused: Mapping[Form, str] | None = None,
    ) -> None:
        self.accelerator, self.args, self.multiple, self.trl_scorer = accelerator, args, multiple or 1, trl_scorer
        self.sharded = shards_parameters(accelerator)
        may_cut = not (self.sharded or args.bitwise_invariant)
        remedy = "lower max_completion_length, or canonical_unit_size in bitwise mode"
        self.memory = Halving("scoring", remedy, may_cut)
        given: Any = args.gradient_checkpointing_kwargs or {}
        checkpointing = {"use_reentrant": False, **given} if args.gradient_checkpointing else None
        own_head, device = args.score_completions_only, accelerator.device
        self.choice = ForwardChoice(args.forms, own_head, device, not self.sharded, checkpointing, multiple, refused)

    def twin(self, accelerator: Accelerator, trainer: Any) -> Scorer:
        """One for another thread: with an accelerator of its own, and TRL's method of another trainer."""
        scorer = types.MethodType(self.trl_scorer.__func__, trainer)  # type: ignore[attr-defined]
        twin = Scorer(accelerator, self.args, self.multiple, scorer, self.choice.all_refused)
        twin.memory = self.memory
        return twin

    def form(self, model: Any) -> Form:
        """How the completions of `model` run."""
        wrapped = self.accelerator.unwrap_model(model)
        return self.choice.form(base_model_of(wrapped), wrapped)

    def described(self, model: Any) -> str:
        """How the completions of `model` run, and why not in another form, for people."""
        wrapped = self.accelerator.unwrap_model(model)
        return self.choice.described(base_model_of(wrapped), wrapped)

    @contextmanager
    def running(self, model: Any) -> Iterator[None]:
        """Inside, forwards and backwards of `model` run in its form."""
        policy, form = base_model_of(self.accelerator.unwrap_model(model)), self.form(model)
        with packed_attention(policy, form == "packed"), cached_under_checkpointing(policy, form == "prefix"):
            yield

    @contextmanager
    def without_gradients(self, model: Any) -> Iterator[None]:
        """Inside, `model` scores in its training precision, without gradients and without checkpointing its layers."""
        plain = without_checkpointing(model, self.args.gradient_checkpointing_kwargs)  # type: ignore[arg-type]
        with torch.no_grad(), plain, self.accelerator.autocast():
            yield

    def settled(self, model: Any) -> bool:
        """Whether `check` has nothing left to look at."""
        return self.choice.settled(base_model_of(self.accelerator.unwrap_model(model)))

    def check(self, model: Any, rows: TokenRows, everywhere: bool) -> None:
        """Before a model's first pack or shared prefix, compare it with padding: see `ForwardChoice.check`."""
        if not self.settled(model):
            wrapped = self.accelerator.unwrap_model(model)
            self.choice.check(model, base_model_of(wrapped), wrapped, rows, everywhere)

    def score_rollout(
        self,
        model: Any,
        batch: Batch,
        batch_size: int | None,
        max_tokens: int | None,
        group_size: int,
        **options: Any,
    ) -> TrlScores:
        """Score this process's part of a rollout batch, without gradients; every process comes here together.

        Args:
            batch_size, max_tokens: completions and tokens of a forward, at most.
            group_size: completions per group, which canonical units are cut within.
            options: of TRL's method.
        """

        def align(chunks: int) -> int:  # where every forward is a collective, all make as many
            return max_over_processes(chunks, self.accelerator.device) if self.sharded else chunks

        rows = TokenRows.of_padded(*batch)
        with self.accelerator.autocast():
            self.check(model, rows, everywhere=False)
        unit = self.args.unit_rows
        units = None if unit is None else (group_size, unit)
        chunking = Chunking(batch_size, max_tokens, self.form(model), self.multiple, align, units, self.memory)
        return self._score(model, rows, batch[2], chunking, **options)

    def score_micro_batch(self, model: Any, batch: Batch, batch_size: int | None = None, **options: Any) -> TrlScores:
        """Score a micro-batch, in one forward unless `batch_size` cuts it; graphs are kept where gradients are on."""
        chunking = Chunking(batch_size, None, self.form(model), self.multiple)
        return self._score(model, TokenRows.of_padded(*batch), batch[2], chunking, **options)

    def _score(
        self,
        model: Any,
        rows: TokenRows,
        width: int,
        chunking: Chunking,
        compute_entropy: bool = False,
        compute_aux_loss: bool | RouterRequest = False,
    ) -> TrlScores:
        wrapped = self.accelerator.unwrap_model(model)
        policy = base_model_of(wrapped)
        # a loss that is computed outside the step runs its backward pass outside `running`
        inside = runs_packs(policy) if self.form(model) == "packed" else keeps_caches(policy)
        again = torch.is_grad_enabled() and policy.is_gradient_checkpointing and not inside
        forward = self.choice.forward(policy, wrapped, self.trl_scorer, again)

        def score(part: TokenRows) -> Scores:
            return forward(model, policy, part, with_router=bool(compute_aux_loss), with_entropy=compute_entropy)

        with self.accelerator.autocast():
            found = score_in_chunks(score, rows, chunking)
            routers = [scores.router for scores in found if scores.router is not None]
            aux_loss = None
            if isinstance(compute_aux_loss, RouterRequest):
                compute_aux_loss.output = routers[0] if routers else None
            elif routers:
                experts = experts_per_token(policy)
                aux_loss = torch.stack([router.aux_loss(experts) for router in routers]).mean()
            return *joined(found, rows, width), aux_loss
