"""What the parts of one scoring by TRL returned, so that it can be run again without them.

Used by sampling.ahead: the first time beside training and alone, the second time together with the other processes.
"""

from __future__ import annotations

import copy
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..errors import RolloutError

T = TypeVar("T")


@dataclass
class Recording:
    """See the module.

    Attributes:
        again: the scoring is run for the second time.
        prompts: with what the rows' environments have added to them; None without any.
        environments: the names of the rows' environments, as TRL keeps them; None without any.
    """

    again: bool = False
    prompts: list[Any] | None = None
    environments: Any = None
    _making: bool = False
    _kept: dict[str, deque[Any]] = field(default_factory=lambda: defaultdict(deque))

    def of(self, part: str, make: Callable[[], T]) -> T:
        """What `make` returns, or returned the first time that the scoring came to this part."""
        if self._making:  # a later turn: a part of a part
            return make()
        if self.again:
            if not self._kept[part]:
                raise RolloutError(
                    f"the scoring that ran ahead of training made no {part} for this place; an override has called "
                    "TRL's methods another number of times than TRL does. Use rollout_lag=0."
                )
            return self._kept[part].popleft()
        self._making = True
        try:
            made = make()
        finally:
            self._making = False
        self._kept[part].append(copy.deepcopy(made) if part == "turn" else made)  # TRL appends to the lists of a turn
        return made
