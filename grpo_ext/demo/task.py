"""The demo problem: put three to five letters in order, "dbca>" -> "abcd"; data, reward and settings of the run.

The reward is verified by a program (reinforcement learning with verifiable rewards); held-out words are never trained.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from datasets import Dataset

from ..errors import ConfigError
from ..loading import load_named
from .warm_start import LETTERS, SEPARATOR, VERSION, built_once, train_warm_start

EMBEDDED = "letters"  # the demo's name, as `--demo` takes it
DATA_SEED = 0
WARM_START_WORDS = 8192
TRAIN_PROMPTS = 4096
EVAL_PROMPTS = 256
LENGTH_SHARE = {3: 0.30, 4: 0.32, 5: 0.38}  # number of letters: share of the words
MAX_COMPLETION_LENGTH = 8  # tokens; the longest answer is five letters and the end token


@dataclass(frozen=True)
class DemoTask:
    """The arguments of a trainer: a model with its tokenizer, data with `prompt` and `answer`, reward functions."""

    about: str  # the problem and the initial weights
    model_path: Path | str  # folder or id
    train_dataset: Dataset
    eval_dataset: Dataset
    reward_funcs: list[Callable[..., Any]]  # the first returns 1.0 for right answers


@dataclass(frozen=True)
class Demo:
    """A problem that `--demo` names."""

    # makes or downloads the model once, or takes the id or folder of another model
    load: Callable[[str | None], DemoTask]
    settings: Mapping[str, Any]  # known before anything is loaded: fields of `GRPOConfig`, and `rewards` by name


def sorted_letters_reward(prompts: list[str], completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    """Return 1.0 if the completion is the answer, letter for letter, else 0.0."""
    return [float(completion == gold) for completion, gold in zip(completions, answer)]


def _words(rng: random.Random) -> Iterator[str]:
    """An endless stream of words; short ones repeat, since there are only a few hundred of them."""
    while True:
        length = rng.choices(list(LENGTH_SHARE), list(LENGTH_SHARE.values()))[0]
        yield "".join(rng.sample(LETTERS, length))


def demo_words() -> tuple[list[str], list[str], list[str]]:
    """Return (warm start, train, held out) words, the same on every machine; no held-out word is in the other two."""
    words = _words(random.Random(DATA_SEED))
    held_out: dict[str, None] = {}
    while len(held_out) < EVAL_PROMPTS:
        held_out[next(words)] = None
    others = (word for word in words if word not in held_out)
    warm_start, train = (list(islice(others, count)) for count in (WARM_START_WORDS, TRAIN_PROMPTS))
    return warm_start, train, list(held_out)


def _dataset(words: list[str]) -> Dataset:
    return Dataset.from_dict(
        {"prompt": [word + SEPARATOR for word in words], "answer": ["".join(sorted(word)) for word in words]}
    )


def load_demo() -> DemoTask:
    """Load the demo; the first call builds the model (seconds) and caches it."""
    warm_start, train, held_out = demo_words()
    return DemoTask(
        about='put letters in order ("dbca>" -> "abcd"); a tiny model, warm-started by a careless teacher',
        model_path=built_once(f"demo-{VERSION}", lambda: train_warm_start(warm_start)),
        train_dataset=_dataset(train),
        eval_dataset=_dataset(held_out),
        reward_funcs=[sorted_letters_reward],
    )


def demo_config_defaults() -> dict[str, Any]:
    """Keyword arguments of `grpo_ext.GRPOConfig` for the demo run: 16 prompts of 8 completions per step."""
    return {
        "max_steps": 150,
        "global_batch_size": 128,  # completions, over all processes
        "per_device_train_batch_size": 128,  # completions, per device; any other number learns the same
        "num_generations": 8,
        "max_completion_length": MAX_COMPLETION_LENGTH,
        "learning_rate": 1e-4,
        "lr_scheduler_type": "linear",
        # Adam's first updates have full size whatever the gradient; without a warm-up they can undo the warm start
        "warmup_steps": 10,
        # larger than the rounding noise of a gradient element: Adam's default of 1e-8 moves such an element by a whole
        # learning rate, and in float32 the split then shows
        "adam_epsilon": 1e-6,
        "bf16": False,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "logging_steps": 5,
        "ddp_find_unused_parameters": False,
    }


def demo_named(name: str) -> Demo:
    """The embedded demo, or the `Demo` in a file, `path/to/file.py:name`; a ConfigError if there is none."""
    if name == EMBEDDED:
        reward = f"{__name__}.{sorted_letters_reward.__name__}"
        return Demo(lambda model: load_demo(), {**demo_config_defaults(), "rewards": [reward], "demo": EMBEDDED})
    if ".py:" not in name:
        raise ConfigError(
            f"--demo {name} is not a demo; use {EMBEDDED}, or path/to/file.py:name of a Demo. recipes/grpo.py also "
            "takes sums and last_word."
        )
    return load_named(name, f"--demo {name}", Demo)
