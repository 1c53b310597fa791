"""What a transcript is made of between two turns: ids of messages and messages of ids."""

import pytest

from grpo_ext.errors import DataError
from grpo_ext.rollouts.chat import Chat
from grpo_ext.rollouts.tools import Environments, Toolbox, TurnLimits
from grpo_ext.rollouts.transcript import Transcript
from tests.support.tiny import tiny_tokenizer
from tests.support.tool_runs import count


def test_a_template_that_writes_calls_again_is_refused():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(DataError, match="renders a call of the tool 'count' differently once its answer follows"):
        Chat(tokenizer, [count]).suffix_ids([{"role": "tool", "name": "count", "content": "3"}])


def test_an_answer_after_a_stop_string_begins_with_the_end_of_the_message():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}<eos>{% endfor %}a:"
    chat, limits = Chat(tokenizer, [count]), TurnLimits(10**4, message_ends={1})
    call = {"type": "function", "function": {"name": "count", "arguments": {"number": 3}}}
    rows = [Transcript({}, key=0, ids=ids, mask=[1, 1], completion=[{}], calls=[call]) for ids in ([5, 1], [5, 6])]
    Toolbox([count], Environments()).answer(rows, chat, limits)
    after_end, after_string = rows
    assert after_end.ids[1] == after_string.ids[2] == 1
    assert after_end.ids[2:] == after_string.ids[3:]
    assert after_string.mask[:4] == [1, 1, 0, 0]
