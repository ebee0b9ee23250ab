"""The distance between two workers, from the topology that each states.

    zone-a/rack-7/host-1   zone-a/rack-7/host-1   0: the same host
    zone-a/rack-7/host-1   zone-a/rack-7/host-2   1
    zone-a/rack-7/host-1   zone-a/rack-9/host-5   2
    zone-a/rack-7/host-1   zone-b/rack-1/host-9   3

Pure. What READs take at each distance is learned: see planner/live_timing.py.
"""

from __future__ import annotations

from functools import lru_cache

from baton.planner.live_timing import MAX_DISTANCE

SEPARATOR = "/"


@lru_cache(maxsize=4096)
def _levels(topology: str) -> tuple[str, ...]:
    return tuple(topology.split(SEPARATOR))


def distance(one: str, other: str) -> int:
    """Return the levels from the first that differs, MAX_DISTANCE at most; 0 if either worker
    states no place."""
    if one == other or not one or not other:
        return 0
    ours, theirs = _levels(one), _levels(other)
    same = 0
    for own, peers in zip(ours, theirs, strict=False):
        if own != peers:
            break
        same += 1
    return min(MAX_DISTANCE, max(len(ours), len(theirs)) - same)
