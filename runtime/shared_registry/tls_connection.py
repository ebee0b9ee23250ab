"""Connections to a Redis server over TLS.

redis-py reads the certificate files once for a connection object, and that object connects again
after each failure. Here every handshake reads them, so that a process which runs for months shows
the certificate that is there by then. Open connections keep theirs. Holds no state.
"""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from redis.asyncio.connection import RedisSSLContext, SSLConnection


@dataclass(frozen=True, slots=True)
class RedisTls:
    """PEM files of a client; an empty name is no file. The server's certificate is of one of the
    authorities in `authority` or, with `system`, of one that the system believes."""

    authority: str
    certificate: str
    key: str
    system: bool

    def context(self) -> ssl.SSLContext:
        """Read the files. The server must bear the name by which it is called. Raises OSError,
        which names setting and file, for one that is missing or unusable."""
        setting = "security.authority" if self.system else "registry.authority"
        with _named(f"{setting}: {self.authority}"):
            if self.system:
                context = ssl.create_default_context()
                if self.authority:
                    context.load_verify_locations(self.authority)
            else:
                context = ssl.create_default_context(cafile=self.authority)
        if self.certificate:
            with _named(f"security.certificate: {self.certificate}, security.key: {self.key}"):
                context.load_cert_chain(self.certificate, self.key)
        return context


@contextlib.contextmanager
def _named(files: str) -> Iterator[None]:
    """OpenSSL's errors name no file."""
    try:
        yield
    except OSError as error:
        raise OSError(f"{files} cannot be used ({error.strerror or error})") from error


class TlsConnection(SSLConnection):
    """A connection of redis-py's pool; `tls` names its files."""

    def __init__(self, *, tls: RedisTls, **options: Any) -> None:
        super().__init__(**options)
        self.ssl_context = _FreshContext(tls)


class _FreshContext(RedisSSLContext):
    def __init__(self, tls: RedisTls) -> None:
        super().__init__(cert_reqs=ssl.CERT_REQUIRED, check_hostname=True)
        self._tls = tls

    def get(self) -> ssl.SSLContext:
        """Return a context with the files as they are now."""
        return self._tls.context()
