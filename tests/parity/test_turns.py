"""Turns: which calls are answered, in which order, what fits, and which tokens come of it; as in stock TRL."""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import trl
from datasets import Dataset

import grpo_ext
from tests.parity.harness import GROUP, ROWS, Run, alike, compare, run_one
from tests.parity.scripts import (
    EOS,
    Journal,
    Reply,
    by_turn,
    call,
    chat_tokenizer,
    conversations,
    game,
    parts_of,
    scripted_model,
    shop,
    tokens_of,
)
from tests.support import drop_in
from tests.support.selection import few_of
from tests.support.tiny import stock_scores, tool

pytestmark = stock_scores
LONG = {"max_completion_length": 400}


def written_tool(journal: Journal, name: str, answer: Callable[[int], Any]) -> Callable[..., Any]:
    """A tool that writes down its calls; an asynchronous one where its answer is."""

    def at_once(number: int) -> str:
        journal.write("tool", name, number)
        return answer(number)

    async def later(number: int) -> str:
        journal.write("async tool", name, number)
        return await answer(number)

    function = later if inspect.iscoroutinefunction(answer) else at_once
    function.__name__ = name
    return tool(function)


def fail(number: int) -> str:
    raise ValueError(f"no {number}")


async def ask(number: int) -> str:
    await asyncio.sleep(0.001 * number)
    return f"is {number}"


async def refuse(number: int) -> str:
    raise RuntimeError(f"busy {number}")


ANSWERS: dict[str, Callable[[int], Any]] = {
    "count": lambda number: str(number + 1),
    "tell": lambda number: "a" * number,
    "fail": fail,
    "table": lambda number: {"number": number},  # no text
    "ask": ask,
    "refuse": refuse,
}


def tools(journal: Journal) -> list[Callable[..., Any]]:
    """Tools that answer, at once and later, and that fail."""
    return [written_tool(journal, name, answer) for name, answer in ANSWERS.items()]


def talking(journal: Journal, reply: Reply, **parts: Any) -> dict[str, Any]:
    """What a trainer is given for a talk with tools; what `parse_response` is asked is written down."""
    tokenizer, positions = chat_tokenizer(), parts.pop("positions", 4096)
    parse = tokenizer.parse_response

    def parse_response(ids: Any, **options: Any) -> Any:
        names = [getattr(tool, "__name__", tool) for tool in options.get("tools") or ()]
        journal.write("parsed", list(ids), options.get("prefix"), names)
        return parse(ids, **options)

    tokenizer.parse_response = parse_response
    model = scripted_model(tokenizer, reply, max_position_embeddings=positions)
    return parts_of(journal, reply, tokenizer, **{"model": model, "tools": tools(journal), **parts})


def answers(stock: Run, row: int) -> list[str]:
    """What tools have answered to a completion of stock TRL."""
    return [m["content"] for m in stock.tables[0][1]["completion"][row] if m["role"] == "tool"]


def roles(stock: Run, row: int) -> str:
    """The first letters of the roles of a completion's messages."""
    return "".join(message["role"][0] for message in stock.tables[0][1]["completion"][row])


# what the completions of a prompt say, at most four: the generations of a group
CALLS = {
    "one after text, parallel, unknown": [
        f"plain{EOS}",
        "so " + call("count", number=3) + EOS,
        call("count", number=3) + call("tell", number=2) + call("count", number=1) + EOS,
        call("count", number=3) + call("nobody", number=1) + EOS,
    ],
    "wrong arguments": [f"plain{EOS}", call("count", digits=3) + EOS, call("ask", digits=3) + EOS, call("count") + EOS],
    "failing, unsupported, no text": [
        f"plain{EOS}",
        call("fail", number=3) + call("count", number=1) + call("refuse", number=1) + EOS,
        call("count", kind="code", number=3) + EOS,
        call("table", number=3) + EOS,
    ],
    "asynchronous, types": [
        f"plain{EOS}",
        call("ask", number=9) + call("count", number=1) + call("ask", number=1) + call("tell", number=2) + EOS,
        call("count", number="3") + call("ask", number=True) + call("tell", number=None) + EOS,
    ],
    "malformed, truncated": [
        *("<call>{ count</call>" + EOS, "<call>" + EOS),
        *(call("count", number=3), call("count", number=4)[:40]),
    ],
}


