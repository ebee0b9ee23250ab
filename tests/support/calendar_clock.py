"""A clock of dates, which a test sets."""

from __future__ import annotations

from datetime import UTC, datetime

NOON = datetime(2026, 5, 4, 12, tzinfo=UTC)


class CalendarClock:
    """Returns `now`, which is NOON until a test changes it."""

    def __init__(self) -> None:
        self.now = NOON

    def __call__(self) -> datetime:
        return self.now
