"""The planted faults (tests/support/faults.py) are still there to plant: their texts and the tests that catch them."""

import pytest

from tests.support.faults import FAULTS, ROOT


@pytest.mark.parametrize("number", range(len(FAULTS)), ids=lambda number: f"{number}-{FAULTS[number].path}")
def test_the_text_of_a_planted_fault_occurs_once_and_its_tests_exist(number):
    fault = FAULTS[number]
    assert (ROOT / "grpo_ext" / fault.path).read_text().count(fault.before) == 1
    assert fault.before != fault.after
    assert (ROOT / fault.tests.split()[0]).exists()
