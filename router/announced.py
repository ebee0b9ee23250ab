"""What the registry says of workers, as a router follows it, and the log's part in that.

What it said last holds while it cannot be read. What is wrong with it is looked at twice a
second and told once: when it appears or changes, and when it is over. Owns what was told; knows
no links.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from baton.runtime import logs
from baton.runtime.registry import Registry, WorkerRecord

log = logs.get(__name__)


class Announced:
    """`since_s`: when the registry could first be read, on the loop's clock; None: not yet, and an
    unread registry is no empty one."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._records: Sequence[WorkerRecord] = ()
        self._unread = ""  # why it cannot be read, as the log was last told
        self._faults: Mapping[str, str] = {}  # of announcements, likewise
        self.since_s: float | None = None

    def workers(self) -> Sequence[WorkerRecord]:
        """What the registry says; what it said last, while it cannot be read (no descriptor is
        left): the links know better than it who lives."""
        try:
            self._records = self._registry.workers()
        except OSError as error:
            if str(error) != self._unread:
                log.error("the registry cannot be read", why=str(error))
            self._unread = str(error)
            return self._records
        if self._unread:
            log.info("the registry can be read again")
            self._unread = ""
        if self.since_s is None:
            self.since_s = asyncio.get_running_loop().time()
        self._tell(dict(self._registry.faults()))
        return self._records

    def _tell(self, faults: Mapping[str, str]) -> None:
        for worker_id, why in faults.items():
            if why != self._faults.get(worker_id):
                log.warning("an announcement cannot be used", worker_id=worker_id, why=why)
        for worker_id in self._faults.keys() - faults.keys():
            log.info("an announcement of no use is gone, or sound by now", worker_id=worker_id)
        self._faults = faults
