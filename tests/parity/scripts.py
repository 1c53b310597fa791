"""Completions that are written down, for stock TRL and grpo_ext alike: a model whose `generate` reads from a script.

The script answers from the tokens of a row and from how often the same tokens came before, so it does not matter in
which batches rows come. `Journal` is where reward functions, tools and environments of a test write what they got.
"""

import copy
import json
import random
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from tests.support.drop_in import conversations
from tests.support.tiny import prompts, tiny_model, tiny_tokenizer, tool

MODEL, TOOL, CALL, END_CALL, EOS = "<model>", "<tool>", "<call>", "</call>", "<eos>"
TEMPLATE = (
    "{% macro text(content) %}{% if content is string %}{{ content }}{% else %}{% for part in content %}"
    "{{ part['text'] }}{% endfor %}{% endif %}{% endmacro %}"
    "{% if style %}({{ style }}){% endif %}{% for tool in tools or [] %}[{{ tool['function']['name'] }}]{% endfor %}"
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<model>{{ text(m['content']) }}"
    "{% for call in m['tool_calls'] or [] %}<call>{{ call | tojson }}</call>{% endfor %}"
    "{% elif m['role'] == 'tool' %}<tool>{{ m['name'] }}:{{ text(m['content']) }}"
    "{% else %}{{ m['role'][0] }}:{{ text(m['content']) }}{% endif %}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<model>{% endif %}"
)
RESPONSES = {
    "defaults": {"role": "assistant"},
    "start_anchor": MODEL,
    "fields": {
        "tool_calls": {"open": CALL, "close": END_CALL, "repeats": True, "content": "json", "transform": "{content}"},
        "content": {"close": EOS, "content": "text"},
    },
}
Reply = Callable[[int, int, str], str]  # (turn, place among rows with the same tokens, text so far) -> what is said


class Journal(list[tuple[str, Any]]):
    """What a test's own functions got: (channel, entry), in order. Entries are copied."""

    trainer: Any = None

    def write(self, channel: str, *entry: Any) -> None:
        """Add an entry; channels are compared one by one."""
        self.append((channel, copy.deepcopy(entry)))

    def of(self, channel: str) -> list[Any]:
        """The entries of a channel, in order."""
        return [entry for name, entry in self if name == channel]


def chat_tokenizer(parses: bool = True) -> Any:
    """One token for each character and mark; the template shows the names of tools."""
    tokenizer = tiny_tokenizer()
    characters = [chr(code) for code in range(33, 127) if chr(code) not in tokenizer.get_vocab()]
    tokenizer.add_tokens([MODEL, TOOL, CALL, END_CALL, *characters])
    tokenizer.chat_template = TEMPLATE
    if parses:
        tokenizer.response_template = RESPONSES
    return tokenizer


def call(name: str, kind: str = "function", **arguments: Any) -> str:
    """A call of a tool, as the model writes it."""
    written = {"type": kind, "function": {"name": name, "arguments": arguments}}
    if kind != "function":
        written["name"] = name
    return CALL + json.dumps(written) + END_CALL


class Script:
    """The `generate` of a model, and the answers of a server."""

    def __init__(self, tokenizer: Any, reply: Reply) -> None:
        self.tokenizer, self.reply = tokenizer, reply
        self._places: Counter[tuple[int, ...]] = Counter()
        self._lock = threading.Lock()

    def ids(self, context: list[int], longest: int) -> list[int]:
        """The new token ids after a context."""
        with self._lock:
            place = self._places[tuple(context)]
            self._places[tuple(context)] += 1
        text = self.tokenizer.decode(context)
        said = self.reply(max(0, text.count(MODEL) - 1), place, text)
        ids = self.tokenizer(said)["input_ids"][:longest]
        goes_on = (
            [] if said.endswith(self.tokenizer.eos_token) else self.tokenizer("z" * (longest - len(ids)))["input_ids"]
        )
        return ids + goes_on

    def __call__(self, input_ids: Any, attention_mask: Any, generation_config: Any, **images: Any) -> torch.Tensor:
        answers = [
            self.ids(row[mask.bool()].tolist(), generation_config.max_new_tokens)
            for row, mask in zip(input_ids, attention_mask)
        ]
        width = max(map(len, answers))
        padded = [answer + [self.tokenizer.pad_token_id] * (width - len(answer)) for answer in answers]
        return torch.cat([input_ids, torch.tensor(padded, device=input_ids.device, dtype=torch.long)], dim=1)


def letters(turn: int, place: int, text: str) -> str:
    """Some letters, of which seven in ten end."""
    source = random.Random(f"{turn}/{place}/{text}")
    return "".join(source.choice("abcdefgh") for _ in range(source.randint(2, 9))) + EOS * (source.random() < 0.7)


