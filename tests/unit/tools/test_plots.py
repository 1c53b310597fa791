"""Where a plot cannot be written, the error names the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_ext.errors import ConfigError
from grpo_ext.tools.plots import figure_class


def test_a_file_that_cannot_be_written_is_refused():
    with pytest.raises(ConfigError, match=r"plot.xyz is no plot .* \.png, \.svg or \.pdf"):
        figure_class(Path("plot.xyz"))
