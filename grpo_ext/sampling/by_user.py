"""Samplers that users bring: a `_generate_single_turn` or a `rollout_func`, called as TRL calls them.

Differs from TRL, where a `rollout_func` that returns too few rows ends in an index error.
"""

import copy
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from accelerate import Accelerator
from transformers import GenerationConfig

from ..batching.sizes import ChunkSizes
from ..errors import RolloutError
from ..forward.columns import ROW
from ..runtime.collectives import uneven_collectives
from .engine import Engine, cut_calls
from .equal_shares import refuse_unequal_shares
from .returned_rows import ReturnedRow, turn_of_rows
from .turn import Context, Turn, images_shown

_REQUIRED = ("prompt_ids", "completion_ids", "logprobs")
_REMEDY = (
    "It takes (prompts, trainer) and returns a dictionary with prompt_ids and completion_ids, one list of token ids "
    "for each prompt, and logprobs, one list of numbers for each prompt or None; further lists (env_mask: 1 for each "
    "token of the model, 0 for others) have one entry for each prompt too. Where a rollout has several rows, "
    "rollout_ids names the prompt of each row, and these lists have an entry for each row."
)
_OF_ROWS = ("prompt_ids", "completion_ids", "logprobs", "env_mask", "kept_ids")
_KEPT_REMEDY = (
    " With sampling_mask='replay' it returns kept_ids: for each completion one list of ids for each token, those that "
    "it was sampled from, empty for the whole vocabulary and for tokens of tools."
)


@dataclass
class TurnRows:
    """The rows of a user's `_generate_single_turn`; `multimodal_fields` has it, and hands it on to TRL's method.

    The override may call `super()` with other tokens, or several times: row i keeps the key of its place; further rows,
    and further calls, draw other random numbers.
    """

    chunk: list[Context]
    config: GenerationConfig | None
    sizes: ChunkSizes
    made: list[Turn] = field(default_factory=list, init=False)  # by TRL's method
    calls: Iterator[int] = field(default_factory=itertools.count, init=False)  # numbers its calls


@dataclass(frozen=True)
class UserTurns(Engine):
    function: Callable[..., Any]  # `_generate_single_turn`
    accelerator: Accelerator
    sharded: bool  # a forward is a collective, so the chunks of a process are one call
    # whether a row ended, by its ids, for rows that TRL's method made in a rollout batch
    ends: dict[tuple[int, ...], bool | None] = field(default_factory=dict, init=False)

    def generate(self, rows: Sequence[Context], config: GenerationConfig | None, sizes: ChunkSizes) -> list[Turn]:
        sampled = dict[int, Turn]()
        for indices in [range(len(rows))] if self.sharded else cut_calls(rows, sizes):
            chunk = [rows[index] for index in indices]
            options = {"num_generations": 1, "has_tool_images": any(len(r.images) > r.prompt_images for r in chunk)}
            of_turn = TurnRows(chunk, config, sizes)
            arguments: tuple[Any, ...] = ([row.all_ids for row in chunk], images_shown(chunk), {ROW: of_turn})
            with uneven_collectives(self.accelerator, refused_in="_generate_single_turn"):
                first = not chunk[0].turns
                ids, logps = self.function(*arguments, sizes.group) if first else self.function(*arguments, **options)
            if len(ids) != len(chunk):
                raise RolloutError(
                    f"_generate_single_turn returned {len(ids)} completions for {len(chunk)} prompts; return one each."
                )
            self.ends.update({tuple(turn.ids): turn.ended for turn in of_turn.made})
            logps_B: Sequence[Any] = [None] * len(ids) if logps is None else logps
            for index, tokens, values in zip(indices, ids, logps_B, strict=True):
                if values is not None and len(values) != len(tokens):
                    raise RolloutError(
                        f"_generate_single_turn returned {len(values)} log-probabilities for {len(tokens)} tokens of a "
                        "completion; return one for each token, or None."
                    )
                sampled[index] = Turn.of(tokens, values, ended=self.ends.get(tuple(tokens)))
        return [sampled[index] for index in range(len(rows))]