@pytest.mark.parametrize("kinds", few_of(CALLS, ["failing, unsupported, no text"]))
@pytest.mark.parametrize("steps", few_of([1, 2], [1]))
def test_calls_are_answered(tmp_path, kinds, steps):
    reply = by_turn(CALLS[kinds], ["then " + call("count", number=7) + EOS], [f"done{EOS}"])
    stock = alike(tmp_path, lambda journal: talking(journal, reply), steps_per_generation=steps, **LONG)
    assert roles(stock, 0) == "a"
    answered = [bool(answers(stock, row)) for row in range(1, len(CALLS[kinds]))]
    assert all(answered) or kinds == "malformed, truncated"


@pytest.mark.parametrize("turns", few_of([0, 2, None], [0]))
def test_a_transcript_has_at_most_so_many_turns(tmp_path, turns):
    reply = by_turn([call("count", number=1) + EOS, f"no{EOS}"], *[[call("count", number=1) + EOS]] * 3, [f"end{EOS}"])
    stock = alike(tmp_path, lambda journal: talking(journal, reply), max_tool_calling_iterations=turns, **LONG)
    assert len(answers(stock, 0)) == {0: 0, 2: 2, None: 4}[turns]


# `<tool>tell:aaa<eos><model>` follows the call, with as many letters as it asks for
SUFFIX = 8


def telling(letters: int) -> tuple[str, int]:
    """A call of `tell`, and the number of tokens of it with its answer."""
    text = call("tell", number=letters) + EOS
    return text, len(chat_tokenizer()(text)["input_ids"]) + SUFFIX + letters


@pytest.mark.parametrize("room", few_of((-1, 0, 1), (-1, 0)))
def test_an_answer_that_does_not_fit_into_the_completion_is_taken_back(tmp_path, room):
    """With no room left it stays, and the turn after it is empty."""
    text, length = telling(20)
    reply = by_turn([text, f"plain{EOS}"], [f"and {call('count', number=1)}{EOS}"])
    stock = alike(tmp_path, lambda journal: talking(journal, reply), max_completion_length=length + room)
    assert roles(stock, 0) == {-1: "a", 0: "at", 1: "ata"}[room]
    assert len(stock.journal.of("tool")) == GROUP  # it was called nonetheless
    mask = stock.outputs[0][1]["tool_mask"][0]
    assert bool((mask == 0).any()) == (room >= 0)


@pytest.mark.parametrize("room", [0, 1])
def test_an_answer_that_fills_the_context_of_the_model_is_taken_back(tmp_path, room):
    text, length = telling(20)
    reply = by_turn([text, f"plain{EOS}"], [f"b{EOS}"])
    rows = Dataset.from_dict({"prompt": [[{"role": "user", "content": "ab"}]] * 2})
    shown = "".join(f"[{tool.__name__}]" for tool in tools(Journal())) + "u:ab<eos><model>"
    positions = len(chat_tokenizer()(shown)["input_ids"]) + length + room

    def parts(journal: Journal) -> dict[str, Any]:
        return talking(journal, reply, train_dataset=rows, positions=positions)

    stock = alike(tmp_path, parts, max_completion_length=length + 4)
    assert roles(stock, 0) == ("a" if room <= 0 else "ata")


def test_completions_are_read_with_what_stood_before_and_the_tools_of_their_row(tmp_path):
    rows = conversations(2, environment=["game", "shop"])
    reply = by_turn([call("guess", number=1) + EOS, call("buy", thing="x") + EOS, f"a{EOS}"], [f"ok{EOS}"])

    def parts(journal: Journal) -> dict[str, Any]:
        factories = {"game": game(journal), "shop": shop(journal)}
        return talking(journal, reply, train_dataset=rows, tools=tools(journal)[:1], environment_factory=factories)

    stock = alike(tmp_path, parts, **LONG)
    assert {tuple(names) for _, _, names in stock.journal.of("parsed")} == {("count", "guess"), ("count", "buy")}
    assert len(stock.journal.of("parsed")) > ROWS


