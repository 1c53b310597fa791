"""One scripted model in TRL's loop over tool calls and in ours, and what differs between the two.

What the model says next is a function of the ids and images before it, so two loops that differ in one token go on
differing. What is called follows from the ids, those before them and the tools a parser is shown.
"""

from __future__ import annotations

import asyncio
import copy
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import trl
from datasets import Dataset

from grpo_ext.rollouts.chat import Chat, images_in
from grpo_ext.rollouts.environments import Environments
from grpo_ext.rollouts.tools import Toolbox
from grpo_ext.rollouts.transcript import Transcript
from grpo_ext.rollouts.turns import TurnLimits, continue_with
from tests.support.drop_in import tool_tokenizer
from tests.support.images import image, image_model, image_processor
from tests.support.tiny import LETTERS, tiny_model, tiny_tokenizer
from tests.support.tool_runs import TEMPLATE, ask, count, fail, refuse, tell, written


class Stop(Exception):
    """Raised after TRL has generated, before it scores."""


def look(number: int) -> list[dict[str, Any]]:
    """Look at an image, or at none.

    Args:
        number: Which image.
    """
    shown = [{"type": "image", "image": image(number % 9, 8 + 8 * (number % 2))}]
    return [*shown * (number % 3), {"type": "text", "text": "seen"}]


def parts(number: int) -> list[Any]:
    """Answer with parts, which show something to a model that takes no images.

    Args:
        number: How many.
    """
    return [{"type": "image", "image": f"picture {number}"}] * (number % 3) + ["no part"]


class Room:
    """An environment that tells how often it was used, and which columns it was shown."""

    def __init__(self) -> None:
        self.resets = self.calls = 0

    def reset(self, size: int = 1, **row: Any) -> Any:
        self.resets, self.calls = self.resets + 1, 0
        text = f" {self.resets} {size} {sorted(row)}"
        return [None, text, [{"type": "text", "text": text}]][size % 3]

    def count(self, number: int) -> str:
        """Count.

        Args:
            number: How far.
        """
        self.calls += 1
        return f"{self.resets} {self.calls} {number % 7}"

    async def ask(self, number: int) -> str:
        """Ask and wait.

        Args:
            number: What for.
        """
        self.calls += 1
        await asyncio.sleep(0.001 * (number % 3))
        return f"is {self.calls}"

    @staticmethod
    def fail(number: int) -> str:
        """Fail.

        Args:
            number: Why.
        """
        raise ValueError(f"no {number % 3}")

    def get_reward(self) -> float:
        return 0.0


class Hall(Room):
    """Another one, with a tool in the place of a standalone one, and an image at the start."""

    def reset(self, **row: Any) -> Any:
        super().reset(**row)
        return [{"type": "image", "image": f"hall {self.resets}"}]

    def tell(self, number: int) -> str:
        """Tell.

        Args:
            number: How long.
        """
        return "hall " * (number % 5)


class Gallery(Room):
    """One that shows images."""

    def reset(self, size: int = 1, **row: Any) -> Any:
        super().reset(size, **row)
        return [{"type": "image", "image": image(size)}] * (size % 3) or " none"

    def look(self, number: int) -> list[dict[str, Any]]:
        """Look at an image.

        Args:
            number: Which image.
        """
        return look(number + self.resets)


def tools_called(source: random.Random, names: list[str]) -> list[dict[str, Any]]:
    """Calls of all kinds."""
    calls = []
    for _ in range(source.choice([0, 1, 1, 2, 3])):
        arguments = source.choice([{"number": source.randrange(20)}] * 6 + [{"numbr": 1}, {}, None, "x", [1]])
        function = {"name": source.choice([*names, "unknown"]), "arguments": arguments}
        kinds = [{"type": "function", "function": function}] * 9
        calls.append(source.choice([*kinds, {"type": "search", "name": "web"}, {"type": "file", "function": function}]))
    return calls


def calling(tokenizer: Any, names: list[str]) -> None:
    """Have a tokenizer find calls in any ids."""

    def parse_response(ids: Any, prefix: Any = None, tools: Any = None) -> dict[str, Any]:
        shown = [tool.__name__ for tool in tools or ()]
        source = random.Random(str((list(ids), prefix, shown)))
        message = {"role": "assistant", "content": tokenizer.decode(ids) + " ".join(shown)}
        calls = tools_called(source, names)
        return message | ({"tool_calls": calls} if calls else {})

    tokenizer.response_template, tokenizer.parse_response = {}, parse_response