@dataclass(frozen=True)
class UserRollouts(Engine):
    function: Callable[[list[Any]], Any]  # `rollout_func`, given the trainer
    unequal: str | None  # why processes need the same number of rows, as a clause
    needs_logps: str | None  # why log-probabilities are needed, as a clause
    kept_ids: bool  # the ids that each token was sampled from are needed too
    one_row: str | None  # why a rollout has one row, as a clause; None where it may have several

    def generate(self, rows: Sequence[Context], config: GenerationConfig | None, sizes: ChunkSizes) -> list[Turn]:
        """Whole completions, which may have tokens of others than the model, and fields for the rows."""
        if self.unequal is not None:
            refuse_unequal_shares("rollout_func", len(rows), self.unequal)
        prompts = copy.deepcopy([row.prompt for row in rows])  # its loop of turns may append to its prompts
        output = checked_rollout(self.function(prompts), len(rows), self.needs_logps, self.kept_ids)
        several = "rollout_ids" in output
        places: list[int] = output.pop("rollout_ids", [*range(len(rows))])
        named = {name: output.pop(name, None) for name in _OF_ROWS}
        named["kept_ids"] = named["kept_ids"] if self.kept_ids else None
        columns: list[list[Any]] = [[None] * len(places) if column is None else column for column in named.values()]
        rollouts: list[list[ReturnedRow]] = [[] for _ in rows]
        for place, *row in zip(places, *columns, strict=True):
            rollouts[place].append(ReturnedRow(*row))
        turns = []
        for place, of_rollout in enumerate(rollouts):
            turn = turn_of_rows(of_rollout) if several else of_rollout[0].turn()
            if turn.further and self.one_row is not None:
                raise RolloutError(
                    f"rollout_func returned rows of prompt {place} that do not continue each other, and {self.one_row}."
                )
            # the entry of a list, or the same value for all
            fields = {name: v[place] if isinstance(v, list) else v for name, v in output.items()}
            turns.append(replace(turn, fields=fields))
        return turns


def checked_rollout(output: Any, prompts: int, needs_logprobs: str | None, kept_ids: bool) -> dict[str, Any]:
    """What a `rollout_func` returned, in plain numbers; a RolloutError for anything but rollouts.

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
    optional = ("env_mask", "rollout_ids")
    rollout = {name: values for name, values in output.items() if name not in optional or values is not None}
    named = [name for name in (*_REQUIRED, "env_mask") if rollout.get(name) is not None]
    for name in (*named, *(["kept_ids"] if kept_ids else [])):
        number = {"logprobs": _float_or_none, "kept_ids": _ids}.get(name, int)
        try:
            rollout[name] = [[number(value) for value in row] for row in rollout[name]]
        except (KeyError, TypeError, ValueError):
            raise RolloutError(
                f"rollout_func returned no {name}, or an entry that is not a list of numbers. {remedy}"
            ) from None
    several, rows = "rollout_ids" in rollout, prompts
    if several:
        rollout["rollout_ids"] = _rollout_ids(rollout["rollout_ids"], prompts, remedy)
        rows = len(rollout["rollout_ids"])
    for name, values in rollout.items():
        of_rows = name in (*_OF_ROWS, "rollout_ids")
        count, what = (rows, "rows of rollout_ids") if several and of_rows else (prompts, "prompts")
        if isinstance(values, list) and len(values) != count:
            raise RolloutError(f"rollout_func returned {len(values)} {name} for {count} {what}. {remedy}")
    _check_rows(rollout, several, kept_ids, remedy)
    return rollout


def _check_rows(rollout: Mapping[str, Any], several: bool, kept_ids: bool, remedy: str) -> None:
    for row, ids in enumerate(rollout["completion_ids"]):
        if not rollout["prompt_ids"][row] or not (ids or several):  # a rollout may have further rows
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


def _rollout_ids(values: Any, prompts: int, remedy: str) -> list[int]:
    try:
        places = [operator.index(value) for value in values]
    except (TypeError, ValueError):
        places = []
    if not places or not {*places} <= {*range(prompts)}:
        raise RolloutError(
            f"rollout_func returned rollout_ids={values!r}; it has, for each returned row, the number of its prompt, "
            f"from 0 to {prompts - 1}. {remedy}"
        )
    if missing := sorted({*range(prompts)} - {*places}):
        raise RolloutError(f"rollout_func returned no row of the prompts {missing}; each needs at least one. {remedy}")
    return places


def _ids(among: Any) -> list[int]:
    return [int(i) for i in among]


def _float_or_none(value: Any) -> float | None:  # vLLM does not report all of them
    return None if value is None else float(value)
