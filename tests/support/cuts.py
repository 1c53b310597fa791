"""Completions cut into rows: each further row has for context all that comes before it, so that nothing else changes.

Turns of this package are cut once they are sampled; what a `rollout_func` returns is cut in its place. The places are
random, by the key of the completion, so that they are the same in every layout.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from grpo_ext.forward.columns import EXPERTS
from grpo_ext.forward.further_rows import FurtherRow
from grpo_ext.rollouts.local import LocalRollout
from grpo_ext.rollouts.transcript import Transcript
from grpo_ext.rollouts.worker import RolloutWorker
from grpo_ext.sampling import returned_rows
from tests.support.tiny import LETTERS

MOST = 6  # rows of a completion
_RUN_TURNS, _CONTINUES = RolloutWorker.run_turns, returned_rows.continues


@dataclass(frozen=True)
class Cuts:
    """How the completions of a run are cut into rows."""

    most: int = MOST  # rows of a completion of this package's own turns; 1: they are not cut
    other_token: bool = False  # the last token of each context is another one: the control
    joins: bool = True  # rows of a `rollout_func` that continue each other become one row


def places_of(seed: object, tokens: int, most: int) -> list[int]:
    """Where further rows begin: up to `most - 1` of the places between the tokens of a completion."""
    source = random.Random(str(seed))
    return sorted(source.sample(range(1, tokens), min(source.randint(1, most) - 1, max(tokens - 1, 0))))


def cut(transcript: Transcript, cuts: Cuts) -> None:
    """Cut a completion of one row; the experts of the tokens that its rows share are there once for each row."""
    prompt, ids = transcript.prompt_ids, transcript.ids
    places = places_of(transcript.key, len(ids), cuts.most)
    contexts = [[*prompt, *ids[:place]] for place in places]
    if cuts.other_token:
        contexts = [[*context[:-1], (context[-1] + 1) % 20 + 3] for context in contexts]
    transcript.further = [FurtherRow(place, context) for place, context in zip(places, contexts, strict=True)]
    if (experts_NC := transcript.columns.get(EXPERTS)) is not None:
        stops = [len(prompt) + stop for stop in (*places, len(ids))]
        transcript.columns[EXPERTS] = torch.cat([experts_NC[:stop] for stop in stops])


def install(cuts: Cuts | None) -> None:
    """Cut what this process samples from now on; None: no longer."""

    def run_turns(worker: RolloutWorker, local: LocalRollout) -> None:
        _RUN_TURNS(worker, local)
        for transcript in local.real_transcripts:
            cut(transcript, cuts)

    cuts_turns = cuts is not None and cuts.most > 1
    RolloutWorker.run_turns = run_turns if cuts_turns else _RUN_TURNS
    returned_rows.continues = (lambda row, earlier: False) if cuts is not None and not cuts.joins else _CONTINUES


@contextmanager
def cutting(cuts: Cuts | None) -> Iterator[None]:
    """Cut what is sampled within."""
    install(cuts)
    try:
        yield
    finally:
        install(None)


@dataclass(frozen=True)
class CutRollouts:
    """A `rollout_func` that returns what another one does, each completion in up to `most` rows."""

    function: Callable[..., dict[str, Any]]
    most: int = MOST
    everywhere: bool = True  # or on the first process alone

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        output = self.function(prompts, trainer)
        most = self.most if self.everywhere or trainer.accelerator.is_main_process else 1
        names = [name for name in ("logprobs", "env_mask", "kept_ids") if output.get(name) is not None]
        rows: dict[str, list[Any]] = {name: [] for name in ("rollout_ids", "prompt_ids", "completion_ids", *names)}
        for number, (prompt, ids) in enumerate(zip(output["prompt_ids"], output["completion_ids"], strict=True)):
            places = places_of((prompt, ids), len(ids), most)
            for start, stop in zip([0, *places], [*places, len(ids)], strict=True):
                rows["rollout_ids"].append(number)
                rows["prompt_ids"].append([*prompt, *ids[:start]])
                for name in ("completion_ids", *names):
                    rows[name].append(output[name][number][start:stop])
        return {**output, **rows}


def token_reward(
    prompts: Sequence[str], completions: Any, completion_ids: Sequence[list[int]], **kw: Any
) -> list[float]:
    """Letters at the beginning of the alphabet less a little per token, by ids: those of all rows."""
    return [float(sum(3 <= i < 3 + len(LETTERS) for i in ids)) - 0.1 * len(ids) for ids in completion_ids]
