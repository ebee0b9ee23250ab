"""Reports how much of its weights a worker has loaded, to its log and to `baton serve`.

A supervisor names a file to its child, and the child writes one line to it. Without a supervisor
there is only the log.
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
KERNELS = "the first compilation may take a minute, later starts use its result"


class LoadProgress:
    """Reports the start, the end, and every few seconds between. Called by the threads that
    load, one at a time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._reported_s: float | None = None

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        now = self._clock()
        if (
            self._reported_s is not None
            and now - self._reported_s < PROGRESS_S
            and done_bytes < total_bytes
        ):
            return
        self._reported_s = now
        percent = round(100 * done_bytes / max(total_bytes, 1), 1)
        log.info(
            "load progress reported",
            done_bytes=done_bytes,
            total_bytes=total_bytes,
            percent=percent,
            seconds=round(now - self._began, 1),
        )
        line = f"loading weights: {percent:.0f} % of {total_bytes / 1e9:.2f} GB"
        _write(line if done_bytes < total_bytes else f"{line}; now its kernels ({KERNELS})")


def _write(line: str) -> None:
    """Write the line for `baton serve`; a full disk must not end the loading."""
    if PROGRESS_KEY in os.environ:
        try:
            write_private(Path(os.environ[PROGRESS_KEY]), line)
        except OSError as error:
            log.warning("load progress not written", reason=str(error))
