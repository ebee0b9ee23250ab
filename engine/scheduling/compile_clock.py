"""The time that this process has spent compiling kernels, which is excluded from step times.

Numba and Triton compile at the first call with new types or constants, which may be the thousandth
step. Both report the begin and the end of a compilation; `clock` adds up the time in between. Two
threads that compile at once count once. Knows no step. Every function here is thread-safe.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any


class CompileClock:
    """Counts compilation time; `seconds` grows while a kernel is compiled."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._lock = threading.Lock()
        self._active = 0
        self._since_s = 0.0
        self._finished_s = 0.0
        self._changed: Callable[[bool], None] | None = None

    def watch(self, changed: Callable[[bool], None]) -> None:
        """Call `changed`, which must not wait, with True when a first compilation begins and with
        False when the last has ended."""
        self._changed = changed

    def begin(self) -> None:
        with self._lock:
            self._active += 1
            if self._active == 1:
                self._since_s = self._now_s()
                self._report(True)

    def end(self) -> None:
        """Record the end of a compilation; an end without a begin has no effect."""
        with self._lock:
            if self._active == 1:
                self._finished_s += self._now_s() - self._since_s
                self._report(False)
            self._active = max(0, self._active - 1)

    def abort(self) -> None:
        """End all compilations: a failed one does not report its end."""
        with self._lock:
            if self._active:
                self._finished_s += self._now_s() - self._since_s
                self._report(False)
            self._active = 0

    def seconds(self) -> float:
        with self._lock:
            active_s = self._now_s() - self._since_s if self._active else 0.0
            return self._finished_s + active_s

    def _report(self, active: bool) -> None:
        if self._changed is not None:
            self._changed(active)


clock = CompileClock()


def watch_numba() -> None:
    """Report Numba's compilations to `clock`. The module that imports numba calls this once."""
    events: Any = import_module("numba.core.event")

    class NumbaListener(events.Listener):  # type: ignore[misc]  # numba has no types
        def on_start(self, event: object) -> None:
            clock.begin()

        def on_end(self, event: object) -> None:
            clock.end()

    events.register("numba:compile", NumbaListener())


def watch_triton() -> None:
    """Report Triton's compilations to `clock`; a failed one has no end event: see `abort`."""
    runtime: Any = import_module("triton").knobs.runtime

    def began(**_: object) -> bool:
        clock.begin()
        return False  # do not skip the compilation

    def ended(**_: object) -> bool:
        clock.end()
        return False

    runtime.jit_cache_hook, runtime.jit_post_compile_hook = began, ended
