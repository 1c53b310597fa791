"""docs/architecture.md has the calls that a run makes."""

import re

from tests.support.forks import python
from tests.support.trace_calls import PAGE


def test_the_listings_of_calls_are_those_of_a_run():
    done = python("-m", "tests.support.trace_calls", "print", timeout_s=300, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr[-2000:]
    page = PAGE.read_text()
    assert done.stdout == page, "run `make docs`, and read what has changed"
    for name in ("training_step", "Rollouts.completions_of", "assemble_loss"):  # the control: each is in a listing
        assert re.sub(rf"\n *{name} .*", "", page) != done.stdout
