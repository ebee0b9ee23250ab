"""How slow this machine is, for limits that were set on another one."""

from __future__ import annotations

import time
from functools import cache
from statistics import median

LOOPS = 100_000
USUAL_S = 0.004  # of so many, on the processors where the limits were set


@cache
def slowness() -> float:
    """Return how many times longer a loop of Python takes here than where limits of seconds were
    set, 1 at least. A limit on what processors have to do is multiplied by it; one on a timer of
    the product is not. Other processes do not change it: only the thread's own time counts."""
    return max(1.0, median(_loop_s() for _ in range(5)) / USUAL_S)


def timers(*, lease_s: float = 2.0, silence_s: float = 2.5) -> tuple[str, str]:
    """Return settings of real processes: timers of the product that end only where processors are
    too slow for them, so that what the test does to a process is what ends a lease or a link."""
    lease_s, silence_s = (min(seconds * slowness(), 60.0) for seconds in (lease_s, silence_s))
    return f"handoff.lease_s={lease_s:.1f}", f"router.link_silence_s={silence_s:.1f}"


def _loop_s() -> float:
    begun_s = time.thread_time()
    total = 0
    for number in range(LOOPS):
        total += number
    return time.thread_time() - begun_s
