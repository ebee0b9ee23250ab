"""How far two workers are apart."""

from __future__ import annotations

import pytest

from baton.planner.live_timing import MAX_DISTANCE
from baton.router.fleet.topology import distance


@pytest.mark.parametrize(
    ("one", "other", "levels"),
    [
        ("a/r1/h1", "a/r1/h1", 0),
        ("a/r1/h1", "a/r1/h2", 1),
        ("a/r1/h1", "a/r2/h1", 2),  # the same name in another rack is another host
        ("a/r1/h1", "b/r1/h1", 3),
        ("h1", "h2", 1),
        ("h1", "a/r1/h1", 3),
        ("", "a/r1/h1", 0),  # not known
        ("", "", 0),
        ("1/2/3/4/5/6", "6/5/4/3/2/1", MAX_DISTANCE),
    ],
)
def test_distance_is_the_levels_from_the_first_that_differs(
    one: str, other: str, levels: int
) -> None:
    assert distance(one, other) == distance(other, one) == levels
