"""TRL's shapes, for users' overrides: its padded dictionary, the output of a `rollout_func`.

Used only where a user's hook takes or returns them; without hooks nothing is padded here. Differs from TRL, where a
`rollout_func` that returns too few rows ends in an index error.
"""

from typing import Any

import torch
from accelerate.utils import send_to_device

from ..forward.columns import ADVANTAGES, COMPLETION_MASK, TOOL_MASK
from ..sampling.engine import EngineSettings
from .batch import RolloutBatch, Values
from .images import ImageSource
from .join import Round, token_columns, with_ratios
from .local import LocalRollout


def trl_dictionary(local: LocalRollout, joined: Round, source: ImageSource, settings: EngineSettings) -> dict[str, Any]:
    """TRL's padded dictionary of this process's rows; its stand-ins have advantages of zero."""
    transcripts = local.transcripts
    advantages = joined.advantages_B[joined.local_rows.start : joined.local_rows.stop]
    columns: dict[str, Values] = {ADVANTAGES: advantages if len(advantages) else torch.zeros(len(transcripts))}
    columns.update(token_columns(local, transcripts, with_masked=True))
    whole = with_ratios(columns, local.settings.logprobs.ratios)
    batch = RolloutBatch.of_columns(whole, local.request.num_generations)
    dictionary = batch.collate(settings.pad, settings.multiple)
    masked = torch.tensor(local.settings.sampling.masked(transcripts))
    dictionary[COMPLETION_MASK][masked] = 0
    if TOOL_MASK in dictionary:  # as in TRL, on the padding too
        dictionary[TOOL_MASK][masked] = 0
    dictionary["num_items_in_batch"] = joined.batch.loss_masks.values.sum()
    dictionary = send_to_device(dictionary, settings.device)
    if (images := source.of_transcripts(transcripts)) is not None:
        ids = torch.cat([dictionary["prompt_ids"], dictionary["completion_ids"]], dim=1)
        dictionary |= images.as_trl(ids)
    return dictionary
