"""Certificates for a router's clients, in folders as `router.tls` names them."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from baton.deploy.host.authority import Authority

HOSTS = ("127.0.0.1", "localhost")


def utc_now() -> datetime:
    return datetime.now(UTC)


class ClientCertificates:
    """An authority that clients trust, and the folder of a router, with its first certificate."""

    def __init__(
        self, folder: Path, now: Callable[[], datetime] = utc_now, host: str = HOSTS[0]
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._authority = Authority(folder / "authority", now)
        self._issued = 0
        self._host = host
        self.authority = folder / "authority" / "authority.pem"
        self.folder = folder / "router"
        self.folder.mkdir()
        self.replace()

    def issue(self) -> tuple[bytes, bytes]:
        """A new certificate and its key."""
        self._issued += 1
        files = self._authority.issue(f"router-{self._issued}", self._host)
        return files.certificate.read_bytes(), files.key.read_bytes()

    def replace(self, certificate: bytes | None = None, key: bytes | None = None) -> str:
        """Put these files into the folder, by default a new pair, and return the name that a new
        pair bears."""
        new_certificate, new_key = self.issue()
        for name, content in (
            ("tls.crt", certificate or new_certificate),
            ("tls.key", key or new_key),
        ):
            draft = self.folder / f"{name}.draft"
            draft.write_bytes(content)
            draft.chmod(0o600)
            os.replace(draft, self.folder / name)
        return f"router-{self._issued}"

    def trusting(self) -> ssl.SSLContext:
        """The context of a client that trusts the authority alone."""
        return ssl.create_default_context(cafile=str(self.authority))
