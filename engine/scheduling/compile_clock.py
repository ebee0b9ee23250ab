"""How long this process has been compiling kernels: what the time of a step is judged without.

Numba and Triton compile at the first call with new types or constants, which may be the thousandth
step. They tell when they begin and when they are done; `clock` adds up what lies between. Times
of two threads that compile at once count once. Knows no step. Any thread may call everything here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any


class CompileClock:
    """`seconds` so far, which grow while something is being compiled."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._lock = threading.Lock()
        self._under_way = 0
        self._since_s = 0.0
        self._over_s = 0.0

    def begin(self) -> None:
        with self._lock:
            self._under_way += 1
            if self._under_way == 1:
                self._since_s = self._now_s()

    def end(self) -> None:
        """Of one that began; a word too many is none."""
        with self._lock:
            if self._under_way == 1:
                self._over_s += self._now_s() - self._since_s
            self._under_way = max(0, self._under_way - 1)

    def give_up(self) -> None:
        """Nothing is being compiled any more: what was has failed, and nobody told the end."""
        with self._lock:
            if self._under_way:
                self._over_s += self._now_s() - self._since_s
            self._under_way = 0

    def seconds(self) -> float:
        with self._lock:
            going_s = self._now_s() - self._since_s if self._under_way else 0.0
            return self._over_s + going_s


clock = CompileClock()


def watch_numba() -> None:
    """From now on `clock` hears of Numba. To be called once, by who needs numba anyway."""
    events: Any = import_module("numba.core.event")

    class Hearing(events.Listener):  # type: ignore[misc]  # numba has no types
        def on_start(self, event: object) -> None:
            clock.begin()

        def on_end(self, event: object) -> None:
            clock.end()

    events.register("numba:compile", Hearing())


def watch_triton() -> None:
    """Likewise of Triton, which does not tell the end of what fails: see `give_up`."""
    runtime: Any = import_module("triton").knobs.runtime

    def began(**_: object) -> bool:
        clock.begin()
        return False  # go on, and compile

    def ended(**_: object) -> bool:
        clock.end()
        return False

    runtime.jit_cache_hook, runtime.jit_post_compile_hook = began, ended
