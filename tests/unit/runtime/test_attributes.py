"""Attributes that are set for a while are afterwards as before, wherever they came from."""

from grpo_ext.runtime.attributes import temporarily_set


class Box:
    of_class = 1

    def __init__(self):
        self.of_object = 2


def test_attributes_are_as_before_also_those_of_the_class_and_absent_ones():
    box = Box()
    with temporarily_set(box, of_class=3, of_object=4, absent=5):
        assert (box.of_class, box.of_object, box.absent) == (3, 4, 5)
    assert vars(box) == {"of_object": 2}
    assert box.of_class == 1
