"""Where Python looks for reference cycles that nobody holds: not in what a process starts with.

A worker has half a million objects once its modules are loaded. Python looks through all of them
only when a quarter as many have come and stayed, and then stands still for a tenth of a second.
Until that day what requests leave in cycles (gRPC's calls, connections) stays in memory: it looks
like a leak of hours. Set apart, those objects cost no more time, and the search comes as often as
there is something to find. Knows no role; the collector's state is the process's.

That is seldom where little is left in cycles. Meanwhile Python keeps dead tuples for new ones, up
to 2,000 of each length, which looks like a leak; a whole search gives them back. So there is one
a minute, by the clock.
"""

from __future__ import annotations

import asyncio
import gc
import time

LOOK_S = 60.0  # between whole searches
LOOK_SHARE = 1000  # of the time at most one part in so many is theirs
THRESHOLDS = (700, 10, 2)  # new objects, then searches of each younger age; Python's end with 10


def set_apart() -> None:
    """What lives now is never looked through again, until this is called once more: then what
    has died of it meanwhile is freed. Takes a tenth of a second; call it before serving.

    The few that come later cost little to look through, so a whole search comes after about
    20,000 of them instead of 80,000. It also gives back the memory of dead tuples that Python
    keeps for new ones: without it a worker that answers a request a second looks for an hour
    as if it leaked."""
    gc.set_threshold(*THRESHOLDS)
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.collect()  # of nothing, so that Python counts a quarter of nothing


async def look_often() -> None:
    """A whole search through what has come since `set_apart`, every LOOK_S; more rarely where it
    takes long. Runs until it is cancelled."""
    while True:
        began_s = time.perf_counter()
        gc.collect()
        await asyncio.sleep(max(LOOK_S, LOOK_SHARE * (time.perf_counter() - began_s)))
