"""Refusals before training: models and data that cannot be trained on, or whose update depends on the split.

Differs from TRL: the errors come at construction, with the values, the rule and the remedy. A trainer is checked before
TRL's constructor (`check_arguments`), after it (`check_trainer`) and before training (`warn_before_training`).
"""

from .model import find_model, refuse_frozen
from .trainer import check_arguments, check_trainer, warn_before_training

__all__ = [
    "check_arguments",
    "check_trainer",
    "find_model",
    "refuse_frozen",
    "warn_before_training",
]
