"""Dynamic sampling: every place has one group, none that teaches is thrown away."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from grpo_ext.algorithms.advantages import fill_places


def test_places_are_filled_in_order():
    places, free = fill_places([[True, False, False, True], [False, True], [True]])
    assert places == [(0, 0), (1, 1), (2, 0), (0, 3)]
    assert free == 0
    assert fill_places([[False, True, False], [True, False]]) == ([(1, 0), (0, 1), (0, 2)], 1)
    assert fill_places([[True, True]]) == ([(0, 0), (0, 1)], 0)


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.lists(st.lists(st.booleans(), max_size=12), max_size=5))
def test_nothing_that_teaches_is_lost_and_nothing_comes_twice(first, later):
    rounds, free = [first], first.count(False)
    for groups in later:
        rounds.append(groups[:free])  # no more than places are free
        free -= rounds[-1].count(True)
    places, left = fill_places(rounds)
    assert left == free
    assert len(places) == len(first)
    assert len(set(places)) == len(places)
    useful = {(number, group) for number, groups in enumerate(rounds) for group, good in enumerate(groups) if good}
    assert useful <= set(places)
    constant = [place for place, source in enumerate(places) if source not in useful]
    assert len(constant) == left
    assert all(places[place] == (0, place) for place in constant)
