"""The traces of the last requests, in memory: records as JSON, bounded in number and in bytes.

A record holds durations, counts and names of workers, never text. The oldest record goes first.
The store also knows which requests are worth keeping elsewhere: the slow, failed, migrated and
preempted ones. Pure. Owned by the router's event loop.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from typing import Any

import orjson

from baton.router.requests.openai_schema import MAX_PROMPTS

MAX_RECORDS = 10_000
MAX_BYTES = 128 << 20  # of all records: as many as MAX_RECORDS of the largest ordinary size
RECENT = 1000  # times that "slow" is judged by
MIN_RECENT = 100  # before so many none is slow
SLOW_SHARE = 0.99
_REFRESH = 50  # requests between two computations of the limit


@dataclass(frozen=True, slots=True)
class _Entry:
    seconds: float | None  # to the first byte of its answer, if one was sent
    tenant: bytes
    body: bytes


class _RecentTimes:
    """The last times of one kind, in seconds, and the limit above which one is slow."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._seen = 0
        self._slow_s = float("inf")

    def is_slow(self, seconds: float) -> bool:
        """Count a time, and return whether it is above the limit of those before it."""
        slow = seconds > self._slow_s
        self._recent.append(seconds)
        self._seen += 1
        if len(self._recent) >= MIN_RECENT and self._seen % _REFRESH == 0:
            ordered = sorted(self._recent)
            self._slow_s = ordered[int(SLOW_SHARE * (len(ordered) - 1))]
        return slow


class TraceStore:
    def __init__(self, max_records: int = MAX_RECORDS, max_bytes: int = MAX_BYTES) -> None:
        self._max_records = max_records
        self._max_bytes = max_bytes
        self._entries: dict[str, _Entry] = {}  # the oldest first
        self._bytes = 0
        self._first_bytes, self._per_token = _RecentTimes(), _RecentTimes()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def size_bytes(self) -> int:
        """The size of all records."""
        return self._bytes

    def is_slow(self, first_byte_s: float, per_token_s: float | None = None) -> bool:
        """Count a request's time to the first byte and, where it has two tokens, its mean time
        between tokens. Return whether either is above the 99th percentile of those before it."""
        late = self._first_bytes.is_slow(first_byte_s)
        return (per_token_s is not None and self._per_token.is_slow(per_token_s)) or late

    def add(self, record: dict[str, Any], tenant: bytes) -> None:
        """Store a record by its `id`. `tenant` is the digest of the key that may read it."""
        name, body = record["id"], orjson.dumps(record)
        self._remove(name)
        self._entries[name] = _Entry(record["ttft_s"], tenant, body)
        self._bytes += len(body)
        while len(self._entries) > self._max_records or self._bytes > self._max_bytes:
            self._remove(next(iter(self._entries)))

    def get(self, request_id: str, tenant: bytes | None) -> bytes | None:
        """Return the JSON of a request's record, of one with several prompts that of the prompt
        which was answered last; None: it is not here, or another tenant's. Here and below, the
        tenant None reads the records of all: the operator."""
        entry = self._entries.get(request_id)
        if entry is not None:
            return entry.body if tenant in (None, entry.tenant) else None
        members = (self._entries.get(f"{request_id}-{index}") for index in range(MAX_PROMPTS))
        mine = [each for each in members if each is not None and tenant in (None, each.tenant)]
        last = max(mine, key=lambda each: each.seconds or 0.0, default=None)
        return last.body if last is not None else None

    def slowest(self, count: int, tenant: bytes | None) -> list[bytes]:
        """Return the records with the longest times to the first byte, the longest first."""
        answered = (
            (entry.seconds, index, entry.body)
            for index, entry in enumerate(self._entries.values())
            if entry.seconds is not None and tenant in (None, entry.tenant)
        )
        return [body for *_, body in heapq.nlargest(count, answered)]

    def latest(self, count: int, tenant: bytes | None, after: str | None = None) -> list[bytes]:
        """Return the newest records, the newest first; none from the request `after` on back."""
        found: list[bytes] = []
        for name, entry in reversed(self._entries.items()):
            if len(found) == count or name == after:
                break
            if tenant in (None, entry.tenant):
                found.append(entry.body)
        return found

    @property
    def newest_id(self) -> str | None:
        """The request whose record came last; None without any."""
        return next(reversed(self._entries), None)

    def _remove(self, name: str) -> None:
        entry = self._entries.pop(name, None)
        if entry is not None:
            self._bytes -= len(entry.body)
