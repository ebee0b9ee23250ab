"""How a command reaches a router by TLS: which certificates it trusts, and what a failure means.

A router of this user's instances, on this host, is trusted by the certificate itself that the
folder `router.tls` holds, whatever host it names: that folder and the instance's are this user's.
Any other is trusted by the authorities of the system, or those in the file that the environment
variable SSL_CERT_FILE names, and has to bear the name in the URL; a caller may name the file of the
certificate itself instead. Keeps no state.
"""

from __future__ import annotations

import contextlib
import http.client
import ssl
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

from baton.deploy.host.instance import (
    admin_address_file,
    live_instances,
    read_client_settings,
    router_address_file,
)
from baton.runtime.config import RouterConfig, is_loopback
from baton.runtime.errors import ConfigError

SETTING = "router.tls"
CERTIFICATE = "tls.crt"  # in that folder
PEM_END = "-----END CERTIFICATE-----"
HTTPS_PORT = 443
ANY_ADDRESS = ("0.0.0.0", "::")


def check_certificate(router: RouterConfig) -> None:
    """Raise ConfigError where the router could not serve by TLS, if it is to."""
    if router.tls:
        from baton.runtime.certificates import read_folder  # slow to load, and seldom needed

        read_folder(router.tls, SETTING, datetime.now(UTC))


def url_of(address: str) -> str:
    """Return the URL of what an address file holds: host:port, or https://host:port."""
    return address if address.startswith("https://") else f"http://{address}"


def connect(
    url: str, timeout_s: float, certificate: Path | None = None
) -> http.client.HTTPConnection:
    """Return a connection, not opened yet, to the host of an http:// or https:// URL. A host called
    by https:// has to present the first certificate in the PEM file `certificate`, if given."""
    parts = urlsplit(url)
    if parts.scheme == "http":
        return http.client.HTTPConnection(parts.netloc, timeout=timeout_s)
    if certificate is not None:
        context = _pinned(certificate)
    else:
        context = https_context(parts.hostname or "", parts.port or HTTPS_PORT)
    return http.client.HTTPSConnection(parts.netloc, timeout=timeout_s, context=context)


def https_context(host: str, port: int) -> ssl.SSLContext:
    """Return the context with which a command of this user calls https://host:port."""
    own = _own_certificate(host, port)
    return ssl.create_default_context() if own is None else _pinned(own)


def fault_of(url: str, error: Exception, certificate: Path | None = None) -> str | None:
    """Return why a call by TLS failed, with the remedy; None if TLS was not the cause.
    `certificate` as in `connect`."""
    if isinstance(error, ssl.SSLCertVerificationError):
        parts = urlsplit(url)
        expected = certificate or _own_certificate(parts.hostname or "", parts.port or HTTPS_PORT)
        if expected is not None:
            return (
                f"{url} presents another certificate than {expected} has, or one that is not valid "
                f"({error.verify_message}): if it has just been replaced, try again in two "
                "minutes; a router that cannot use it logs `certificate unusable`, with the reason"
            )
        return (
            f"the certificate of {url} is not trusted ({error.verify_message}): set SSL_CERT_FILE "
            "to the PEM file of the authority that issued it, and use a host name or an address "
            "that it bears"
        )
    if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
        return (
            f"no TLS with {url} ({error.reason or error}): write http:// if the server has no "
            f"{SETTING}"
        )
    return None


def _own_certificate(host: str, port: int) -> Path | None:
    """Return the certificate of the instance of this user that speaks TLS there; None without."""
    with contextlib.suppress(ConfigError, OSError):  # no folder of instances: none runs here
        for folder in live_instances():
            if any(port == own and _same(host, at) for at, own in _own_ports(folder)):
                return Path((read_client_settings(folder) or {})[SETTING]) / CERTIFICATE
    return None


def _own_ports(folder: Path) -> set[tuple[str, int]]:
    """Return host and port of the ports on which an instance's router speaks TLS."""
    address = router_address_file(folder)
    found = set()
    for file in (address, admin_address_file(address)):
        parts = urlsplit(url_of(file.read_text().strip())) if file.exists() else None
        if parts is not None and parts.scheme == "https":
            found.add((parts.hostname or "", parts.port or HTTPS_PORT))
    return found


def _same(host: str, listening: str) -> bool:
    """Return whether a call of `host` reaches what listens at that address of this machine."""
    return host == listening or (
        is_loopback(host) and (is_loopback(listening) or listening in ANY_ADDRESS)
    )


def _pinned(file: Path) -> ssl.SSLContext:
    """Return a context that trusts the first certificate in the file alone, whichever host shows
    it; where there is none, it trusts none."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # the certificate itself is compared
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # no authority of it is needed
    with contextlib.suppress(OSError, ValueError):  # a file that is being replaced
        first, end, _ = file.read_text().partition(PEM_END)
        context.load_verify_locations(cadata=first + end)
    return context