SHOWN = "{% if tools is not none %}{% for t in tools or () %}{{ t['function']['name'] }} {% endfor %}:{% endif %}"
NAMES = ["count", "tell", "fail", "ask", "refuse", "parts"]
TEXTS = ["ok", "", written(("count", 3)), written(("ask", 1), ("count", 2), ("tell", 9)), written(("lost", 1)) + "so"]
TEXTS += [written(("fail", 2), ("refuse", 3)), "<tool_call>\n{</tool_call>", '<tool_call>\n{"name": 3}\n</tool_call>']
TEXTS += ['<tool_call>\n{"name": "count", "arguments": {"to": 3}}\n</tool_call>']
TOOLS = [count, tell, fail, ask, refuse, parts]
FACTORIES: dict[str, Any] = {"room": Room, "hall": Hall, "gallery": Gallery}
KINDS: dict[str, dict[str, Any]] = {
    "tools": {"tools": TOOLS},
    "parsed": {"tools": TOOLS},
    "environment": {"tools": [tell, refuse], "environment_factory": Room},
    "environments": {"tools": [count, tell], "environment_factory": {"room": Room, "hall": Hall}},
    "images": {"tools": [look, count]},
    "gallery": {"environment_factory": Gallery},
}
PLAIN = ("texts", "messages")  # without tools
WITH_IMAGES = {"images": "qwen2_5_vl", "gallery": "qwen2_5_vl"}


def processing_class(kind: str) -> Any:
    if kind in WITH_IMAGES:
        processor = image_processor(WITH_IMAGES[kind])
        calling(processor.tokenizer, ["look", "count", "fail", "ask"])
        return processor
    if kind == "parsed":  # by the parser of a family of models
        return tool_tokenizer()
    tokenizer = tiny_tokenizer(chat=True)
    if kind not in PLAIN:
        tokenizer.chat_template = SHOWN + TEMPLATE
        calling(tokenizer, NAMES)
    return tokenizer


def stock_trainer(kind: str, folder: Path) -> trl.GRPOTrainer:
    """TRL's, with the tools and environments of a kind."""
    tokenizer = processing_class(kind)
    model = image_model(WITH_IMAGES[kind]) if kind in WITH_IMAGES else tiny_model()
    if kind not in WITH_IMAGES:
        model.resize_token_embeddings(len(tokenizer))
    prompt = "a" if kind == "texts" else [{"role": "user", "content": "a"}]
    settings: dict[str, Any] = {"bf16": False, "report_to": "none", "use_cpu": True, "gradient_checkpointing": False}
    return trl.GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **kwargs: [0.0] * len(completions),
        args=trl.GRPOConfig(str(folder), per_device_train_batch_size=8, **settings),
        train_dataset=Dataset.from_list([{"prompt": prompt, "environment": "room"}] * 8),
        processing_class=tokenizer,
        **KINDS.get(kind, {}),
    )


def same(images: Any) -> list[Any]:
    """Images as values."""
    return [value if isinstance(value, str) else (value.size, value.tobytes()) for value in images or ()]


@dataclass
class Model:
    """One that says something of its own after everything that it can read."""

    tokenizer: Any
    kind: str
    seed: int
    tells: bool
    heard: list[Any] = field(default_factory=list)

    def __call__(self, prompts: list[list[int]], images: Any) -> tuple[list[list[int]], Any]:
        self.heard.append((copy.deepcopy(prompts), [same(some) for some in images or [None] * len(prompts)]))
        turns, logps = [], []
        for ids, shown in zip(*self.heard[-1]):
            source = random.Random(str((self.seed, ids, shown)))
            if self.kind == "parsed":
                turn = self.tokenizer(source.choice(TEXTS) + source.choice(["x", self.tokenizer.eos_token]))[
                    "input_ids"
                ]
            else:
                fewest = int(len(self.heard) == 1)  # TRL wants a first token of every completion
                turn = self.tokenizer("".join(source.choices(LETTERS, k=source.randint(fewest, 6))))["input_ids"]
            turns.append(turn)
            logps.append([-source.random() for _ in turn])
        return turns, logps if self.tells else None


@dataclass(frozen=True)
class Case:
    """What both loops are run on."""

    rows: list[dict[str, Any]]
    limits: TurnLimits
    seed: int
    tells: bool


def case_of(kind: str, seed: int) -> Case:
    source = random.Random(seed)
    rows: list[dict[str, Any]] = []
    with_images = kind == "images" and source.random() < 0.7
    for number in range(source.randint(1, 6)):
        text = "".join(source.choices(LETTERS, k=source.randint(1, 9)))
        content = [{"type": "text", "text": text}] if source.random() < 0.3 and not with_images else text
        row: dict[str, Any] = {"prompt": [{"role": "user", "content": content}], "size": source.randrange(9)}
        if kind == "texts":
            row["prompt"] = text
        elif kind.startswith("environment") and source.random() < 0.2:
            del row["prompt"]
        if kind == "environments":
            row["environment"] = source.choice(["room", "hall"])
        if with_images:
            row["images"] = [image(number)] * source.randint(1, 2)
        rows.append(row)
    limits = TurnLimits(source.randint(5, 400), source.choice([60, 150, 300, 5000]), source.choice([None, 1, 2, 3, 5]))
    return Case(rows, limits, seed, source.random() < 0.5)


