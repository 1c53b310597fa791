"""What documents have from the code: the calls that a run makes, and tables of settings (`make docs`)."""

import re

from tests.support import setting_tables
from tests.support.forks import python
from tests.support.trace_calls import PAGE


def test_the_listings_of_calls_are_those_of_a_run():
    done = python("-m", "tests.support.trace_calls", "print", timeout_s=300, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr[-2000:]
    page = PAGE.read_text()
    assert done.stdout == page, "run `make docs`, and read what has changed"
    for name in ("training_step", "Rollouts.completions_of", "assemble_loss"):  # the control: each is in a listing
        assert re.sub(rf"\n *{name} .*", "", page) != done.stdout


def test_the_table_of_settings_is_that_of_the_package(monkeypatch):
    assert setting_tables.written() == setting_tables.PAGE.read_text(), "run `make docs`"
    monkeypatch.setattr(setting_tables, "TABLE", setting_tables.TABLE[1:])  # the control
    assert setting_tables.written() != setting_tables.PAGE.read_text()
