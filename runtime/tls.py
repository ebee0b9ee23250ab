"""TLS between Baton's processes: gRPC credentials by which both sides prove who they are.

A certificate may be replaced while the process runs. Its files are looked at for each new channel
and each connection that comes; connections that stand are left alone. What cannot be read then
is said in the log, and what was read last stays in use. The process owns one `Tls`.
TLS 1.2 is refused (tls_version.py).
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

import grpc

from baton.runtime import logs, tls_version
from baton.runtime.certificates import Certificates, read, stamp
from baton.runtime.cluster_config import SecurityConfig
from baton.runtime.errors import ConfigError

log = logs.get(__name__)

Clock = Callable[[], datetime]
# how gRPC says that the two sides did not come to believe each other
_FAILED_HANDSHAKE = ("handshake failed", "Hostname Verification", "CERTIFICATE")
_NO_COMMON_VERSION = "ALERT_HANDSHAKE_FAILURE"
_SHUT_EARLY = "failed to connect to all addresses"


def tls_of(security: SecurityConfig) -> Tls | None:
    """None where it is switched off by name, which the log says. Raises ConfigError."""
    if security.tls == "off":
        log.warning(
            "TLS between processes is off: whoever can read this network reads the cluster's "
            "token, prompts and answers",
            setting="security.tls",
        )
        return None
    return Tls(security)


class Tls:
    """Raises ConfigError where the files do not fit, by setting and remedy, or
    where TLS 1.2 would be accepted."""

    def __init__(self, security: SecurityConfig, now: Clock = lambda: datetime.now(UTC)) -> None:
        tls_version.check_enforced()
        self._security = security
        self._now = now
        self._stamp = stamp(security)  # first: what changes meanwhile is read again
        self._held = read(security, now())
        self._logged: str | None = None  # the last fault

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For one channel: it keeps them for as long as it is open."""
        held = self.current()
        return grpc.ssl_channel_credentials(held.authority, held.key, held.chain)

    def channel_options(self) -> list[tuple[str, str]]:
        """Against which name a server's certificate is held, if not against its address."""
        name = self._security.server_name
        return [("grpc.ssl_target_name_override", name)] if name else []

    def server_credentials(self) -> grpc.ServerCredentials:
        """Asks every caller for a certificate of the authority."""
        given = self.current()

        def changed() -> grpc.ServerCertificateConfiguration | None:  # in a thread of gRPC's
            nonlocal given
            held = self.current()
            if held is given:
                return None
            given = held
            return _configuration(held)

        return grpc.dynamic_ssl_server_credentials(
            _configuration(given),
            changed,  # type: ignore[arg-type]  # None is right too: nothing has changed
            True,
        )

    def current(self) -> Certificates:
        """What the files hold now, or held when they were last whole."""
        faults = [fault for fault in (self._read_changes(), self._expiry()) if fault is not None]
        fault = "; ".join(faults) if faults else None
        if fault is not None and fault != self._logged:  # not for every connection
            log.error(fault)
        self._logged = fault
        return self._held

    def _expiry(self) -> str | None:
        """Return that the certificate in use has ended, or None."""
        if self._held.ends > self._now():
            return None
        return (
            f"the certificate in {self._security.certificate} (security.certificate) ended at "
            f"{self._held.ends:%F %T} UTC and other processes refuse it: put a new one there"
        )

    def _read_changes(self) -> str | None:
        """Read the files if they have changed. Return why they cannot be used, or None."""
        found = stamp(self._security)
        if found == self._stamp:
            return None
        try:
            self._held = read(self._security, self._now())
        except ConfigError as error:
            return f"a changed certificate is not used: {error}"
        self._stamp = found
        log.info("certificate reloaded", ends=self._held.ends.isoformat())
        return None


def _configuration(held: Certificates) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(held.key, held.chain)], held.authority)


def advice(detail: str) -> str:
    """What gRPC tells of a failed connection, with what to do where certificates may be why."""
    if _NO_COMMON_VERSION in detail:
        return (
            f"{detail}; Baton's processes speak TLS 1.3 alone: see that no proxy between the two "
            "ends TLS with an older version, and that both run this version of Baton"
        )
    if any(words in detail for words in _FAILED_HANDSHAKE):
        return (
            f"{detail}; the two processes do not believe each other's certificates: check "
            "security.authority, security.certificate and security.server_name of both, that none "
            "has ended, and that security.tls is the same"
        )
    if _SHUT_EARLY in detail and "Socket closed" in detail:
        return (
            f"{detail}; the other side closed the connection at once: see in its log whether it "
            "refused this process's certificate (security.certificate, security.authority)"
        )
    return detail
