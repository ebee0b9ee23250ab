"""TLS for clients: the certificate with which a router proves its identity to them.

It is in `tls.crt` and `tls.key` of the folder `router.tls`, and may be replaced while the router
runs (certificates_in_use.py). Clients show no certificate; they have API keys. HTTP takes TLS 1.2
and 1.3, gRPC TLS 1.3 alone (tls_version.py).
"""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from datetime import datetime

import grpc

from baton.runtime import tls_version
from baton.runtime.certificates import (
    CertificatePair,
    Certificates,
    Stamp,
    pair_in,
    read_folder,
    stamp_of,
)
from baton.runtime.certificates_in_use import CertificatesInUse, Clock, utc_now
from baton.runtime.errors import ConfigError
from baton.runtime.tls import credentials_of

SETTING = "router.tls"


@dataclass(frozen=True, slots=True)
class ServedCertificate(Certificates):
    """A certificate with a context for HTTP, which shows it."""

    context: ssl.SSLContext


def client_tls(folder: str) -> ClientTls | None:
    """Return the TLS for clients; None without a folder. Raises ConfigError."""
    return ClientTls(folder) if folder else None


class ClientTls:
    """Raises ConfigError, naming `router.tls` and the remedy, where the folder's files cannot be
    used."""

    def __init__(self, folder: str, now: Clock = utc_now) -> None:
        self._in_use = CertificatesInUse(_FolderFiles(folder), now)

    def context(self) -> ssl.SSLContext:
        """Return the context for one new connection of HTTP."""
        return self._in_use.current().context

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return credentials that show each new connection the certificate in use. Raises
        ConfigError where gRPC would accept TLS 1.2."""
        tls_version.check_enforced()
        return credentials_of(self._in_use.current, ask_callers=False)


@dataclass(frozen=True, slots=True)
class _FolderFiles:
    """The two files of a folder."""

    folder: str

    def stamp(self) -> Stamp:
        pair = self._pair()
        return stamp_of(pair.certificate, pair.key)

    def read(self, now: datetime) -> ServedCertificate:
        found = read_folder(self.folder, SETTING, now)
        context = _context(self._pair(), found)
        return ServedCertificate(found.authority, found.chain, found.key, found.ends, context)

    def ended(self, ends: datetime) -> str:
        return (
            f"the certificate in {self._pair().certificate} ({SETTING}) ended at {ends:%F %T} UTC "
            "and clients refuse it: put a new one there"
        )

    def _pair(self) -> CertificatePair:
        return pair_in(self.folder, SETTING)


def _context(pair: CertificatePair, found: Certificates) -> ssl.SSLContext:
    """Return a context with what has been read and checked, whatever the files hold by now."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    try:
        # Python loads certificates from files alone, and this one is in memory
        with open(os.memfd_create("baton-router-tls"), "wb") as file:
            file.write(found.key + b"\n" + found.chain)
            file.flush()
            context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    except ssl.SSLError as error:
        raise ConfigError(
            f"{SETTING}: OpenSSL does not take {pair.certificate} with its key ({error}): give an "
            "ECDSA key, or an RSA key of 2048 bits or more"
        ) from error
    except OSError as error:  # no free file descriptor
        raise ConfigError(
            f"{SETTING}: {pair.certificate} cannot be loaded now ({error}): see the limit of open "
            "files"
        ) from error
    return context
