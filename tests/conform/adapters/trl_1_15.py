"""The same trainer of TRL 1.15.0."""

from tests.conform.adapters.trl import ENTRY, NAME, REASONS, VERSION, gradient

__all__ = ["ENTRY", "NAME", "REASONS", "VERSION", "gradient"]
REQUIRES = ("trl==1.15.0",)
