"""Two problems for a real chat model: sums, and an instruction. SmolLM2-135M learns either on two CPU cores.

Like `demo.task`: the reward is a program's verdict, and no training sees the held-out problems.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

from datasets import Dataset

from ..rewards.registry import completion_text, exact_number
from .smollm2 import smollm2
from .task import DATA_SEED, DemoTask, demo_config_defaults

EVAL_PROMPTS = 96
LARGEST = 20  # of the numbers that are added
LIST_PROMPTS = 4096
WORDS = "apple bird bread cat chair cloud dog fish green house light moon music paper river stone sun table tree water"


def sums_task(model: str | None = None) -> DemoTask:
    """Sums of numbers up to 20, such as "What is 7 + 12?"; neither order of a held-out sum is trained.

    `model`: id or folder of another chat model.
    """
    pairs = list(itertools.combinations_with_replacement(range(1, LARGEST + 1), 2))
    random.Random(DATA_SEED).shuffle(pairs)
    both = [order for a, b in pairs for order in dict.fromkeys([(a, b), (b, a)])]
    rows = [(f"What is {a} + {b}?", str(a + b)) for a, b in both]
    train = rows[EVAL_PROMPTS:]
    random.Random(DATA_SEED).shuffle(train)
    source, weights = (model, model) if model else smollm2()
    about = f'sums ("What is 7 + 12?"); {weights}'
    return DemoTask(about, source, _chat(train), _chat(rows[:EVAL_PROMPTS]), [exact_number])


def last_word_reward(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
    """1.0 where the completion is the answer and nothing else, whatever its case and with or without a full stop."""
    return [
        float(completion_text(completion).strip().rstrip(".").lower() == gold)
        for completion, gold in zip(completions, answer)
    ]


def last_word_task(model: str | None = None) -> DemoTask:
    """An instruction that the model does not follow: "Which word is last in this list: ...? Answer with one word."

    `model`: id or folder of another chat model.
    """
    rng = random.Random(DATA_SEED)
    lists = dict.fromkeys(tuple(rng.sample(WORDS.split(), 4)) for _ in range(LIST_PROMPTS))
    rows = [(f"Which word is last in this list: {', '.join(ws)}? Answer with one word.", ws[-1]) for ws in lists]
    source, weights = (model, model) if model else smollm2()
    about = f"an instruction (the last word of a list, and nothing else); {weights}"
    train, held_out = _chat(rows[EVAL_PROMPTS:]), _chat(rows[:EVAL_PROMPTS])
    return DemoTask(about, source, train, held_out, [last_word_reward])


def chat_settings() -> dict[str, Any]:
    """`grpo_ext.GRPOConfig` keyword arguments: 8 prompts of 8 completions per step, found by measurement."""
    return {
        **demo_config_defaults(),
        "max_steps": 40,
        "global_batch_size": 64,  # completions, over all processes
        "per_device_train_batch_size": 64,  # completions, per device; any other number learns the same
        "max_completion_length": 16,
        "learning_rate": 2e-5,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "adam_epsilon": 1e-8,
        "logging_steps": 1,
    }


def _chat(rows: list[tuple[str, str]]) -> Dataset:
    return Dataset.from_dict(
        {"prompt": [[{"role": "user", "content": text}] for text, _ in rows], "answer": [gold for _, gold in rows]}
    )
