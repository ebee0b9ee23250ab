"""When readers may measure READs from a granter, and what is known of pairs of hosts.

A prefill worker that restarts under a thousand readers would send each of them 48 MiB at once. It
gives each a time to measure instead, and readers open handoffs before it. What one worker has
measured holds for all workers of the same two hosts for a while. Pure: time is given.
"""

from __future__ import annotations

import math

from baton.proto import handoff_pb2

PROBE_EVERY_S = 0.25  # 48 MiB each: 200 MB/s at most, after the first ones
AT_ONCE = 8
MAX_AFTER_S = 1800.0
KNOWN_S = 600.0
MAX_HOSTS = 4096
MAX_HOST_CHARACTERS = 64
MAX_GB_PER_S = 1e5  # more than this was not measured

HostKey = tuple[str, str, int]  # host, memory type, bytes of a block


class ProbePace:
    """The times that a granter gives its readers: AT_ONCE at once, then one each PROBE_EVERY_S."""

    def __init__(self) -> None:
        self._next_s = -math.inf

    def after_s(self, now_s: float) -> float:
        """Take the next time to measure. Returns how long the reader waits for it."""
        self._next_s = max(self._next_s, now_s - AT_ONCE * PROBE_EVERY_S) + PROBE_EVERY_S
        self._next_s = min(self._next_s, now_s + MAX_AFTER_S)
        return max(0.0, self._next_s - now_s)


class HostBandwidths:
    """The last measurement of each host, in 10**9 bytes/s, each kept for KNOWN_S."""

    def __init__(self) -> None:
        self._found: dict[HostKey, tuple[float, float]] = {}  # the oldest first

    def record(self, key: HostKey, gb_per_s: float, now_s: float) -> None:
        """Record a measurement; one of an unknown host, or that cannot be true, is left out."""
        if key[0] and 0 < gb_per_s < MAX_GB_PER_S:
            self._found.pop(key, None)
            self._found[key] = gb_per_s, now_s
            if len(self._found) > MAX_HOSTS:
                del self._found[next(iter(self._found))]

    def known(self, key: HostKey, now_s: float) -> float:
        """Return the last measurement; 0 if there is none, or it is too old."""
        gb_per_s, at_s = self._found.get(key, (0.0, -math.inf))
        return gb_per_s if now_s - at_s < KNOWN_S else 0.0


def host_key(message: handoff_pb2.HandshakeMessage) -> HostKey:
    """Return the key under which a worker's host is remembered by its peers."""
    return message.host[:MAX_HOST_CHARACTERS], message.pool.memory, message.pool.block_bytes