def by_turn(*turns: list[str]) -> Reply:
    """Of each turn what is said, by place; the last turn is said again and again."""
    return lambda turn, place, text: turns[min(turn, len(turns) - 1)][place % len(turns[min(turn, len(turns) - 1)])]


def scripted_model(tokenizer: Any, reply: Reply = letters, **config: Any) -> Any:
    """A tiny model that says what is written."""
    model = tiny_model(**{"max_position_embeddings": 4096, "num_hidden_layers": 1, **config})
    with torch.random.fork_rng():
        torch.manual_seed(0)  # of the new embeddings
        model.resize_token_embeddings(len(tokenizer))
    model.generate = Script(tokenizer, reply)
    return model


def tokens_of(output: dict[str, Any], tokenizer: Any) -> list[str]:
    """Prompts and completions of TRL's dictionary as text, padding left out."""
    texts = []
    for side in ("prompt", "completion"):
        rows = zip(output[f"{side}_ids"], output[f"{side}_mask"])
        texts.append([tokenizer.decode(ids[mask.bool()]) for ids, mask in rows])
    return [prompt + completion for prompt, completion in zip(*texts)]


def last_text(completion: Any) -> str:
    """The text of a completion, or of its last message."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def writing_reward(journal: Journal, name: str = "writing") -> Any:
    """A reward function that writes down all it is given, and judges by the letters of the last message."""

    def reward(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        journal.write("reward", name, prompts, completions, entry_of(columns))
        return [0.5 * len(set(last_text(one))) - 0.1 * len(one) for one in completions]

    reward.__name__ = name
    return reward


def entry_of(columns: dict[str, Any]) -> dict[str, Any]:
    """The keywords of a reward function as they can be compared: environments by their number, loggers by name.

    `trainer_state` is there by its step alone: its `num_input_tokens_seen` may lack the rollout that is scored.
    """
    plain = {name: value for name, value in columns.items() if not callable(value)}
    plain["callable"] = sorted(name for name, value in columns.items() if callable(value))
    if "trainer_state" in plain:
        plain["trainer_state"] = plain["trainer_state"].global_step
    if plain.get("environments") is not None:
        plain["environments"] = [(type(one).__name__, one.number) for one in plain["environments"]]
    return plain


def parts_of(journal: Journal, reply: Reply = letters, tokenizer: Any = None, **parts: Any) -> dict[str, Any]:
    """Arguments of a trainer: a model that says what is written, two rows, and a reward that writes down its own."""
    tokenizer = tiny_tokenizer() if tokenizer is None else tokenizer
    return {
        "model": scripted_model(tokenizer, reply),
        "processing_class": tokenizer,
        "train_dataset": prompts(2) if tokenizer.chat_template is None else conversations(2),
        "reward_funcs": writing_reward(journal),
        **parts,
    }


def game(journal: Journal) -> type:
    """An environment with a tool and a reward; a row's `hint` is its observation."""

    class Game:
        def __init__(self) -> None:
            self.number = len(journal.of("made Game"))
            journal.write("made Game", self.number)

        def reset(self, **row: Any) -> Any:
            self.guesses = 0
            journal.write("reset", type(self).__name__, self.number, row)
            return observation(row.get("hint"))

        @tool
        def guess(self, number: int) -> str:
            self.guesses += number
            journal.write("tool", "guess", self.number, number)
            return f"after {self.guesses}"

        def get_reward(self) -> float:
            journal.write("get_reward", type(self).__name__, self.number)
            return float(self.guesses % 5)

    return Game


def shop(journal: Journal) -> type:
    """An environment whose tool and reward are asynchronous; it says nothing at the start."""

    class Shop:
        def __init__(self) -> None:
            self.number = len(journal.of("made Shop"))
            journal.write("made Shop", self.number)

        def reset(self, **row: Any) -> None:
            self.bought: list[str] = []
            journal.write("reset", type(self).__name__, self.number, row)

        async def buy(self, thing: str) -> str:
            """Buy a thing.

            Args:
                thing: What to buy.
            """
            self.bought.append(thing)
            journal.write("async tool", "buy", self.number, thing)
            return f"bought {thing}"

        async def get_reward(self) -> float:
            journal.write("async get_reward", type(self).__name__, self.number)
            return float(len(self.bought))

    return Shop


def observation(hint: str | None) -> Any:
    """What a hint stands for: nothing, a text, or (`*`) parts."""
    if not hint:
        return None
    return [{"type": "text", "text": hint[1:]}] if hint.startswith("*") else hint
