"""The granter's side of first contacts: its handshake, and when the reader may measure READs.

    reader                      granter
      ├─ handshake ────────────────▶│ takes a time to measure; serves READs promptly at that time
      │◀─ pool, probe_after_ms ─────┤ and says what a reader of that host has measured
      ├─ READs, at that time ──────▶│
      ├─ handshake, read_gb_per_s ─▶│ remembers it for the reader's host

Owned by the worker's loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from baton.kv_transfer.peers.grants import Grants
from baton.kv_transfer.peers.probe_pace import HostBandwidths, ProbePace, host_key
from baton.proto import handoff_pb2


class ContactAnswers:
    """`mine` returns the worker's own message; readers' messages have been checked."""

    def __init__(self, grants: Grants, mine: Callable[[], handoff_pb2.HandshakeMessage]) -> None:
        self._grants = grants
        self._mine = mine
        self._pace = ProbePace()
        self._reports = HostBandwidths()  # of this worker, by the reader's host

    def answer(self, theirs: handoff_pb2.HandshakeMessage) -> handoff_pb2.HandshakeMessage:
        """Return the answer to a reader's handshake."""
        answer, now_s = handoff_pb2.HandshakeMessage(), asyncio.get_running_loop().time()
        answer.CopyFrom(self._mine())
        if theirs.read_gb_per_s:
            self._reports.record(host_key(theirs), theirs.read_gb_per_s, now_s)
            return answer
        after_s = self._pace.after_s(now_s)
        self._grants.expect_reads(after_s)
        answer.probe_after_ms = int(after_s * 1000)
        answer.read_gb_per_s = self._reports.known(host_key(theirs), now_s)
        return answer
