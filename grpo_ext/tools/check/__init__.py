"""`grpo-ext check`: train the same run on several hardware splits and compare what was learned."""

from .comparison import CheckReport, Split, check

__all__ = ["CheckReport", "Split", "check"]
