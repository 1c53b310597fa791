"""The largest differences of two runs that count as rounding, for `grpo-ext check`, `diff`, `rerun` and the tests."""

import math
from typing import Any, TypeGuard

# by what is compared, in float32 and in half precision
ROUNDING = {
    "rewards": (1e-6, 1e-6),  # of the range of their group
    "advantages": (1e-4, 5e-2),
    "optimizer": (1e-6, 1e-6),
    # in half precision those of the first step, of the same weights and completions, differed by up to 2e-3
    "first values": (1e-4, 5e-3),
    "values": (1e-4, 5e-2),
    # of what training has changed. Adam divides a gradient by its own size, so an element whose gradient is rounding
    # noise moves by a whole learning rate: with the default epsilon, updates from equal gradients differ by 1e-5 to
    # 1e-2. In half precision, once a sampled token has changed, by up to 0.33; updates of another seed differ by 1.4
    "weights": (1e-2, 0.5),
    # the first gradient, of the same weights and completions. bfloat16 has 8 bits: when forwards rounded differently,
    # gradients differed by up to 5e-2; most faults cause larger errors (docs/tools.md)
    "gradient": (1e-5, 0.1),
    "gradient again": (1e-2, 1e-2),  # of one step, computed twice: on GPUs kernels add in any order
}
# Float32 has 24 bits, and two orders of summation change a gradient by 1e-7 to 5e-6 of its norm (measured: the demo,
# SmolLM2-135M). The smallest fault that was measured, an entropy bonus that is a mean of means, changes it by 2e-4.
SAME_UPDATE = SAME_GRADIENT = 1e-5  # relative errors of "the same" in the default mode
SAME_LOG = 1e-4  # `relative` difference of a logged value: a float32 sum in another order
# differences are relative to the larger value, which is taken as at least this; 1 for others, whose terms may cancel
LEAST = {"grad_norm": 1e-2, "kl": 1e-2, "entropy": 1e-2, "learning_rate": 1e-12}
# the largest step of Adam for one weight, in learning rates: (1 - 0.9) / sqrt(1 - 0.999) (Kingma and Ba 2015, 2.1)
ADAM_STEP = 3.2


def relative(a: Any, b: Any, least: float = 1.0) -> float:
    """The difference of two values relative to the larger one, or to `least`; two NaN are equal."""
    if a == b or (a != a and b != b):
        return 0.0
    if not is_number(a) or not is_number(b) or math.isnan(a) or math.isnan(b):
        return math.inf
    return abs(a - b) / max(least, abs(a), abs(b))


def is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float)
