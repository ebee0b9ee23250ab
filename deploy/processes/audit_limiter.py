"""Limits how much of a worker's time the checks behind `/audit` take."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

CHECK_INTERVAL_S = 1.0  # between two checks of the pool
CHECK_SHARE = 0.05  # of the worker's time, where a check takes long

Audit = Callable[[bool], dict[str, Any]]


class AuditLimiter:
    """Calls `audit(check)`, with `check` true only when a check is due. Owned by the worker's
    loop."""

    def __init__(self, audit: Audit, clock: Callable[[], float] = time.monotonic) -> None:
        self._audit = audit
        self._clock = clock
        self._next_check_s = clock()
        self._failure: Exception | None = None

    def report(self) -> dict[str, Any]:
        """Return the worker's audit. After a check has failed, raise the same error until the
        next check."""
        started_s = self._clock()
        if started_s < self._next_check_s:
            if self._failure is not None:
                raise self._failure.with_traceback(None)
            return self._audit(False)
        self._failure = None
        try:
            return self._audit(True)
        except Exception as error:  # kept for calls before the next check, and raised
            self._failure = error
            raise
        finally:
            check_s = self._clock() - started_s
            self._next_check_s = started_s + max(CHECK_INTERVAL_S, check_s / CHECK_SHARE)
