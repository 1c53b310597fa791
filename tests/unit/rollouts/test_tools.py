"""Tools that hang, and environments whose `reset` cannot be used; tests/parity compares the others with TRL."""

import logging
import threading
import time
from typing import Any

import pytest

from grpo_ext.errors import RolloutError
from grpo_ext.rollouts.chat import Chat
from grpo_ext.rollouts.tools import Environments, Toolbox, TurnLimits
from grpo_ext.rollouts.transcript import Transcript
from tests.support.tool_runs import count, sampled

SECONDS = 0.1
LIMITS = TurnLimits(10**5, seconds=SECONDS)
NO_ANSWER = str({"error": f"no answer within tool_timeout={SECONDS} seconds"})


@pytest.fixture(scope="module")
def chat():
    return Chat(sampled(lambda ids: []), [count])


def answered(toolbox: Toolbox, chat: Chat, calls: list[str], environment: Any = None, **arguments: Any) -> Transcript:
    """A transcript whose calls are answered."""
    asked = [
        {"type": "function", "function": {"name": name, "arguments": {"number": 8, **arguments}}} for name in calls
    ]
    transcript = Transcript({}, key=0, completion=[], calls=asked, environment=environment)
    assert toolbox.answer([transcript], chat, LIMITS) == [transcript]
    return transcript


def test_a_synchronous_tool_that_hangs_is_left_behind_and_the_model_is_told(chat, caplog):
    release = threading.Event()

    def hang(number):
        release.wait(60)
        return "late"

    toolbox = Toolbox([hang, count], Environments())
    with caplog.at_level(logging.WARNING):
        transcript = answered(toolbox, chat, ["hang", "count", "hang"])
    release.set()
    assert [message["content"] for message in transcript.completion] == [NO_ANSWER, "1", NO_ANSWER]
    assert (transcript.tool_calls, transcript.tool_failures) == (3, 2)
    assert caplog.text.count("its thread keeps running") == 1


ROW = {"prompt": [{"role": "user", "content": "a"}]}


def transcripts(*rows: dict[str, Any]) -> list[Transcript]:
    return [Transcript(dict(row), key=0) for row in rows]


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
