"""Reads and checks certificates: that of this process with the authority that it trusts, and that
of a folder, with which a router proves its identity to clients.

PEM files: those of `security.certificate`, `security.key` and `security.authority`, or `tls.crt`
and `tls.key` of the folder in `router.tls`. A fault in one of them is reported with its setting and
a remedy, before a peer refuses the connection. Knows no gRPC and keeps no state.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID

from baton.runtime.cluster_config import SecurityConfig
from baton.runtime.errors import ConfigError

CERTIFICATE, KEY = "tls.crt", "tls.key"  # in a folder, as in a Secret of type kubernetes.io/tls
MIN_RSA_BITS = 2048
Stamp = tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM texts; `authority` is empty where no peer is checked. `ends` is the end of the first
    certificate in `chain`, in UTC."""

    authority: bytes
    chain: bytes
    key: bytes
    ends: datetime


@dataclass(frozen=True, slots=True)
class CertificatePair:
    """The files of a certificate and its key, and the settings that name them."""

    certificate: str
    key: str
    certificate_setting: str = "security.certificate"
    key_setting: str = "security.key"


def stamp(security: SecurityConfig) -> Stamp:
    """Return a value that changes when one of the three files changes."""
    return stamp_of(security.authority, security.certificate, security.key)


def stamp_of(*files: str) -> Stamp:
    """Return a value that changes when one of the files changes, or the rights on it."""
    return tuple(_stamp(file) for file in files)


def _stamp(file: str) -> tuple[int, int, int, int]:
    try:
        found = os.stat(file)
    except OSError:
        return (0, 0, 0, 0)  # `read` says what is wrong with it
    return (found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_size)


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
    pair = CertificatePair(security.certificate, security.key)
    chain, key, own = _read_pair(pair, now)
    authorities = _certificates("security.authority", security.authority, authority)
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


def pair_in(folder: str, setting: str) -> CertificatePair:
    """Return the files of a folder that `setting` names."""
    certificate, key = os.path.join(folder, CERTIFICATE), os.path.join(folder, KEY)
    return CertificatePair(certificate, key, setting, setting)


def read_folder(folder: str, setting: str, now: datetime) -> Certificates:
    """Return the certificate in a folder, for callers that show none. Raises ConfigError as `read`,
    and where there is no such folder."""
    if not os.path.isdir(folder):
        raise ConfigError(
            f"{setting} is {folder}, which is no folder: give the folder that holds {CERTIFICATE} "
            f"and {KEY}, or leave the setting empty to serve plain text"
        )
    pair = pair_in(folder, setting)
    chain, key, own = _read_pair(pair, now)
    _check_for_clients(pair, own[0])
    return Certificates(b"", chain, key, own[0].not_valid_after_utc)


def _check_for_clients(pair: CertificatePair, own: x509.Certificate) -> None:
    """Raise ConfigError where clients, those of gRPC included, would refuse a server with it."""
    key = own.public_key()
    if not (
        isinstance(key, rsa.RSAPublicKey)
        and key.key_size >= MIN_RSA_BITS
        or isinstance(key, ec.EllipticCurvePublicKey)
        and isinstance(key.curve, ec.SECP256R1 | ec.SECP384R1)
    ):
        raise ConfigError(
            f"{pair.key_setting}: clients of gRPC take no certificate with the kind of key in "
            f"{pair.key}: give an ECDSA key on P-256 or P-384, or an RSA key of {MIN_RSA_BITS} "
            "bits or more"
        )
    try:
        uses = own.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return  # for every use
    except (ValueError, x509.DuplicateExtension, x509.UnsupportedGeneralNameType) as error:
        raise ConfigError(
            f"{pair.certificate_setting}: an extension of the certificate in {pair.certificate} "
            f"cannot be read ({error}): issue another"
        ) from error
    if not {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE} & {*uses}:
        raise ConfigError(
            f"{pair.certificate_setting}: the certificate in {pair.certificate} is not for "
            "servers: issue it with the extended key usage serverAuth (`baton authority issue`: "
            "--role worker)"
        )


def _read_pair(pair: CertificatePair, now: datetime) -> tuple[bytes, bytes, list[x509.Certificate]]:
    """Return the chain and the key, and the certificates of the chain."""
    chain, _ = _content(pair.certificate_setting, pair.certificate)
    key, status = _content(pair.key_setting, pair.key)
    check_private(pair.key, status, pair.key_setting)
    own = _certificates(pair.certificate_setting, pair.certificate, chain)
    _check_pair(pair, own[0], key)
    _check_time(pair.certificate_setting, pair.certificate, own[0], now)
    return chain, key, own


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


def check_private(file: str, found: os.stat_result, setting: str = "security.key") -> None:
    """Raise ConfigError unless a key of this user is readable by this user only; one of root's also
    by a group, as mounted secrets are for containers of another user."""
    shared = 0o027 if found.st_uid == 0 else 0o077
    if found.st_uid not in (0, os.getuid()) or stat.S_IMODE(found.st_mode) & shared:
        raise ConfigError(
            f"{setting}: {file} can be read or changed by other users (mode "
            f"{stat.S_IMODE(found.st_mode):04o}): chmod 600 it as its owner, or mount the secret "
            "with mode 0400 (0440 where it is root's and for this process's group)"
        )


def _certificates(setting: str, file: str, content: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(content)
    except (ValueError, x509.InvalidVersion) as error:
        raise ConfigError(
            f"{setting}: {file} holds no certificate in PEM ({error}): it begins with "
            "-----BEGIN CERTIFICATE-----"
        ) from error


def _check_pair(pair: CertificatePair, own: x509.Certificate, key: bytes) -> None:
    try:
        public = load_pem_private_key(key, password=None).public_key()
    except TypeError as error:
        raise ConfigError(
            f"{pair.key_setting}: {pair.key} has a passphrase: give the key without one"
        ) from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(
            f"{pair.key_setting}: {pair.key} holds no private key in PEM ({error})"
        ) from error
    try:
        certified = own.public_key()
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(
            f"{pair.certificate_setting}: the certificate in {pair.certificate} is for a key of a "
            f"kind that is not supported ({error}): give one for an ECDSA or RSA key"
        ) from error
    if _public_bytes(public) != _public_bytes(certified):
        raise ConfigError(
            f"{pair.key_setting}: {pair.key} is not the key of the certificate in "
            f"{pair.certificate} ({pair.certificate_setting}): give the two that were made together"
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
            "UTC: set this machine's clock, or issue a new certificate"
        )


def _leads_to(own: list[x509.Certificate], authorities: list[x509.Certificate]) -> bool:
    """Whether each certificate is issued by the next, up to one that an authority issued."""
    for index, certificate in enumerate(own):
        if any(_issued(certificate, authority) for authority in authorities):
            return True
        if not any(_issued(certificate, issuer) for issuer in own[index + 1 : index + 2]):
            return False
    return False


def _issued(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True
