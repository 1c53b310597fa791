"""Environments: which instance a row gets, what is added to its prompt, and what cannot be used."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest

from grpo_ext.errors import DataError, RolloutError
from grpo_ext.rollouts.environments import Environments
from grpo_ext.rollouts.transcript import Transcript
from tests.support.tool_runs import Game, Shop

ROW = {"prompt": [{"role": "user", "content": "a"}]}


def transcripts(*rows: dict[str, Any]) -> list[Transcript]:
    return [Transcript(dict(row), key=0) for row in rows]


def test_instances_are_used_again_and_made_only_where_there_are_too_few():
    made = []

    def factory():
        made.append(Game())
        return made[-1]

    environments = Environments({None: factory}, pools={None: [Game()]})
    for rows, instances in ((3, 2), (2, 2), (4, 3)):
        batch = transcripts(*[ROW] * rows)
        environments.begin(batch)
        assert len({id(t.environment) for t in batch}) == rows
        assert len(made) == instances
    assert environments.copy().pools == {None: []}


def test_rows_choose_among_several_environments_and_reset_is_not_told_which():
    told = []

    class Told(Shop):
        def reset(self, **row):
            told.append(sorted(row))
            return super().reset(**row)

    environments = Environments({"game": Game, "shop": Told})
    batch = transcripts({**ROW, "environment": "shop", "size": 2}, {"environment": "game", "size": 3})
    before = copy.deepcopy([t.row for t in batch])
    environments.begin(batch)
    assert [type(t.environment) for t in batch] == [Told, Game]
    assert [t.environment_name for t in batch] == ["shop", "game"]
    assert told == [["prompt", "size"]]
    assert [t.prompt[0]["content"] for t in batch] == ["ashop", " go"]
    assert [t.row for t in batch] == before


def test_a_row_of_an_unknown_environment_is_refused():
    with pytest.raises(DataError, match=r"a row has environment='shp', .* did you mean 'shop'"):
        Environments({"shop": Shop}).begin(transcripts({**ROW, "environment": "shp"}))


@pytest.mark.parametrize(
    ("content", "observation", "merged"),
    [
        ("a", None, "a"),
        ("a", "b", "ab"),
        ("a", [{"type": "image"}], [{"type": "text", "text": "a"}, {"type": "image"}]),
        ([{"type": "image"}], "b", [{"type": "image"}, {"type": "text", "text": "b"}]),
    ],
)
def test_an_observation_is_added_to_the_last_message(content, observation, merged):
    class Says:
        def reset(self, **row):
            return observation

    row = {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": content}]}
    (transcript,) = batch = transcripts(row)
    before = copy.deepcopy(row)
    Environments({None: Says}).begin(batch)
    assert transcript.prompt == [row["prompt"][0], {"role": "user", "content": merged}]
    assert row == before


def test_a_reset_that_hangs_ends_the_run():
    class Slow:
        def reset(self, **row):
            time.sleep(60)

    with pytest.raises(RolloutError, match=r"`reset` of environment Slow: no answer within tool_timeout=0\.1"):
        Environments({None: Slow}).begin(transcripts(ROW), seconds=0.1)


async def later(**row: Any) -> None:
    pass


def raises(**row: Any) -> str:
    return row["missing"]


@pytest.mark.parametrize(
    ("reset", "cause"), [(raises, "KeyError: 'missing'"), (lambda **row: 3, "TypeError"), (later, "TypeError")]
)
@pytest.mark.filterwarnings("ignore:coroutine 'later' was never awaited")
def test_a_reset_that_cannot_be_used_is_named(reset, cause):
    class Broken:
        def __init__(self) -> None:
            self.reset = reset

    with pytest.raises(
        RolloutError, match=rf"`reset` of environment Broken: {cause}.*a list of content parts, or None"
    ):
        Environments({None: Broken}).begin(transcripts(ROW))
