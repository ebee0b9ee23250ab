"""How far a worker is with its weights: for its log, and for `baton serve`, which waits for it.

A keeper names a file to its child; the child keeps one line there. Without a keeper there is
the log alone. Knows no weights.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from baton.deploy.host.instance import PROGRESS_KEY, write_private
from baton.runtime import logs

log = logs.get(__name__)

PROGRESS_S = 3.0
KERNELS = "compiled the first time, which may take a minute, then kept"


class LoadProgress:
    """Tells the beginning, the end, and every few seconds between. Called by the threads that
    load, one at a time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._said: float | None = None

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        now = self._clock()
        if self._said is not None and now - self._said < PROGRESS_S and done_bytes < total_bytes:
            return
        self._said = now
        percent = round(100 * done_bytes / max(total_bytes, 1), 1)
        log.info(
            "loading weights",
            done_bytes=done_bytes,
            total_bytes=total_bytes,
            percent=percent,
            seconds=round(now - self._began, 1),
        )
        told = f"loading weights: {percent:.0f} % of {total_bytes / 1e9:.2f} GB"
        _leave(told if done_bytes < total_bytes else f"{told}; now its kernels ({KERNELS})")


def _leave(line: str) -> None:
    """For `baton serve`; a full disk must not end the loading."""
    if PROGRESS_KEY in os.environ:
        try:
            write_private(Path(os.environ[PROGRESS_KEY]), line)
        except OSError as error:
            log.warning("the progress was not left for the keeper", why=str(error))
