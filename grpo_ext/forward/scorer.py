"""Log-probabilities of completions under the policy and the reference, at two entry points: a rollout, a micro-batch.

Differs from TRL, where one method serves both: a rollout is scored once, without gradients, in chunks that fit; a
micro-batch is scored in one forward, whose gradients are kept. Called at TRL's `_get_per_token_logps_and_entropies`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator

from ..config import GRPOConfig
from ..runtime.collectives import max_over_processes, shards_parameters
from ..runtime.out_of_memory import Halving
from .attention import packed_attention, runs_packs
from .choice import ForwardChoice
from .chunks import Chunking, score_in_chunks, without_checkpointing
from .packed import read_batch
from .reference import base_model_of

Batch = tuple[torch.Tensor, torch.Tensor, int]  # input_ids (B, L), attention_mask (B, L), completion columns
Scores = tuple[torch.Tensor, "torch.Tensor | None", "torch.Tensor | None"]


class Scorer:
    """Scores completions in TRL's layout: prompts padded on the left, completions on the right.

    Args:
        args: `packed_forward`, `score_completions_only`, `unit_rows` and the arguments of gradient checkpointing.
        multiple: TRL's `pad_to_multiple_of`.
        trl_scorer: TRL's own method, for what the other forwards cannot do.
    """

    def __init__(
        self, accelerator: Accelerator, args: GRPOConfig, multiple: int | None, trl_scorer: Callable[..., Any]
    ) -> None:
        self.accelerator, self.args, self.multiple, self.trl_scorer = accelerator, args, multiple, trl_scorer
        self.sharded = shards_parameters(accelerator)
        may_cut = not (self.sharded or args.bitwise_invariant)
        remedy = "lower max_completion_length, or canonical_unit_size in bitwise mode"
        self.memory = Halving("scoring", remedy, may_cut)
        self.choice = ForwardChoice(
            args.packed_forward, args.score_completions_only, accelerator.device, not self.sharded, multiple
        )

    def packs(self, model: Any) -> bool:
        """Whether the completions of `model` run packed."""
        wrapped = self.accelerator.unwrap_model(model)
        return self.choice.packs(base_model_of(wrapped), wrapped)

    @contextmanager
    def packing(self, model: Any) -> Iterator[None]:
        """Inside, forwards and backwards of `model` run packed where it takes packs."""
        with packed_attention(base_model_of(self.accelerator.unwrap_model(model)), self.packs(model)):
            yield

    @contextmanager
    def without_gradients(self, model: Any) -> Iterator[None]:
        """Inside, `model` scores in its training precision, without gradients and without checkpointing its layers."""
        plain = without_checkpointing(model, self.args.gradient_checkpointing_kwargs)  # type: ignore[arg-type]
        with torch.no_grad(), plain, self.accelerator.autocast():
            yield

    def check_packs(
        self,
        model: Any,
        lengths: tuple[Sequence[int], Sequence[int], Sequence[bool]],
        batch: Callable[[slice], Batch],
        everywhere: bool,
    ) -> None:
        """Before the first pack of a model, compare packed and padded: see `ForwardChoice.check`."""
        wrapped = self.accelerator.unwrap_model(model)
        policy = base_model_of(wrapped)
        if not self.choice.settled(policy):
            self.choice.check(model, policy, wrapped, lengths, batch, everywhere)

    def score_rollout(
        self,
        model: Any,
        batch: Batch,
        batch_size: int,
        max_tokens: int | None,
        group_size: int,
        **options: Any,
    ) -> Scores:
        """Score this process's part of a rollout batch, without gradients; every process comes here together.

        Args:
            batch_size, max_tokens: completions and tokens of a forward, at most.
            group_size: completions per group, which canonical units are cut within.
            options: of TRL's method (`compute_entropy`, `compute_aux_loss`).

        Returns:
            Log-probabilities (B, T), entropies (B, T) or None, mean auxiliary loss or None.
        """
        ids, mask, width = batch

        def align(chunks: int) -> int:  # where every forward is a collective, all make as many
            return max_over_processes(chunks, self.accelerator.device) if self.sharded else chunks

        def some(rows: slice) -> Batch:
            return ids[rows], mask[rows], width

        with self.accelerator.autocast():
            self.check_packs(model, read_batch(*batch), some, everywhere=False)
            unit = self.args.unit_rows
            units = None if unit is None else (group_size, unit)
            chunking = Chunking(self.multiple, max_tokens, self.packs(model), align, units, self.memory)
            return score_in_chunks(self._forward(model), model, chunking, *batch, batch_size, **options)

    def score_micro_batch(self, model: Any, batch: Batch, **options: Any) -> Scores:
        """Score a micro-batch in one forward, whose graph is kept where gradients are on; as `score_rollout`."""
        policy = base_model_of(self.accelerator.unwrap_model(model))
        # a loss that is computed outside the step runs its backward pass where packs are off
        again = torch.is_grad_enabled() and policy.is_gradient_checkpointing and not runs_packs(policy)
        with self.accelerator.autocast():
            chunking = Chunking(self.multiple, None, self.packs(model))
            return score_in_chunks(self._forward(model, again), model, chunking, *batch, **options)

    def _forward(self, model: Any, recomputed_outside: bool = False) -> Callable[..., Any]:
        wrapped = self.accelerator.unwrap_model(model)
        return self.choice.scorer(base_model_of(wrapped), wrapped, self.trl_scorer, recomputed_outside)
