"""Deliberate breaks of how processes meet over a shared registry.

A part of mutations.py, which says what they are for.
"""

from __future__ import annotations

import json
from typing import Any

from baton.router.client_access.router import Router
from baton.runtime.registry import WorkerRecord
from baton.runtime.shared_registry import member_table
from baton.runtime.shared_registry.member_table import MemberTable
from baton.runtime.shared_registry.redis_registry import RedisRegistry
from baton.runtime.shared_registry.signed_entry import EntrySigner, SignedEntry
from baton.runtime.worker import announcer
from baton.simulation.mutations.patches import Break, always


def _forgotten_in_an_outage(before: Any) -> Any:
    def report_unread(self: RedisRegistry, reason: str) -> None:
        before(self, reason)
        self._table = MemberTable(self._lifetime_s)

    return report_unread


def _unsigned_too(before: Any) -> Any:
    def read(self: EntrySigner, content: bytes) -> SignedEntry | str:
        found = before(self, content)
        if not isinstance(found, str):
            read_entry: SignedEntry = found
            return read_entry
        entry = json.loads(content)
        del entry["signature"]
        return SignedEntry(WorkerRecord(**entry.pop("record")), **entry)

    return read


def _each_entry_counts(_: Any) -> Any:
    def learn(self: MemberTable, entry: SignedEntry, now_s: float) -> bool:
        boot = (entry.record.worker_id, entry.record.boot_id)
        self._members[boot] = member_table._Member(entry, now_s)
        return True

    return learn


def _announced_once(_: Any) -> Any:
    async def announce(registry: Any, record: WorkerRecord) -> None:
        await registry.announce(record)

    return announce


OF_MEMBERSHIP: dict[str, Break] = {
    "forget-in-an-outage": Break(
        "a registry that cannot be read has no members",
        RedisRegistry,
        "_report_unread",
        _forgotten_in_an_outage,
    ),
    "take-unsigned-entries": Break(
        "an entry counts without the cluster's signature", EntrySigner, "read", _unsigned_too
    ),
    "count-replayed-entries": Break(
        "a copy of an old entry is a sign of life", MemberTable, "learn", _each_entry_counts
    ),
    "announce-once": Break(
        "a worker announces itself at its start alone", announcer, "announce", _announced_once
    ),
    "ready-without-workers": Break(
        "a router is ready before it has a worker", Router, "check_ready", always({})
    ),
}
