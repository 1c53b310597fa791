"""Durations, sizes and counts as people say them."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Seconds: "12 s", "3 min", "2.5 h"."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def memory(size: float) -> str:
    """Bytes, in the largest unit of which there is one: "3.2 MiB"."""
    power = max((n for n in (1, 2, 3) if size >= 1024**n), default=0)
    return f"{size / 1024**power:,.{min(power, 1)}f} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def count(number: float) -> str:
    """A count of parameters: "0.5M", "135M", "7.6B"; below 100,000 as it is."""
    if number < 1e5:
        return f"{number:,.0f}"
    value, unit = (number / 1e9, "B") if number >= 1e9 else (number / 1e6, "M")
    return f"{value:.1f}{unit}" if value < 10 else f"{value:,.0f}{unit}"
