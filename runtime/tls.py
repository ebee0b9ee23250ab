"""TLS between Baton's processes: gRPC credentials by which both sides prove their identity.

A certificate may be replaced while the process runs. Its files are checked for each new channel
and each new connection; open connections keep theirs. If a file cannot be read, the log reports
it, and the last valid certificate stays in use. The process owns one `Tls`.
TLS 1.2 is refused (tls_version.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

import grpc

from baton.runtime import logs, tls_version
from baton.runtime.certificates import Certificates, Stamp, read, stamp
from baton.runtime.certificates_in_use import CertificatesInUse, Clock, utc_now
from baton.runtime.cluster_config import SecurityConfig

log = logs.get(__name__)

# how gRPC reports that the two sides do not trust each other
_FAILED_HANDSHAKE = ("handshake failed", "Hostname Verification", "CERTIFICATE")
_NO_COMMON_VERSION = "ALERT_HANDSHAKE_FAILURE"
_SHUT_EARLY = "failed to connect to all addresses"


def tls_of(security: SecurityConfig) -> Tls | None:
    """Return the TLS of this process; None if the settings switch it off, which is logged. Raises
    ConfigError."""
    if security.tls == "off":
        log.warning(
            "TLS disabled",
            setting="security.tls",
            risk="this network can read the cluster's token, prompts and answers",
        )
        return None
    return Tls(security)


class Tls:
    """Raises ConfigError where the files do not fit, by setting and remedy, or
    where TLS 1.2 would be accepted."""

    def __init__(self, security: SecurityConfig, now: Clock = utc_now) -> None:
        tls_version.check_enforced()
        self._security = security
        self._in_use = CertificatesInUse(_ProcessFiles(security), now)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return credentials for one channel, which keeps them while it is open."""
        held = self.current()
        return grpc.ssl_channel_credentials(held.authority, held.key, held.chain)

    def channel_options(self) -> list[tuple[str, str]]:
        """Return the channel option with the name that a server's certificate must have, if it is
        not the server's address."""
        name = self._security.server_name
        return [("grpc.ssl_target_name_override", name)] if name else []

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return credentials that ask every caller for a certificate of the authority."""
        return credentials_of(self.current, ask_callers=True)

    def current(self) -> Certificates:
        """Return the certificates in the files, or those of the last read that succeeded."""
        return self._in_use.current()


@dataclass(frozen=True, slots=True)
class _ProcessFiles:
    """The files of `security`."""

    security: SecurityConfig

    def stamp(self) -> Stamp:
        return stamp(self.security)

    def read(self, now: datetime) -> Certificates:
        return read(self.security, now)

    def ended(self, ends: datetime) -> str:
        return (
            f"the certificate in {self.security.certificate} (security.certificate) ended at "
            f"{ends:%F %T} UTC and other processes refuse it: put a new one there"
        )


def credentials_of(
    current: Callable[[], Certificates], *, ask_callers: bool
) -> grpc.ServerCredentials:
    """Return credentials that show each new connection what `current` returns then; with
    `ask_callers` a caller has to show a certificate of its authority."""
    given = current()

    def changed() -> grpc.ServerCertificateConfiguration | None:  # in a thread of gRPC's
        nonlocal given
        held = current()
        if held is given:
            return None
        given = held
        return _configuration(held)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(given),
        changed,  # type: ignore[arg-type]  # None is right too: nothing has changed
        ask_callers,
    )


def _configuration(held: Certificates) -> grpc.ServerCertificateConfiguration:
    pairs = [(held.key, held.chain)]
    return grpc.ssl_server_certificate_configuration(pairs, held.authority or None)


def advice(detail: str) -> str:
    """Return gRPC's reason for a failed connection, with a remedy if certificates may be the
    cause."""
    if _NO_COMMON_VERSION in detail:
        return (
            f"{detail}; Baton's processes speak TLS 1.3 alone: see that no proxy between the two "
            "ends TLS with an older version, and that both run this version of Baton"
        )
    if any(words in detail for words in _FAILED_HANDSHAKE):
        return (
            f"{detail}; the two processes do not trust each other's certificates: check "
            "security.authority, security.certificate and security.server_name of both, that none "
            "has ended, and that security.tls is the same"
        )
    if _SHUT_EARLY in detail and "Socket closed" in detail:
        return (
            f"{detail}; the other side closed the connection at once: see in its log whether it "
            "refused this process's certificate (security.certificate, security.authority)"
        )
    return detail
