"""`grpo-ext report`: a page of curves and completions for a run, or for several side by side."""

from .page import ReportCallback, report

__all__ = ["ReportCallback", "report"]
