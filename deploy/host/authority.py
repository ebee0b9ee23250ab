"""The authority of one instance, and the certificates that it issues to the instance's processes.

    <instance's folder>/tls/     mode 0700
      authority.pem              the authority that every process trusts
      <name>.pem, <name>.key     of one process; the key for this user alone

The authority's own key is in no file: it ends with `baton serve`, and then no process can issue
another certificate. So its certificate need not end, and those of processes are short-lived and
renewed. A renewed certificate is for the same key, so that one file is replaced and the pair always
fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from baton.deploy.host.certificate_forms import (
    Subject,
    general_name,
    key_pem_of,
    new_issuer,
    new_key,
    pem_of,
    process_certificate,
)
from baton.deploy.host.instance import write_private

LIFE = timedelta(hours=24)  # of a process's certificate; renewed when half of it is over
SKEW = timedelta(minutes=5)  # that a clock may be set back
RETRY = timedelta(minutes=1)
BEGIN = datetime(2000, 1, 1, tzinfo=UTC)
NEVER = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)  # RFC 5280, 4.1.2.5: it does not end


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """The certificate files of one process."""

    authority: Path
    certificate: Path
    key: Path

    def settings(self) -> dict[str, str]:
        return {
            "security.authority": str(self.authority),
            "security.certificate": str(self.certificate),
            "security.key": str(self.key),
        }


def files_of(folder: Path, name: str) -> CertificateFiles:
    """Return the files of the process `name` in the folder `folder`."""
    return CertificateFiles(
        folder / "authority.pem", folder / f"{name}.pem", folder / f"{name}.key"
    )


class Authority:
    """Owned by `baton serve`. `folder` is made."""

    def __init__(
        self, folder: Path, now: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        self._folder = folder
        self._now = now
        self._issuer = new_issuer("Baton instance", BEGIN, NEVER)
        self._issued: dict[str, Subject] = {}
        self._good = (BEGIN, NEVER)  # in this time nothing is to be renewed
        folder.mkdir(mode=0o700)
        write_private(folder / "authority.pem", pem_of(self._issuer.certificate))

    def issue(self, name: str, host: str | None) -> CertificateFiles:
        """Issue a key and a certificate to the process `name`: for its calls and, if it has a
        `host`, for calls to it at this name or address. Raises ConfigError if no certificate
        can name the host."""
        hosts = () if host is None else (general_name(host, "worker.host"),)
        key = new_key()
        files = files_of(self._folder, name)
        write_private(files.key, key_pem_of(key))
        self._issued[name] = Subject(name, key.public_key(), hosts)
        begin, end = self._certify([name])
        self._good = (max(begin, self._good[0]), min(end, self._good[1]))
        return files

    def renew(self) -> None:
        """Replace the certificates when half their life is over, and when the clock was set back
        before their begin. Cheap while nothing is due. Raises OSError where a file cannot be
        written; the call after RETRY tries again."""
        begin, end = self._good
        now = self._now()
        if not begin <= now < end:
            self._good = (now, now + RETRY)
            self._good = self._certify(list(self._issued))

    def _certify(self, names: list[str]) -> tuple[datetime, datetime]:
        """Issue certificates to these processes, and return from when until when they need no new
        ones."""
        begin = self._now() - SKEW
        for name in names:
            end = begin + SKEW + LIFE
            certificate = process_certificate(self._issued[name], self._issuer, begin, end)
            write_private(files_of(self._folder, name).certificate, pem_of(certificate))
        return begin, begin + SKEW + LIFE / 2
