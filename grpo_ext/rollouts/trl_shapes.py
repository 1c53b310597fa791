"""TRL's shapes, for users' overrides: its padded dictionary, its tuple of eight, the output of a `rollout_func`.

Used only where a user's hook takes or returns them; without hooks nothing is padded here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import send_to_device

from ..errors import RolloutError
from .batch import SAMPLER_LOGPS, RolloutBatch
from .engine import EngineSettings
from .images import ImageSource
from .join import Round, trl_columns
from .local import LocalRollout
from .token_record import TokenRecord

_GENERATED = 8


def trl_dictionary(local: LocalRollout, joined: Round, source: ImageSource, settings: EngineSettings) -> dict[str, Any]:
    """TRL's padded dictionary of this process's rows, or of its stand-ins, with advantages of zero."""
    transcripts = local.transcripts
    columns = trl_columns(local, transcripts, whole=True)
    advantages = joined.advantages_B[joined.local_rows.start : joined.local_rows.stop]
    columns["advantages"] = advantages if len(advantages) else torch.zeros(len(transcripts))
    batch = RolloutBatch.of_columns(columns, local.request.num_generations)
    dictionary = batch.collate(settings.pad, settings.multiple)
    dictionary.pop(SAMPLER_LOGPS, None)
    if "tool_mask" in dictionary:  # as in TRL, on the padding too
        dictionary["tool_mask"][torch.tensor(local.settings.sampling.masked(transcripts))] = 0
    dictionary["num_items_in_batch"] = joined.batch.loss_masks.values.sum()
    dictionary = send_to_device(dictionary, settings.device)
    if (images := source.of_transcripts(transcripts)) is not None:
        ids = torch.cat([dictionary["prompt_ids"], dictionary["completion_ids"]], dim=1)
        dictionary |= images.as_trl(ids)
    return dictionary


def trl_generated(local: LocalRollout) -> tuple[Any, ...]:
    rows = local.transcripts
    names = ("prompt_ids", "ids", "mask", "completion", "logps")
    prompt_ids, ids, masks, completions, logps = ([getattr(row, name) for row in rows] for name in names)
    images = [row.images or None for row in rows]
    tool_images = [row.images[row.prompt_images :] for row in rows] if local.has_mask else []
    return (
        prompt_ids,
        ids,
        masks if local.has_mask else None,
        completions,
        None if any(row is None for row in logps) else logps,
        local.extra_fields,
        images if any(images) else None,
        tool_images,
    )


def take_generated(local: LocalRollout, generated: Sequence[Any]) -> None:
    """Read what a user's `_generate` returned; a RolloutError unless it is a tuple of eight, for all prompts."""
    if not isinstance(generated, (tuple, list)) or len(generated) != _GENERATED:
        kind = f"{len(generated)} values" if isinstance(generated, (tuple, list)) else type(generated).__name__
        raise RolloutError(f"_generate returned {kind}; return the tuple of {_GENERATED} values that TRL's returns.")
    prompt_ids, ids, masks, completions, logps, extra_fields, images, _ = generated
    rows = local.transcripts
    columns = {"completions": ids, "prompt_ids": prompt_ids, "messages": completions, "masks": masks, "logps": logps}
    columns |= {"images": images, **{name: values for name, values in extra_fields.items() if isinstance(values, list)}}
    for name, values in columns.items():
        if values is not None and len(values) != len(rows):
            raise RolloutError(f"_generate returned {len(values)} {name} for {len(rows)} prompts; return one for each.")
    _fill(local, prompt_ids, ids, masks, logps, extra_fields)
    for place, row in enumerate(rows):
        row.completion = completions[place]
        if images is not None:
            row.images, row.number = list(images[place] or ()), None


def take_rollout(local: LocalRollout, output: Mapping[str, Any]) -> None:
    """Read the dictionary that a `rollout_func` returned; `env_mask` and further fields go where TRL puts them."""
    fields = {name: value for name, value in output.items() if name not in ("prompt_ids", "completion_ids", "logprobs")}
    masks, kept_ids_B = fields.pop("env_mask", None), fields.pop("kept_ids", None)
    _fill(local, output["prompt_ids"], output["completion_ids"], masks, output["logprobs"], fields)
    if local.settings.sampling.replay.masks and kept_ids_B is not None:
        for transcript, kept_ids in zip(local.transcripts, kept_ids_B, strict=True):
            transcript.record = TokenRecord.of_kept(kept_ids, transcript.logps)
    local.extra_fields = fields


def _fill(local: LocalRollout, prompt_ids: Any, ids: Any, masks: Any, logps: Any, fields: Mapping[str, Any]) -> None:
    """Set the tokens of each transcript, and the fields of its row: the entry of a list, or the same value for all."""
    for place, transcript in enumerate(local.transcripts):
        transcript.prompt_ids, transcript.ids = list(prompt_ids[place]), list(ids[place])
        transcript.mask = [1] * len(transcript.ids) if masks is None else list(masks[place])
        transcript.logps = None if logps is None else list(logps[place])
        transcript.record, transcript.experts_NC, transcript.ended = None, None, local.ended(transcript.ids)
        for name, values in fields.items():
            transcript.row[name] = values[place] if isinstance(values, list) else values
    local.has_mask = masks is not None
