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


def test_a_synchronous_tool_that_hangs_is_left_behind_and_the_model_is_told(caplog):
    release = threading.Event()

    def hang(number):
        release.wait(60)
        return "late"

    names = ("hang", "count", "hang")
    calls = [{"type": "function", "function": {"name": name, "arguments": {"number": 8}}} for name in names]
    transcript = Transcript(key=0, completion=[], calls=calls)
    stand_in = sampled(lambda ids: [])
    toolbox, chat = Toolbox([hang, count], Environments()), Chat(stand_in, stand_in, [count])
    with caplog.at_level(logging.WARNING):
        assert toolbox.answer([transcript], chat, TurnLimits(10**5, seconds=0.1)) == [transcript]
    release.set()
    no_answer = str({"error": "no answer within tool_timeout=0.1 seconds"})
    assert [message["content"] for message in transcript.completion] == [no_answer, "1", no_answer]
    assert (transcript.tool_calls, transcript.tool_failures) == (3, 2)
    assert caplog.text.count("its thread keeps running") == 1


def sleeps(**row: Any) -> None:
    time.sleep(60)


async def later(**row: Any) -> None:
    pass


def raises(**row: Any) -> str:
    return row["missing"]


USABLE = ".*a list of content parts, or None"


@pytest.mark.parametrize(
    ("reset", "says"),
    [
        (sleeps, r"no answer within tool_timeout=0\.1"),
        (raises, f"KeyError: 'missing'{USABLE}"),
        (lambda **row: 3, f"TypeError{USABLE}"),
        (later, f"TypeError{USABLE}"),
    ],
)
@pytest.mark.filterwarnings("ignore:coroutine 'later' was never awaited")
def test_a_reset_that_hangs_or_cannot_be_used_ends_the_run(reset, says):
    class Broken:
        def __init__(self) -> None:
            self.reset = reset

    rows = [Transcript(0, row={"prompt": [{"role": "user", "content": "a"}]})]
    with pytest.raises(RolloutError, match=f"`reset` of environment Broken: {says}"):
        Environments({None: Broken}).begin(rows, seconds=0.1)
