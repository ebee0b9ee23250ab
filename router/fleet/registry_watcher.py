"""The registry as a router follows it: the last records that could be read, and its faults logged.

While the registry cannot be read, the last records hold. A fault is logged once when it appears
or changes, and once when it is over. Owns what was logged; knows no links.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from baton.runtime import logs, metrics, waits
from baton.runtime.registry import WorkerRecord
from baton.runtime.registry_client import ANSWER_S, RegistryClient, RegistryUnavailable, hung

ANSWER_WAIT_S = 0.25  # of one poll; a later answer counts at the next one

log = logs.get(__name__)


class RegistryWatcher:
    """`first_read_s` is when the registry could first be read, on the loop's clock; None before:
    an unread registry is not an empty one."""

    def __init__(self, registry: RegistryClient) -> None:
        self._registry = registry
        self._records: Sequence[WorkerRecord] = ()
        self._reading: asyncio.Future[list[WorkerRecord]] | None = None
        self._read_begun_s = 0.0
        self._unreadable_reason: str | None = None  # as it was last logged
        self._faults: Mapping[str, str] = {}  # of registry entries, as they were last logged
        self.first_read_s: float | None = None

    async def workers(self) -> Sequence[WorkerRecord]:
        """Return the registry's records; the last ones while it cannot be read (the process has
        no file descriptor left) or its file system hangs, since the links know better which
        workers are alive. Takes ANSWER_WAIT_S at most."""
        now_s = asyncio.get_running_loop().time()
        if self._reading is None:
            self._reading, self._read_begun_s = self._registry.workers(), now_s
        if not await waits.done_within(self._reading, ANSWER_WAIT_S):
            if now_s - self._read_begun_s >= ANSWER_S:
                self._report_unreadable(hung(ANSWER_S))
            return self._records
        reading, self._reading = self._reading, None
        try:
            self._records = reading.result()
        except RegistryUnavailable:  # its client has logged it
            return self._records
        except OSError as error:
            self._report_unreadable(str(error))
            return self._records
        if self._unreadable_reason is not None:
            log.info("registry readable again")
            metrics.REGISTRY_UP.set(1)
            self._unreadable_reason = None
        if self.first_read_s is None:
            self.first_read_s = asyncio.get_running_loop().time()
        self._report_faults(dict(self._registry.faults()))
        return self._records

    def _report_unreadable(self, reason: str) -> None:
        metrics.REGISTRY_UP.set(0)
        if reason != self._unreadable_reason:
            log.error("registry unreadable", reason=reason)
        self._unreadable_reason = reason

    def _report_faults(self, faults: Mapping[str, str]) -> None:
        for worker_id, reason in faults.items():
            if reason != self._faults.get(worker_id):
                log.warning("registry entry rejected", worker_id=worker_id, reason=reason)
        for worker_id in self._faults.keys() - faults.keys():
            log.info("registry entry recovered", worker_id=worker_id)
        self._faults = faults
