"""Your own reward: one function in a file, named on the command line or in a YAML file.

    accelerate launch recipes/grpo.py --rewards recipes/rewards/example.py:share_in_place

Copy it and write what you want to reward. The function's docstring says what it takes and returns.
"""

from __future__ import annotations

from typing import Any


def share_in_place(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """Return the share of characters that match the gold answer: 1.0 for the answer, 0.5 for half of it.

    Partial credit: unlike right or wrong, it tells two wrong completions apart.

    Args:
        completions: (B,) the completions: strings, or lists of messages if the prompts are conversations.
        answer: (B,) the column `answer` of the data, one entry per completion. Any column is available by its name.
        columns: everything else: `prompts`, `completion_ids` (tokens) and the other columns of the data.

    Returns:
        (B,) a number per completion, in the same order; None if the reward does not apply.
    """
    texts = [completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions]
    return [
        sum(ours == theirs for ours, theirs in zip(text, gold, strict=False)) / max(len(text), len(gold), 1)
        for text, gold in zip(texts, answer, strict=True)
    ]
