"""Logs of workers that do not fit together: each set of them once.

Knows the links and their hellos, and no requests. Owned by the fleet.
"""

from __future__ import annotations

from collections.abc import Collection

from baton.router.fleet.worker_link import WorkerLink
from baton.router.fleet.worker_view import (
    KvFormat,
    NumericsId,
    incompatible_prefill_workers,
    kv_format_of,
)
from baton.runtime import logs

log = logs.get(__name__)


class FleetReports:
    def __init__(self) -> None:
        self._mixed_numerics: dict[NumericsId, list[str]] = {}  # as last logged
        self._incompatible: dict[str, str] = {}  # as last logged

    def report(self, links: Collection[WorkerLink]) -> None:
        """Log what has changed since the last call."""
        self._report_mixed_numerics(links)
        self._report_incompatible(links)

    def _report_mixed_numerics(self, links: Collection[WorkerLink]) -> None:
        """Log once each set of decode workers that compute different numbers."""
        found: dict[NumericsId, list[str]] = {}
        for link in links:
            if link.up and link.worker_hello is not None and link.record.role == "decode":
                numerics = (link.worker_hello.model_fingerprint, link.worker_hello.kv_dtype)
                found.setdefault(numerics, []).append(link.worker_id)
        if len(found) > 1 and found != self._mixed_numerics:
            log.warning(
                "decode workers mismatched",
                workers={" ".join(numerics): names for numerics, names in found.items()},
                effect="answers depend on the worker; a request migrates only to workers with the "
                "same fingerprint and KV dtype",
                remedy="run all decode workers with the same model, settings and processor type",
            )
        self._mixed_numerics = found

    def _report_incompatible(self, links: Collection[WorkerLink]) -> None:
        """Log once each set of prefill workers that cannot be used."""
        found = incompatible_prefill_workers(
            kv_formats(links, "prefill"), kv_formats(links, "decode")
        )
        if found and found != self._incompatible:
            log.error(
                "prefill workers not used",
                workers=found,
                effect="no decode worker can read their KV",
                remedy="run all workers with the same model, dtype, pool settings, processor type "
                "and version; during an upgrade, wait until the workers of the other role are "
                "replaced too",
            )
        self._incompatible = found


def kv_formats(links: Collection[WorkerLink], role: str) -> dict[str, KvFormat]:
    """Return the KV formats of the linked workers of a role that take work."""
    return {
        link.worker_id: kv_format_of(link.worker_hello)
        for link in links
        if link.takes_work and link.worker_hello is not None and link.record.role == role
    }
