"""`grpo-ext check`: train the same run on several hardware splits and compare what was learned."""

from .report import CheckReport, Split
from .splits import check, splits_of

__all__ = ["CheckReport", "Split", "check", "splits_of"]
