"""TRL's shapes, for users' overrides: its padded dictionary, the output of a `rollout_func`.

Used only where a user's hook takes or returns them; without hooks nothing is padded here. Differs from TRL, where a
`rollout_func` that returns too few rows ends in an index error.
"""

from collections.abc import Mapping
from typing import Any

import torch
from accelerate.utils import send_to_device

from ..errors import RolloutError
from ..forward.columns import ADVANTAGES, COMPLETION_MASK, SAMPLER_LOGPS, TOOL_MASK
from ..sampling.engine import EngineSettings
from ..sampling.turn import Turn
from .batch import RolloutBatch, Values
from .images import ImageSource
from .join import Round, token_columns
from .local import LocalRollout

_REQUIRED = ("prompt_ids", "completion_ids", "logprobs")
_REMEDY = (
    "It takes (prompts, trainer) and returns a dictionary with prompt_ids and completion_ids, one list of token ids "
    "for each prompt, and logprobs, one list of numbers for each prompt or None; further lists (env_mask: 1 for each "
    "token of the model, 0 for others) have one entry for each prompt too."
)
_KEPT_REMEDY = (
    " With sampling_mask='replay' it returns kept_ids: for each completion one list of ids for each token, those that "
    "it was sampled from, empty for the whole vocabulary and for tokens of tools."
)


def trl_dictionary(local: LocalRollout, joined: Round, source: ImageSource, settings: EngineSettings) -> dict[str, Any]:
    """TRL's padded dictionary of this process's rows; its stand-ins have advantages of zero."""
    transcripts = local.transcripts
    advantages = joined.advantages_B[joined.local_rows.start : joined.local_rows.stop]
    columns: dict[str, Values] = {ADVANTAGES: advantages if len(advantages) else torch.zeros(len(transcripts))}
    columns.update(token_columns(local, transcripts, with_masked=True))
    batch = RolloutBatch.of_columns(columns, local.request.num_generations)
    dictionary = batch.collate(settings.pad, settings.multiple)
    dictionary.pop(SAMPLER_LOGPS, None)
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


def checked_rollout(output: Any, prompts: int, needs_logprobs: str | None, kept_ids: bool = False) -> dict[str, Any]:
    """What a `rollout_func` returned, in plain numbers; a RolloutError for anything but a rollout.

    It was called with so many prompts, one for each completion. `needs_logprobs` says why log-probabilities are needed;
    None where they are not. With `kept_ids` the ids that each token was sampled from are needed too.
    """
    remedy = _REMEDY + (_KEPT_REMEDY if kept_ids else "")
    if not isinstance(output, Mapping):
        raise RolloutError(f"rollout_func returned a {type(output).__name__} instead of a dictionary. {remedy}")
    missing = [name for name in _REQUIRED if name not in output]
    missing += [name for name in ("prompt_ids", "completion_ids") if output.get(name, ()) is None]
    if missing:
        raise RolloutError(f"rollout_func returned no {', '.join(missing)}. {remedy}")
    if needs_logprobs is not None and output["logprobs"] is None:
        raise RolloutError(f"rollout_func returned logprobs=None, and {needs_logprobs}.")
    rollout = {name: values for name, values in output.items() if name != "env_mask" or values is not None}
    for name in (*_REQUIRED, "env_mask"):
        number = _float_or_none if name == "logprobs" else int
        if rollout.get(name) is not None:
            rollout[name] = [[number(value) for value in row] for row in rollout[name]]
    if kept_ids:
        try:
            rollout["kept_ids"] = [[[int(i) for i in among] for among in row] for row in rollout["kept_ids"]]
        except (KeyError, TypeError, ValueError):
            raise RolloutError(f"rollout_func returned no kept_ids. {remedy}") from None
    for name, values in rollout.items():
        if isinstance(values, list) and len(values) != prompts:
            raise RolloutError(f"rollout_func returned {len(values)} {name} for {prompts} prompts. {remedy}")
    for row, ids in enumerate(rollout["completion_ids"]):
        if not ids or not rollout["prompt_ids"][row]:
            raise RolloutError(f"rollout_func returned no tokens of prompt or completion in row {row}. {remedy}")
        for name in ("logprobs", "env_mask", *(["kept_ids"] if kept_ids else [])):
            values = rollout.get(name)
            if values is not None and len(values[row]) != len(ids):
                raise RolloutError(
                    f"rollout_func returned {len(values[row])} {name} for the {len(ids)} tokens of completion {row}. "
                    f"{remedy}"
                )
        for place, (token, among) in enumerate(zip(ids, rollout["kept_ids"][row] if kept_ids else ())):
            if among and (token not in among or not 0 <= min(among) <= max(among) < 2**31):
                raise RolloutError(
                    f"kept_ids of rollout_func do not contain token {token}, or contain something other than an id, at "
                    f"place {place} of completion {row}. {remedy}"
                )
    return rollout


def _float_or_none(value: Any) -> float | None:  # vLLM does not report all of them
    return None if value is None else float(value)


def take_rollout(local: LocalRollout, output: Mapping[str, Any]) -> None:
    """Read the dictionary that a `rollout_func` returned; `env_mask` and further fields go where TRL puts them."""
    fields = {name: value for name, value in output.items() if name not in ("prompt_ids", "completion_ids", "logprobs")}
    masks, kept_ids_B = fields.pop("env_mask", None), fields.pop("kept_ids", None)
    logps = output["logprobs"]
    for place, transcript in enumerate(local.transcripts):
        transcript.prompt_ids, ids = list(output["prompt_ids"][place]), list(output["completion_ids"][place])
        kept_ids = None if kept_ids_B is None or not local.settings.sampling.replay.masks else kept_ids_B[place]
        transcript.add_turn(Turn.of(ids, None if logps is None else logps[place], kept_ids, local.ended(ids)))
        if masks is not None:
            transcript.mask = list(masks[place])
        for name, values in fields.items():  # the entry of a list, or the same value for all
            transcript.row[name] = values[place] if isinstance(values, list) else values
    local.has_mask = masks is not None