@pytest.mark.full
def test_a_template_that_trl_knows_renders_and_reads_calls(tmp_path):
    def parts(journal: Journal) -> dict[str, Any]:
        tokenizer = drop_in.tool_tokenizer()
        written = '<tool_call>\n{"name": "count", "arguments": {"number": 3}}\n</tool_call>'
        first = [
            f"<think>\nso\n</think>\n\n{written}<|im_end|>",
            f"{written}\n{written}<|im_end|>",
            "plain<|im_end|>",
            written[:30],
        ]

        def reply(turn: int, place: int, text: str) -> str:
            return "done<|im_end|>" if "<tool_response>\n4" in text else first[place % GROUP]

        return parts_of(journal, reply, tokenizer, tools=tools(journal)[:1])

    stock = alike(tmp_path, parts, max_completion_length=200)
    assert [roles(stock, row) for row in range(GROUP)] == ["ata", "atta", "a", "a"]


def test_asynchronous_functions_share_a_loop(tmp_path):
    """So that a client of a judge or a search, bound to the loop of its first call, serves tools and rewards."""
    rows = conversations(2, environment=["game", "shop"])
    reply = by_turn([call("ask", number=1) + EOS, call("buy", thing="x") + EOS, f"a{EOS}"], [f"b{EOS}"])

    def parts(journal: Journal) -> dict[str, Any]:
        loops: set[Any] = set()

        def note(who: str) -> None:
            loops.add(asyncio.get_running_loop())
            journal.write("loops", who, len(loops))

        @tool
        async def ask(number: int) -> str:
            note("tool")
            return "is"

        async def reward(completions: Any, **columns: Any) -> list[float]:
            note("reward")
            return [float(len(one)) for one in completions]

        factories = {"game": game(journal), "shop": shop(journal)}
        changes = {"train_dataset": rows, "reward_funcs": reward, "environment_factory": factories}
        return talking(journal, reply, tools=[ask], **changes)

    stock = alike(tmp_path, parts, max_steps=2, **LONG)
    assert {who for who, _ in stock.journal.of("loops")} == {"tool", "reward"}


def test_tools_go_on_with_the_completions_of_a_rollout_func(tmp_path):
    reply = by_turn([""], [f"after{EOS}"])

    def parts(journal: Journal) -> dict[str, Any]:
        def rollout(asked: Any, trainer: Any) -> dict[str, Any]:
            tokenizer = trainer.processing_class
            said = [call("count", number=row) if row % 2 else f"a{EOS}" for row in range(len(asked))]
            ids = [tokenizer(text)["input_ids"] for text in said]
            prompts = [tokenizer(f"u:{one[-1]['content']}<eos><model>")["input_ids"] for one in asked]
            return {"prompt_ids": prompts, "completion_ids": ids, "logprobs": None, "row": list(range(len(asked)))}

        return talking(journal, reply, rollout_func=rollout)

    stock = alike(tmp_path, parts, **LONG)
    assert [roles(stock, row) for row in range(3)] == ["a", "ata", "a"]
    assert "after" in tokens_of(stock.outputs[0][1], chat_tokenizer())[1]


def test_another_answer_is_found_to_be_another(tmp_path):
    """The negative control: one letter of one tool's answer."""
    reply = by_turn([call("tell", number=3) + EOS, f"a{EOS}"], [f"done{EOS}"])
    other = by_turn([call("tell", number=4) + EOS, f"a{EOS}"], [f"done{EOS}"])
    stock, one, another = (
        run_one(package, tmp_path / name, lambda journal, text=text: talking(journal, text), **LONG)
        for name, package, text in (("stock", trl, reply), ("one", grpo_ext, reply), ("another", grpo_ext, other))
    )
    assert compare(stock, one) == []
    lines = compare(stock, another)
    for part in ("metrics", "tables", "journal tool", "journal parsed", "journal reward"):
        assert any(line.startswith(part) for line in lines), part
