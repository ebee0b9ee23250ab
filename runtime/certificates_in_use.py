"""The last valid certificate of files that may be replaced while the process runs.

The files are looked at, not read, for each new connection; open connections keep what they have. A
file that cannot be used is reported once, and read again when it changes, or RETRY_S later.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Generic, Protocol, TypeVar

from baton.runtime import logs
from baton.runtime.certificates import Certificates, Stamp
from baton.runtime.errors import ConfigError

RETRY = timedelta(seconds=1)  # of a file that could not be used and has not changed
Clock = Callable[[], datetime]
Held = TypeVar("Held", bound=Certificates)
HeldByFiles = TypeVar("HeldByFiles", bound=Certificates, covariant=True)

log = logs.get(__name__)


class CertificateFiles(Protocol[HeldByFiles]):
    """Files of a certificate. `read` raises ConfigError where one cannot be used at this time."""

    def stamp(self) -> Stamp: ...

    def read(self, now: datetime) -> HeldByFiles: ...

    def ended(self, ends: datetime) -> str:
        """Return what follows from the end of the certificate in use, and what to do."""
        ...


def utc_now() -> datetime:
    return datetime.now(UTC)


class CertificatesInUse(Generic[Held]):
    """Raises ConfigError where the files cannot be used. May be called in any thread; one at a time
    reads changes, so that the newest is used."""

    def __init__(self, files: CertificateFiles[Held], now: Clock = utc_now) -> None:
        self._files = files
        self._now = now
        self._lock = threading.Lock()
        self._stamp = files.stamp()  # first: a later change is read again
        self._held = files.read(now())
        self._fault: str | None = None  # of the files
        self._retry_at = now()
        self._logged: str | None = None  # the last fault

    def current(self) -> Held:
        """Return the certificate in the files, or that of the last read that succeeded."""
        with self._lock:
            self._read_changes()
            faults = [fault for fault in (self._fault, self._expiry()) if fault is not None]
            fault = "; ".join(faults) if faults else None
            if fault is not None and fault != self._logged:  # not for every connection
                log.error("certificate unusable", reason=fault)
            self._logged = fault
            return self._held

    def _expiry(self) -> str | None:
        """Return that the certificate in use has ended, or None."""
        return None if self._held.ends > self._now() else self._files.ended(self._held.ends)

    def _read_changes(self) -> None:
        """Read the files if they have changed, or if they could not be used a while ago."""
        found, now = self._files.stamp(), self._now()
        if found == self._stamp and (self._fault is None or now < self._retry_at):
            return
        self._stamp, self._retry_at = found, now + RETRY
        try:
            self._held = self._files.read(now)
        except ConfigError as error:
            self._fault = f"a changed certificate is not used: {error}"
            return
        self._fault = None
        log.info("certificate reloaded", ends=self._held.ends.isoformat())
