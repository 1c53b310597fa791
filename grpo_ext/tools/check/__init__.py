"""`grpo-ext check`: train the same run on several hardware splits and compare what was learned."""

from .report import CheckReport, Split
from .splits import check, splits_of
from .task import Task

__all__ = ["CheckReport", "Split", "Task", "check", "splits_of"]
