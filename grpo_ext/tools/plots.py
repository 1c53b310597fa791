"""matplotlib's Figure, for the report and the bench; imported when a plot is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import ConfigError


def figure_class(path: Path | None = None) -> Any:
    """matplotlib's Figure: it opens no window, and leaves the caller's own plots alone.

    Args:
        path: a file that a figure is to be written to.

    Raises:
        ConfigError: matplotlib is not installed, or cannot write such a file.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("plots need matplotlib; install it with `pip install 'grpo-ext[plot]'`.") from None
    if path is not None and path.suffix[1:] not in FigureCanvasBase.filetypes:
        raise ConfigError(f"{path} is no plot that can be written; end its name in .png, .svg or .pdf.")
    return Figure
