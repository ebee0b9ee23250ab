"""The authority of one instance, and the certificates that it issues to the instance's processes.

    <instance's folder>/tls/     mode 0700
      authority.pem              whom every process believes
      <name>.pem, <name>.key     of one process; the key for this user alone

The authority's own key is in no file: it ends with `baton serve`, and nobody can issue another
certificate. So its certificate need not end, and those of processes are short-lived and renewed.
A renewed certificate is for the same key, so that one file is replaced and the pair always fits.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from baton.deploy.host.instance import write_private
from baton.runtime.errors import ConfigError

LIFE = timedelta(hours=24)  # of a process's certificate; renewed when half of it is over
SKEW = timedelta(minutes=5)  # that a clock may be set back
RETRY = timedelta(minutes=1)
BEGIN = datetime(2000, 1, 1, tzinfo=UTC)
NEVER = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)  # RFC 5280, 4.1.2.5: it does not end


@dataclass(frozen=True, slots=True)
class Files:
    """Where a process finds what it needs."""

    authority: Path
    certificate: Path
    key: Path

    def settings(self) -> dict[str, str]:
        return {
            "security.authority": str(self.authority),
            "security.certificate": str(self.certificate),
            "security.key": str(self.key),
        }


def files_of(folder: Path, name: str) -> Files:
    """Of the process `name`, in the folder `folder` of certificates."""
    return Files(folder / "authority.pem", folder / f"{name}.pem", folder / f"{name}.key")


@dataclass(frozen=True, slots=True)
class _Subject:
    key: ec.EllipticCurvePublicKey
    host: x509.GeneralName | None


class Authority:
    """Owned by `baton serve`. `folder` is made."""

    def __init__(
        self, folder: Path, now: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        self._folder = folder
        self._now = now
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._issued: dict[str, _Subject] = {}
        self._good = (BEGIN, NEVER)  # in this time nothing is to be renewed
        self._certificate = self._own()
        folder.mkdir(mode=0o700)
        write_private(folder / "authority.pem", _pem(self._certificate))

    def issue(self, name: str, host: str | None) -> Files:
        """A key and a certificate for the process `name`: to call others and, where it has a
        `host`, to be called at this name or address. Raises ConfigError for one that no
        certificate can bear."""
        known_as = None if host is None else _general_name(host)
        key = ec.generate_private_key(ec.SECP256R1())
        files = files_of(self._folder, name)
        pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        write_private(files.key, pem.decode())
        self._issued[name] = _Subject(key.public_key(), known_as)
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
        """New certificates of these processes; from when until when they need no others."""
        begin = self._now() - SKEW
        for name in names:
            certificate = self._process(name, self._issued[name], begin)
            write_private(files_of(self._folder, name).certificate, _pem(certificate))
        return begin, begin + SKEW + LIFE / 2

    def _own(self) -> x509.Certificate:
        name = _named("Baton instance")
        usage = _usage(key_cert_sign=True, crl_sign=True)
        return (
            _unsigned(name, name, self._key.public_key(), BEGIN, NEVER)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .sign(self._key, hashes.SHA256())
        )

    def _process(self, name: str, subject: _Subject, begin: datetime) -> x509.Certificate:
        issuer = self._certificate.subject
        uses = [ExtendedKeyUsageOID.CLIENT_AUTH]
        names: list[x509.GeneralName] = [x509.DNSName(name)]
        if subject.host is not None:
            uses.append(ExtendedKeyUsageOID.SERVER_AUTH)
            names.append(subject.host)
        above = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return (
            _unsigned(_named(name), issuer, subject.key, begin, begin + SKEW + LIFE)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(digital_signature=True), critical=True)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(above, critical=False)
            .sign(self._key, hashes.SHA256())
        )


def _unsigned(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    begin: datetime,
    end: datetime,
) -> x509.CertificateBuilder:
    identifier = x509.SubjectKeyIdentifier.from_public_key(key)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(end)
        .add_extension(identifier, critical=False)
    )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _usage(
    *, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False
) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        pass  # then it is a name
    try:
        return x509.DNSName(host)
    except ValueError as error:
        raise ConfigError(
            f"worker.host is {host!r}, and no certificate can bear that: give an address or a "
            "name of letters, digits, '-' and '.'"
        ) from error


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(Encoding.PEM).decode()
