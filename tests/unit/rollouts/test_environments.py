"""Environments: rows and `reset` methods that cannot be used; tests/parity compares the others with TRL."""

from __future__ import annotations

import time
from typing import Any

import pytest

from grpo_ext.errors import DataError, RolloutError
from grpo_ext.rollouts.environments import Environments
from grpo_ext.rollouts.transcript import Transcript
from tests.support.tool_runs import Shop

ROW = {"prompt": [{"role": "user", "content": "a"}]}


def transcripts(*rows: dict[str, Any]) -> list[Transcript]:
    return [Transcript(dict(row), key=0) for row in rows]


def test_a_row_of_an_unknown_environment_is_refused():
    with pytest.raises(DataError, match=r"a row has environment='shp', .* did you mean 'shop'"):
        Environments({"shop": Shop}).begin(transcripts({**ROW, "environment": "shp"}))


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
