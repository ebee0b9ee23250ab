"""An authority whose key is kept in a folder: for clusters whose processes run on many hosts.

    baton authority create ─▶ FOLDER/authority.pem, authority.key      (mode 0700; stays here)
    baton authority issue  ─▶ OUT/authority.pem, NAME.pem, NAME.key    (goes to the process's host)

A certificate that is issued again is for the same key, so that one file is replaced and the pair
always fits; running processes read it at their next connection. Keeps no state in memory.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from baton.deploy.host.authority import SKEW, CertificateFiles, files_of
from baton.deploy.host.certificate_forms import (
    Issuer,
    Subject,
    general_name,
    key_pem_of,
    new_issuer,
    new_key,
    pem_of,
    process_certificate,
    read_key,
)
from baton.deploy.host.instance import make_private_folder, write_private, writing
from baton.runtime.errors import ConfigError

MAX_HOSTS = 64
WRITABLE = "give a folder that this user can write, or free space on its disk"
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?")
_AUTHORITY = "authority"


@dataclass(frozen=True, slots=True)
class Request:
    """A request for a certificate: the process's name, the hosts at which it is called (none: it
    only calls others), and how long the certificate is valid."""

    name: str
    hosts: tuple[str, ...]
    days: int


def create_authority(folder: Path, days: int, now: datetime | None = None) -> Path:
    """Make an authority in `folder` and return its certificate's file. A key without a certificate
    is of a call that failed, which this one completes. Raises ConfigError if there is an authority
    already, or if the folder cannot be written."""
    begin = (now or datetime.now(UTC)) - SKEW
    files = files_of(folder, _AUTHORITY)
    with writing(folder, WRITABLE):
        if files.certificate.exists():
            raise ConfigError(f"{folder} has an authority already: give another folder")
        make_private_folder(folder, WRITABLE)
        key = _kept_key(files.key)
        issuer = new_issuer("Baton cluster", begin, begin + timedelta(days=days), key)
        write_private(files.certificate, pem_of(issuer.certificate))
    return files.certificate


def issue(
    folder: Path, out: Path, request: Request, now: datetime | None = None
) -> CertificateFiles:
    """Write a certificate of the authority in `folder`, its key, and the authority's certificate
    into `out`. Raises ConfigError."""
    if not _NAME.fullmatch(request.name) or request.name == _AUTHORITY:
        raise ConfigError(
            f"--name {request.name[:80]!r}: use at most 63 letters, digits and '-', and not "
            f"{_AUTHORITY!r}"
        )
    if len(request.hosts) > MAX_HOSTS:
        raise ConfigError(f"{len(request.hosts)} hosts: give at most {MAX_HOSTS} with --host")
    issuer = _read_issuer(folder)
    hosts = tuple(general_name(host, "--host") for host in request.hosts)
    begin = (now or datetime.now(UTC)) - SKEW
    end = min(begin + timedelta(days=request.days), issuer.certificate.not_valid_after_utc)
    if end <= begin:
        raise ConfigError(f"the authority in {folder} has ended: create another one")
    make_private_folder(out, WRITABLE)
    files = files_of(out, request.name)
    with writing(out, WRITABLE):
        key = _kept_key(files.key)
        subject = Subject(request.name, key.public_key(), hosts)
        certificate = process_certificate(subject, issuer, begin, end)
        write_private(files.certificate, pem_of(certificate))
        write_private(files.authority, pem_of(issuer.certificate))
    return files


def _read_issuer(folder: Path) -> Issuer:
    files = files_of(folder, _AUTHORITY)
    key = _read_key(files.key)
    try:
        certificate = x509.load_pem_x509_certificate(files.certificate.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{files.certificate} cannot be used ({error}): `baton authority create` makes one"
        ) from error
    return Issuer(certificate, key)


def _kept_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Return the key of an earlier call, or write a new one."""
    if path.exists():
        return _read_key(path)
    key = new_key()
    write_private(path, key_pem_of(key))
    return key


def _read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        return read_key(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be used ({error}): delete it, or give another folder; "
            "`baton authority create` makes an authority"
        ) from error
