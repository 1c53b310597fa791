"""What a transcript is made of between two turns: ids of messages and messages of ids, limits, calls, images."""

from typing import Any

import pytest

from grpo_ext.errors import DataError
from grpo_ext.forward.columns import SAMPLING_LOGPS
from grpo_ext.rollouts.chat import Chat
from grpo_ext.rollouts.tools import Environments, Toolbox, TurnLimits, continue_with
from grpo_ext.rollouts.transcript import Transcript
from grpo_ext.sampling.turn import Turn
from tests.support.tiny import tiny_tokenizer
from tests.support.tool_runs import count, sampled


def test_a_template_that_writes_calls_again_is_refused():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(DataError, match="renders a call of the tool 'count' differently once its answer follows"):
        Chat(tokenizer, tokenizer, [count]).suffix_ids([{"role": "tool", "name": "count", "content": "3"}])


def test_an_answer_after_a_stop_string_begins_with_the_end_of_the_message():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}<eos>{% endfor %}a:"
    chat, limits = Chat(tokenizer, tokenizer, [count]), TurnLimits(10**4, message_ends={1})
    call = {"type": "function", "function": {"name": "count", "arguments": {"number": 3}}}
    rows = [Transcript(key=0, ids=ids, mask=[1, 1], completion=[{}], calls=[call]) for ids in ([5, 1], [5, 6])]
    Toolbox([count], Environments()).answer(rows, chat, limits)
    after_end, after_string = rows
    assert after_end.ids[1] == after_string.ids[2] == 1
    assert after_end.ids[2:] == after_string.ids[3:]
    assert after_string.mask[:4] == [1, 1, 0, 0]


def test_calls_of_kinds_that_end_trls_run_are_answered():
    calls: list[Any] = [{"name": "count"}, {"type": "function"}, {"type": "function", "function": "count"}]
    transcript = Transcript(key=0, ids=[3], mask=[1], completion=[{}], calls=calls)
    stand_in = sampled(lambda ids: [])
    chat = Chat(stand_in, stand_in, [count])
    assert Toolbox([count], Environments()).answer([transcript], chat, TurnLimits(10**4)) == [transcript]
    kinds = [f"Unsupported tool call type: {kind}" for kind in (None, "function", "function")]
    assert [m["content"] for m in transcript.completion[1:]] == [str({"error": text}) for text in kinds]
    assert (transcript.tool_calls, transcript.tool_failures) == (3, 3)


def test_a_turn_without_log_probabilities_has_none():
    transcript = Transcript(key=0, completion=[])
    transcript.add_turn(Turn.of([3], [-1.0]))
    transcript.add_answer([4])
    stand_in = sampled(lambda ids: [])
    continue_with(transcript, Turn([5, 6, 7, 8]), Chat(stand_in, stand_in, [count]), TurnLimits(5))
    assert (transcript.ids, transcript.mask) == ([3, 4, 5, 6, 7], [1, 0, 1, 1, 1])
    assert str(transcript.columns[SAMPLING_LOGPS].tolist()) == "[-1.0, 0.0, nan, nan, nan]"
