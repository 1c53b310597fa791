"""A user's `_get_per_token_logps_and_entropies`: called with rows as TRL's padded tensors, and answered in `super()`.

TRL's signature has no place for rows. So the calls in progress are kept here, of the main thread and of the one that
samples ahead. `super()` runs the rows of a call where it is given the call's tensors unchanged, and any other tensors
as a batch of the user's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..compat import images_among
from ..runtime.transfer import to_device
from .architecture import base_model_of, experts_per_token
from .lm_head import RouterOutput
from .rows import TokenRows, in_columns
from .runner import ForwardLimits, ForwardRunner, MicroBatchScores


class Unchanged:
    """Detects whether tensors were replaced or written to."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._before = [(tensor, tensor._version) for tensor in tensors]

    def are(self, *tensors: torch.Tensor) -> bool:
        pairs = zip(tensors, self._before, strict=True)
        return all(t is before and t._version == version for t, (before, version) in pairs)


def padded_ids_and_mask(inputs: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The (B, L) of prompts and completions, from TRL's dictionary."""
    ids, mask = (torch.cat([inputs[f"prompt_{n}"], inputs[f"completion_{n}"]], dim=1) for n in ("ids", "mask"))
    return ids, mask


@dataclass(eq=False)
class _Call:
    rows: TokenRows  # without padding
    tensors: Unchanged  # the padded ids and attention mask that stand for the rows
    limits: ForwardLimits | None  # for the rows of a rollout; None for a micro-batch
    router: RouterOutput | None = None  # of a MoE model, once `super()` has run the micro-batch


class OverridableRunner(ForwardRunner):
    """Gets log-probabilities from a user's override, where there is one."""

    def __init__(self, *args: Any, override: Callable[[], Callable[..., Any] | None] = lambda: None) -> None:
        super().__init__(*args)
        self.override = override  # returns the user's method, or None
        self._calls: list[_Call] = []  # in progress; shared by the runners of all threads

    def rollout_log_probs(
        self, model: Any, rows: TokenRows, limits: ForwardLimits, record_experts: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if (override := self.override()) is None:
            return super().rollout_log_probs(model, rows, limits, record_experts)
        ids, mask, width = rows.padded(self.multiple)
        images = {} if rows.images is None else rows.images.as_trl(ids)
        ids, mask, images = to_device((ids, mask, images), self.accelerator.device)
        with self._calling(ids, mask, rows, limits):
            logps_BT, _, _ = override(model, ids, mask, width, batch_size=limits.completions, **images)
        return torch.cat([row[:n] for row, n in zip(logps_BT, rows.completions_B, strict=True)]), None

    def micro_batch_log_probs(
        self, model: Any, columns: Mapping[str, Any], rows: TokenRows, with_router: bool
    ) -> MicroBatchScores:
        if (override := self.override()) is None:
            return super().micro_batch_log_probs(model, columns, rows, with_router)
        (ids, mask), width = padded_ids_and_mask(columns), columns["completion_ids"].size(1)
        images = images_among(columns)
        if not images and rows.images is not None:
            images = rows.images.as_trl(ids)
        options: Any = {"compute_entropy": True, "compute_aux_loss": with_router, **images}
        with self._calling(ids, mask, rows) as call:
            logps, entropies, _ = override(model, ids, mask, width, **options)
        return MicroBatchScores(logps, entropies, call.router)

    @contextmanager
    def _calling(
        self, ids: torch.Tensor, mask: torch.Tensor, rows: TokenRows, limits: ForwardLimits | None = None
    ) -> Iterator[_Call]:
        call = _Call(rows, Unchanged(ids, mask), limits)
        self._calls.append(call)
        try:
            yield call
        finally:
            self._calls.remove(call)

    def call_with(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> _Call | None:
        return next((call for call in [*self._calls] if call.tensors.are(input_ids, attention_mask)), None)

    def trl_log_probs(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        width: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """What TRL's `_get_per_token_logps_and_entropies` returns, in forwards of at most `batch_size` completions."""
        if (call := self.call_with(input_ids, attention_mask)) is None:
            name = "_get_per_token_logps_and_entropies"
            self.args.replay.refuse_other_tokens(f"{name} was called with other tensors than it was given")
        rows = TokenRows.of_padded(input_ids, attention_mask, width) if call is None else call.rows
        options = {"with_entropy": compute_entropy, "with_router": compute_aux_loss}
        if call is not None and call.limits is not None:
            parts = self._run_chunks(model, rows, call.limits, **options)
        else:
            parts = [self._forward(model, rows.part(part), **options) for part in self._cut(model, rows, batch_size)]
        routers = [part.router for part in parts if part.router is not None]
        if call is not None and len(parts) == 1:
            call.router = parts[0].router
        aux_loss = None
        if routers:
            experts = experts_per_token(base_model_of(model))
            aux_loss = torch.stack([router.aux_loss(experts) for router in routers]).mean()
        logps_S, entropies = torch.cat([part.logps_S for part in parts]), None
        places_2S = rows.places().to(logps_S.device)
        if compute_entropy:
            entropies_S = torch.cat([part.entropies_S for part in parts if part.entropies_S is not None])
            entropies = in_columns(entropies_S, places_2S, len(rows), width)
        return in_columns(logps_S, places_2S, len(rows), width), entropies, aux_loss
