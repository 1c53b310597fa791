"""What the package logs: shown by default, silenced like any logger, never twice."""

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from accelerate.state import PartialState

from grpo_ext.runtime.messages import logger, show_messages


@contextmanager
def unconfigured() -> Iterator[None]:
    """Inside, logging is as in a program that has not configured it."""
    package, handlers = logging.getLogger("grpo_ext"), (logging.root.handlers, logging.getLogger("grpo_ext").handlers)
    level, logging.root.handlers, package.handlers = package.level, [], []
    package.setLevel(logging.NOTSET)
    try:
        yield
    finally:
        logging.root.handlers, package.handlers = handlers
        package.setLevel(level)


def log() -> None:
    PartialState()  # Accelerate's loggers ask it for the process
    logger.info("the plan")
    logger.warning("a problem")


ONCE = "grpo_ext test_messages: [RANK 0] the plan\ngrpo_ext test_messages: [RANK 0] a problem\n"


@pytest.mark.parametrize(
    ("level", "configure", "shown"),
    [
        (logging.NOTSET, False, ("the plan\n", "a problem\n")),
        (logging.WARNING, False, ("", "a problem\n")),  # a level that the user has set stays
        (logging.NOTSET, True, ("", ONCE)),  # a program that configures logging after the trainer was built
    ],
)
def test_messages_go_to_standard_output_and_warnings_to_standard_error(capsys, level, configure, shown):
    with unconfigured():
        logging.getLogger("grpo_ext").setLevel(level)
        show_messages()
        show_messages()  # another trainer
        if configure:
            logging.basicConfig(format="%(name)s %(module)s: %(message)s")
        log()
    assert capsys.readouterr() == shown


@pytest.mark.parametrize("console", ["closed", "none"])
def test_a_run_goes_on_without_a_console(monkeypatch, console):
    stream = None if console == "none" else io.StringIO()
    if stream is not None:
        stream.close()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    with unconfigured():
        show_messages()
        log()
