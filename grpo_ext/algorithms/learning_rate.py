"""What another global batch means for the learning rate: said wherever two runs differ in it, never applied silently.

The layout (micro-batch, accumulation, processes) needs no such help; the global batch is part of the algorithm.
"""

from __future__ import annotations

import math


def scaled_learning_rates(learning_rate: float, old_batch: int, new_batch: int) -> tuple[float, float]:
    """The learning rate after linear and square-root scaling from `old_batch` to `new_batch` completions per step.

    Linear: Goyal et al., arXiv 1706.02677; square root, for Adam: Malladi et al., arXiv 2205.10330.
    """
    ratio = new_batch / old_batch
    return learning_rate * ratio, learning_rate * math.sqrt(ratio)


def global_batch_advice(learning_rate: float, old_batch: int, new_batch: int) -> str:
    """What a change of the global batch means, in sentences; `learning_rate` is the one that went with `old_batch`."""
    linear, root = scaled_learning_rates(learning_rate, old_batch, new_batch)
    ratio = new_batch / old_batch
    return (
        f"global_batch_size {old_batch} -> {new_batch}: a step averages over {ratio:.3g} times the completions, and an "
        f"epoch has {1 / ratio:.3g} times the steps. This changes the algorithm, unlike the micro-batch size or the "
        f"number of processes. Usual choices for what was learning_rate={learning_rate:g}: {root:.3g} (square root, "
        f"for Adam) or {linear:.3g} (linear, for SGD). Nothing is changed for you."
    )
