"""What the trainer's tests share."""

import pytest

from tests.support import drop_in


@pytest.fixture
def tool_tokenizer():
    """A tokenizer with a chat template that knows tools."""
    return drop_in.tool_tokenizer()
