"""Reads and checks the certificate of this process, its key, and the authority that it trusts.

Three PEM files, named by `security.certificate`, `security.key` and `security.authority`. A fault
in one of them is reported with its setting and a remedy, before a peer refuses the connection.
Knows no gRPC and keeps no state.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
)

from baton.runtime.cluster_config import SecurityConfig
from baton.runtime.errors import ConfigError

Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM texts for gRPC. `ends` is the end of the process's own certificate, in UTC."""

    authority: bytes
    chain: bytes
    key: bytes
    ends: datetime


def stamp(security: SecurityConfig) -> Stamp:
    """Return a value that changes when one of the three files changes."""
    return tuple(_stamp(file) for file in (security.authority, security.certificate, security.key))


def _stamp(file: str) -> tuple[int, int, int]:
    try:
        found = os.stat(file)
    except OSError:
        return (0, 0, 0)  # `read` says what is wrong with it
    return (found.st_mtime_ns, found.st_ino, found.st_size)


def read(security: SecurityConfig, now: datetime) -> Certificates:
    """Return the files' content. Raises ConfigError, naming the file, its setting and the remedy,
    if a file is missing or no PEM, if others may read the key or it is another certificate's, and
    if the certificate is not valid at `now` (UTC) or was not issued by the authority."""
    if not security.certificate:
        raise ConfigError(
            "security.certificate is not set: `baton serve` makes certificates by itself, and a "
            "process that is started alone needs security.authority, security.certificate and "
            "security.key (or security.tls=off, on a network that only you can reach)"
        )
    authority, _ = _content("security.authority", security.authority)
    chain, _ = _content("security.certificate", security.certificate)
    key, status = _content("security.key", security.key)
    check_private(security.key, status)
    authorities = _certificates("security.authority", security.authority, authority)
    own = _certificates("security.certificate", security.certificate, chain)
    _check_pair(security, own[0], key)
    _check_time("security.certificate", security.certificate, own[0], now)
    valid = [each for each in authorities if _is_valid(each, now)]
    if not valid:
        _check_time("security.authority", security.authority, authorities[0], now)
    if not _leads_to(own, valid):
        raise ConfigError(
            f"security.certificate: {security.certificate} is not issued by the authority in "
            f"{security.authority} (security.authority): give the certificate that it issued "
            "for this process, followed by those between the two"
        )
    return Certificates(authority, chain, key, own[0].not_valid_after_utc)


def _content(setting: str, file: str) -> tuple[bytes, os.stat_result]:
    """Return the content and the status of one open file, since its path may be replaced."""
    try:
        with open(file, "rb") as opened:
            return opened.read(), os.fstat(opened.fileno())
    except OSError as error:
        raise ConfigError(
            f"{setting}: {file} cannot be read ({error.strerror or error}): give a PEM file that "
            "this user may read"
        ) from error


def check_private(file: str, found: os.stat_result) -> None:
    """Raise ConfigError unless a key of this user is readable by this user only; one of root's also
    by a group, as mounted secrets are for containers of another user."""
    shared = 0o027 if found.st_uid == 0 else 0o077
    if found.st_uid not in (0, os.getuid()) or stat.S_IMODE(found.st_mode) & shared:
        raise ConfigError(
            f"security.key: {file} can be read or changed by other users (mode "
            f"{stat.S_IMODE(found.st_mode):04o}): chmod 600 it as its owner, or mount the secret "
            "with mode 0400 (0440 where it is root's and for this process's group)"
        )


def _certificates(setting: str, file: str, content: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(content)
    except ValueError as error:
        raise ConfigError(
            f"{setting}: {file} holds no certificate in PEM ({error}): it begins with "
            "-----BEGIN CERTIFICATE-----"
        ) from error


def _check_pair(security: SecurityConfig, own: x509.Certificate, key: bytes) -> None:
    try:
        public = load_pem_private_key(key, password=None).public_key()
    except TypeError as error:
        raise ConfigError(
            f"security.key: {security.key} has a passphrase: give the key without one"
        ) from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(
            f"security.key: {security.key} holds no private key in PEM ({error})"
        ) from error
    try:
        certified = own.public_key()
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(
            f"security.certificate: the certificate in {security.certificate} is for a key of a "
            f"kind that is not supported ({error}): give one for an ECDSA or RSA key"
        ) from error
    if _public_bytes(public) != _public_bytes(certified):
        raise ConfigError(
            f"security.key: {security.key} is not the key of the certificate in "
            f"{security.certificate} (security.certificate): give the two that were made together"
        )


def _public_bytes(key: Any) -> bytes:
    encoded: bytes = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return encoded


def _is_valid(found: x509.Certificate, now: datetime) -> bool:
    return found.not_valid_before_utc <= now < found.not_valid_after_utc


def _check_time(setting: str, file: str, found: x509.Certificate, now: datetime) -> None:
    if found.not_valid_after_utc <= now:
        raise ConfigError(
            f"{setting}: the certificate in {file} ended at {found.not_valid_after_utc:%F %T} UTC: "
            "put a new one in its place"
        )
    if found.not_valid_before_utc > now:
        raise ConfigError(
            f"{setting}: the certificate in {file} begins at {found.not_valid_before_utc:%F %T} "
            f"UTC, and it is {now:%F %T}: set this machine's clock, or issue a new certificate"
        )


def _leads_to(own: list[x509.Certificate], authorities: list[x509.Certificate]) -> bool:
    """Whether each certificate is issued by the next, up to one that an authority issued."""
    for place, certificate in enumerate(own):
        if any(_issued(certificate, authority) for authority in authorities):
            return True
        if not any(_issued(certificate, issuer) for issuer in own[place + 1 : place + 2]):
            return False
    return False


def _issued(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True
