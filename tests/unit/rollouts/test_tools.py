"""Tools that hang: the model is told, and an environment whose call has not come back is used no more."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

from grpo_ext.rollouts.chat import Chat
from grpo_ext.rollouts.environments import Environments
from grpo_ext.rollouts.tools import Toolbox, TurnLimits
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
    assert caplog.text.count("its thread is left behind") == 1