def by_trl(trainer: Any, kind: str, case: Case) -> dict[str, Any]:
    """What TRL's scoring has generated, and its counts."""
    model, seen = Model(trainer._tokenizer, kind, case.seed, case.tells), {}
    limits, config = case.limits, trainer.model.config
    trainer.max_completion_length = limits.max_completion_length
    trainer.max_tool_calling_iterations = 10**9 if limits.max_turns is None else limits.max_turns
    (config.text_config if kind in WITH_IMAGES else config).max_position_embeddings = limits.context
    trainer._generate_single_turn = lambda prompt_ids, images, *args, **kwargs: model(prompt_ids, images)
    metrics = trainer._metrics["train" if trainer.model.training else "eval"]
    metrics.clear()

    def generate(prompts: Any) -> None:
        seen["prompts"], seen["generated"] = prompts, trl.GRPOTrainer._generate(trainer, prompts)
        raise Stop

    trainer._generate = generate
    with pytest.raises(Stop):
        trainer._generate_and_score_completions(copy.deepcopy(case.rows))
    prompt_ids, ids, mask, completions, logps, _, images, tool_images = seen["generated"]
    pools = getattr(trainer, "_environment_pool", {})
    acting = zip(trainer._batch_environments, trainer.environments) if pools else []
    none = [[]] * len(ids)
    return {
        "prompts": seen["prompts"],
        "prompt_ids": prompt_ids,
        "ids": ids,
        "mask": mask if mask is not None else [[1] * len(row) for row in ids],
        "completions": completions,
        "logps": logps,
        "images": [same(some) for some in images or none],
        "tool_images": [same(some) for some in tool_images or none],
        "environments": [(name, pools[name].index(one), one.resets, one.calls) for name, one in acting],
        "calls": metrics.get("tools/call_frequency", [0]),
        "failures": metrics.get("tools/failure_frequency", [0]),
        "heard": model.heard,
    }


@dataclass
class Worker:
    """The parts of a worker, as it is built beside a trainer."""

    chat: Chat
    environments: Environments
    toolbox: Toolbox

    @classmethod
    def beside(cls, trainer: Any) -> Worker:
        factories = trainer.environment_factories
        shown = None if factories is None else trainer._env_tools
        options = (trainer.chat_template, trainer.chat_template_kwargs)
        chat = Chat(trainer.processing_class, trainer.tools, shown, *options)
        environments = Environments(factories, trainer._multi_environment)
        return cls(
            chat, environments, Toolbox(trainer._standalone_tools, environments, vars(trainer).get("async_loop"))
        )


def by_transcripts(worker: Worker, kind: str, case: Case) -> dict[str, Any]:
    """The same of ours."""
    chat, toolbox, limits = worker.chat, worker.toolbox, case.limits
    model = Model(chat.tokenizer, kind, case.seed, case.tells)

    def sample(active: list[Transcript]) -> list[tuple[Transcript, list[int], Any]]:
        ids, logps = model([t.prompt_ids + t.ids for t in active], [t.images for t in active])
        return list(zip(active, ids, logps or [None] * len(ids), strict=True))

    transcripts = [Transcript(row, key=0) for row in copy.deepcopy(case.rows)]
    worker.environments.begin(transcripts)
    for t in transcripts:
        t.prompt = chat.with_images(t.prompt, t.row)
        t.images = images_in(t.prompt)
        t.prompt_images = len(t.images)
    names = [t.environment_name for t in transcripts]
    for t, prompt_ids in zip(transcripts, chat.tokenize([t.prompt for t in transcripts], names), strict=True):
        t.prompt_ids = prompt_ids
    for t, ids, logps in sample(transcripts):
        t.add_sampled(ids, logps)
    chat.decode(transcripts)
    active = transcripts
    while active := toolbox.answer(active, chat, limits):
        for t, ids, logps in sample(active):
            continue_with(t, ids, logps, chat, limits)
    calls, failures = (sum(getattr(t, f"tool_{name}") for t in transcripts) for name in ("calls", "failures"))
    pools, acting = worker.environments.pools, [t for t in transcripts if t.environment is not None]
    return {
        "prompts": [t.prompt for t in transcripts],
        "prompt_ids": [t.prompt_ids for t in transcripts],
        "ids": [t.ids for t in transcripts],
        "mask": [t.mask for t in transcripts],
        "completions": [t.completion for t in transcripts],
        "logps": [t.logps for t in transcripts] if case.tells else None,
        "images": [same(t.images) for t in transcripts],
        "tool_images": [same(t.images[t.prompt_images :]) for t in transcripts],
        "environments": [
            (
                t.environment_name,
                pools[t.environment_name].index(t.environment),
                t.environment.resets,
                t.environment.calls,
            )
            for t in acting
        ],
        "calls": [pytest.approx(calls / len(transcripts))],
        "failures": [pytest.approx(failures / calls if calls else 0.0)],
        "heard": model.heard,
    }


def plain(value: Any) -> Any:
    """A completion or prompt whose images are values."""
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, list):
        return [plain(part) for part in value]
    return same([value])[0] if hasattr(value, "tobytes") else value


def differences(trainer: Any, worker: Worker, kind: str, case: Case, other: Case | None = None) -> list[str]:
    """The names of what differs."""
    theirs, ours = by_trl(trainer, kind, case), by_transcripts(worker, kind, other or case)
    return [name for name in theirs if plain(theirs[name]) != plain(ours[name])]
