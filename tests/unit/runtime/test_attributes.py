"""Attributes that are set for a while are afterwards as before, wherever they came from."""

import pytest

from grpo_ext.runtime.attributes import temporarily_set


class Box:
    of_class = 1

    def __init__(self):
        self.of_object = 2

    @property
    def seven(self):
        return 7

    @seven.setter
    def seven(self, value):
        if value != 7:
            raise ValueError(f"not seven: {value}")


def test_attributes_are_as_before_also_those_of_the_class_and_absent_ones():
    box = Box()
    with temporarily_set(box, of_class=3, of_object=4, absent=5):
        assert (box.of_class, box.of_object, box.absent) == (3, 4, 5)
    assert vars(box) == {"of_object": 2}
    assert box.of_class == 1


def test_where_one_cannot_be_set_those_before_it_are_restored_and_those_after_it_left_alone():
    box = Box()
    with pytest.raises(ValueError, match="not seven: 5"), temporarily_set(box, of_object=4, seven=5, of_class=3):
        pass
    assert vars(box) == {"of_object": 2}
