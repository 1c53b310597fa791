"""A reward of your own: one function in a file, named on the command line or in a YAML file.

    accelerate launch recipes/grpo.py --rewards recipes/rewards/example.py:share_in_place

Copy it and write what you want to reward. The rule is in the docstring of the function.
"""

from __future__ import annotations

from typing import Any


def share_in_place(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """The share of characters that stand where the gold answer has them: 1.0 for the answer, 0.5 for half of it.

    A partial credit: unlike a verdict of right or wrong it tells two wrong completions apart.

    Args:
        completions: (B,) what was sampled: a string each, or a list of messages where the prompts are conversations.
        answer: (B,) the column `answer` of the data, one entry for each completion. Any column can be asked for by its
            name.
        columns: the rest: `prompts`, `completion_ids` (tokens) and the other columns of the data.

    Returns:
        (B,) a number for each completion, in their order; None where the reward does not apply.
    """
    texts = [completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions]
    return [
        sum(ours == theirs for ours, theirs in zip(text, gold)) / max(len(text), len(gold), 1)
        for text, gold in zip(texts, answer)
    ]
