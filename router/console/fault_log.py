"""Faults and migrations as they occur, found by comparing what the router knows second by second.

Costs a request nothing: workers are compared with themselves a second ago, and the router's
counters with what they were. What came and went within a second shows as its counter alone. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from baton.router.console.metric_values import by_label
from baton.router.console.worker_rows import Row
from baton.runtime import metrics

MAX_EVENTS = 200
MAX_NAMED = 4  # of workers that join within one second
Level = Literal["good", "notice", "bad"]
Event = dict[str, Any]  # time, level, worker, text
Counts = Mapping[str, Mapping[str, float]]

_BECAME: dict[str, tuple[Level, str]] = {
    "ready": ("good", "takes work"),
    "lost": ("bad", "lost its link"),
    "not linked": ("bad", "is not linked"),
    "hung": ("bad", "hangs"),
    "silent": ("bad", "is silent"),
    "draining": ("notice", "drains"),
    "not ready": ("bad", "is not ready"),
    "circuit open": ("bad", "gets no requests for a while"),
    "refused": ("bad", "was refused"),
}
_WORTH: dict[str, tuple[Level, str]] = {
    "migrations": ("notice", "migrated"),
    "retries refused": ("bad", "not migrated"),
    "deadlines": ("notice", "ended by their deadline"),
    "failed": ("bad", "failed"),
    "hang quarantine": ("bad", "ended because workers hung on them"),
}


def read_counts() -> dict[str, dict[str, float]]:
    """Return the counters of this process that the log compares, and whether the registry is up."""
    return {
        "migrations": by_label(metrics.MIGRATIONS),
        "retries refused": by_label(metrics.RETRIES_REFUSED),
        "deadlines": by_label(metrics.DEADLINES_PASSED),
        "failed": {"": by_label(metrics.REQUESTS)["failed"]},
        "hang quarantine": by_label(metrics.QUARANTINED_REQUESTS),
        "registry": by_label(metrics.REGISTRY_UP),
    }


class FaultLog:
    """`events` are the last ones, the oldest first."""

    def __init__(self) -> None:
        self.events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._rows: Mapping[str, Row] | None = None  # None: nothing to compare with
        self._counts: Counts = {}

    def observe(self, wall_s: float, rows: Mapping[str, Row], counts: Counts) -> list[Event]:
        """Compare with the call before, and return the new events; the first call finds none."""
        found: list[Event] = []
        if self._rows is not None:
            for level, worker, text in (*self._of_workers(rows), *self._of_counts(counts)):
                event = {"time": round(wall_s, 1), "level": level, "worker": worker, "text": text}
                found.append(event)
        self._rows, self._counts = rows, counts
        self.events.extend(found)
        return found

    def _of_workers(self, rows: Mapping[str, Row]) -> Iterator[tuple[Level, str, str]]:
        before = self._rows or {}
        for worker in before.keys() - rows.keys():
            yield "notice", worker, "has left"
        new = {worker: row for worker, row in rows.items() if worker not in before}
        if len(new) > MAX_NAMED:  # as when the router starts
            yield "good", "", f"{len(new)} workers joined"
            new = {}
        for worker, row in new.items():
            yield "good", worker, f"joined as a {row['role']} worker, {row['state']}"
        for worker, row in rows.items():
            old = before.get(worker)
            if old is None:
                continue
            if row["role"] != old["role"]:
                yield "notice", worker, f"is a {row['role']} worker now"
            if row["boot"] != old["boot"]:
                yield "notice", worker, f"was restarted (boot {row['boot']})"
            if row["state"] != old["state"]:
                level, text = _BECAME[row["state"]]
                yield level, worker, f"{text}: {row['reason']}" if row["reason"] else text
            fenced = row["blocks"]["quarantined"]
            if fenced > old["blocks"]["quarantined"]:
                yield "bad", worker, f"has {fenced} blocks in quarantine"

    def _of_counts(self, counts: Counts) -> Iterator[tuple[Level, str, str]]:
        for name, (level, text) in _WORTH.items():
            old = self._counts[name]
            for label, value in counts[name].items():
                more = round(value - old.get(label, 0.0))
                if more > 0:
                    noun = "request" if more == 1 else "requests"
                    why = f" ({label.replace('_', ' ')})" if label else ""
                    yield level, "", f"{more} {noun} {text}{why}"
        up, was_up = counts["registry"][""], self._counts["registry"][""]
        if up != was_up:
            text = "can be used again" if up else "cannot be used: known workers serve on"
            yield ("good" if up else "bad"), "", f"the registry {text}"
