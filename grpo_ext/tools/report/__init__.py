"""`grpo-ext report`: a page of curves and settings for a run, or for several side by side."""

from .page import ReportCallback, report

__all__ = ["ReportCallback", "report"]
