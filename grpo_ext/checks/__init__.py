"""What is refused before training: models and data that cannot be trained on, or whose update depends on the split.

Differs from TRL: these are found at construction, with the values, the rule and the remedy. `check_trainer` holds what
is checked of a trainer that TRL's constructor has built; the rest can be asked before, or of other objects.
"""

from .ahead import refuse_own_forward
from .data import check_data_sets, check_stream, first_rows, with_rows
from .model import check_end_token, check_model, find_model, loading, refuse_frozen
from .trainer import check_bitwise, check_trainer, refuse_overrides, uncovered_sampling

__all__ = [
    "check_bitwise",
    "check_data_sets",
    "check_end_token",
    "check_model",
    "check_stream",
    "check_trainer",
    "find_model",
    "first_rows",
    "loading",
    "refuse_frozen",
    "refuse_overrides",
    "refuse_own_forward",
    "uncovered_sampling",
    "with_rows",
]
