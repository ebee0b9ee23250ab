"""What the registry says of workers, as a router follows it, and the log's part in that.

What it said last holds while it cannot be read. What is wrong with it is looked at twice a
second and told once: when it appears or changes, and when it is over. Owns what was told; knows
no links.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from baton.runtime import logs, waits
from baton.runtime.registry import WorkerRecord
from baton.runtime.registry_client import ANSWER_S, RegistryClient, hung

ANSWER_WAIT_S = 0.25  # of one look; a later answer counts at the next one

log = logs.get(__name__)


class Announced:
    """`since_s`: when the registry could first be read, on the loop's clock; None: not yet, and an
    unread registry is no empty one."""

    def __init__(self, registry: RegistryClient) -> None:
        self._registry = registry
        self._records: Sequence[WorkerRecord] = ()
        self._reading: asyncio.Future[list[WorkerRecord]] | None = None
        self._asked_s = 0.0
        self._unread = ""  # why it cannot be read, as the log was last told
        self._faults: Mapping[str, str] = {}  # of announcements, likewise
        self.since_s: float | None = None

    async def workers(self) -> Sequence[WorkerRecord]:
        """What the registry says; what it said last, while it cannot be read (no descriptor is
        left) or its file system hangs: the links know better than it who lives. Takes
        ANSWER_WAIT_S at most."""
        now_s = asyncio.get_running_loop().time()
        if self._reading is None:
            self._reading, self._asked_s = self._registry.workers(), now_s
        if not await waits.over(self._reading, ANSWER_WAIT_S):
            if now_s - self._asked_s >= ANSWER_S:
                self._say_unread(hung(ANSWER_S))
            return self._records
        reading, self._reading = self._reading, None
        try:
            self._records = reading.result()
        except OSError as error:
            self._say_unread(str(error))
            return self._records
        if self._unread:
            log.info("the registry can be read again")
            self._unread = ""
        if self.since_s is None:
            self.since_s = asyncio.get_running_loop().time()
        self._tell(dict(self._registry.faults()))
        return self._records

    def _say_unread(self, why: str) -> None:
        if why != self._unread:
            log.error("the registry cannot be read", why=why)
        self._unread = why

    def _tell(self, faults: Mapping[str, str]) -> None:
        for worker_id, why in faults.items():
            if why != self._faults.get(worker_id):
                log.warning("an announcement cannot be used", worker_id=worker_id, why=why)
        for worker_id in self._faults.keys() - faults.keys():
            log.info("an announcement of no use is gone, or sound by now", worker_id=worker_id)
        self._faults = faults
