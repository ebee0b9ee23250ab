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


def _loop_s() -> float:
    begun_s = time.thread_time()
    total = 0
    for number in range(LOOPS):
        total += number
    return time.thread_time() - begun_s
