"""A round by the user's `_generate_and_score_completions`, which returns the rollout as TRL's dictionary.

Called by `Rollouts` in the place of sampling and join.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from accelerate.logging import get_logger

from ..batching.prompt_order import StepRows
from ..errors import ConfigError, RolloutError
from ..runtime.collectives import together
from .batch import ROW_IMAGES, ROW_NUMBER, RolloutBatch, gather_scored
from .equal_shares import refuse_unequal_shares
from .join import Round
from .local import RolloutSettings
from .overrides import ScoreCall
from .rounds import RoundMaker

logger = get_logger(__name__)


def round_by_user(
    rows: StepRows, settings: RolloutSettings, rounds: RoundMaker, score: Callable[..., dict[str, Any]]
) -> Round:
    """The round that a user's `_generate_and_score_completions` (`score`) makes of these rows; a collective.

    Raises:
        RolloutError: it returned other rows than TRL's method made, where that matters.
    """
    request, worker, args = rows.request, rounds.worker, rounds.view.args
    call = ScoreCall(request)
    with worker.calls.running(call), together("scoring", worker.settings.sharded), rounds.for_users(request):
        scored = score(list(rows.rows))
    batch = gather_scored(scored, 0 if request.empty else len(rows), request.num_generations)
    scored_once = len(call.rounds) == 1 and len(call.rounds[0]) == len(batch)
    if args.dynamic_sampling and settings.sampling.training and not scored_once:
        raise RolloutError(
            f"_generate_and_score_completions returned {len(batch)} completions and called TRL's method "
            f"{len(call.rounds)} time(s), for {sum(map(len, call.rounds))}; dynamic_sampling=True needs the rewards of "
            "what it returns. Call super() once, for the rows that are returned, or set it to False."
        )
    if not call.rounds:  # it did not call TRL's method
        _check_scoring_without_super(rows, args.bitwise_invariant)
        unknown_BF = torch.full((len(batch), len(settings.rewards.functions.names)), torch.nan)
        return Round(batch, unknown_BF, torch.zeros(len(batch)), entries=[], reward_calls=[], local_rows=range(0))
    last = call.rounds[-1]
    if worker.images.prepare is not None:
        batch.columns |= _image_columns(last, batch)
    return dataclasses.replace(last, batch=batch)


def _image_columns(last: Round, batch: RolloutBatch) -> dict[str, Any]:
    """The columns of images of the round that TRL's method made last, where the user's batch has its rows."""
    pairs = zip(last.batch["prompt_ids"], batch["prompt_ids"])
    if len(last) != len(batch) or not all(torch.equal(ids, row[-len(ids) :]) for ids, row in pairs):
        raise RolloutError(
            "_generate_and_score_completions returned other rows of a model that takes images, or in another "
            "order, than TRL's method made last; return one for each of them, in their order."
        )
    return {name: column for name, column in last.batch.columns.items() if name in (ROW_NUMBER, ROW_IMAGES)}


def _check_scoring_without_super(rows: StepRows, bitwise: bool) -> None:
    """Warn that an override without `super()` samples in its own way, or refuse it."""
    what = "_generate_and_score_completions does not call super()"
    if bitwise:
        raise ConfigError(f"{what}, and bitwise_invariant=True needs this trainer's own sampling; turn one off.")
    reason = "a copy of TRL's method takes advantages of other rows where processes have different numbers"
    refuse_unequal_shares(f"{what}: it", 0 if rows.request.empty else len(rows), reason)
    logger.warning_once(
        f"The promise that the split does not matter does not cover this run: {what}, so it may sample in its own "
        "way; only the update is covered."
    )
