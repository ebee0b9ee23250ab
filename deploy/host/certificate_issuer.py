"""Certificates of an authority, built and signed; kept by the caller.

An `Issuer` is a key and its certificate: of one instance (authority.py) or of a release in a
cluster (release_secrets.py). Holds no other state.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from baton.runtime.errors import ConfigError

BEGIN = datetime(2000, 1, 1, tzinfo=UTC)
NEVER = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)  # RFC 5280, 4.1.2.5: it does not end


@dataclass(frozen=True, slots=True)
class Issuer:
    """An authority that can issue certificates to processes, and to no other authority."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @classmethod
    def create(cls, common_name: str) -> Issuer:
        """Return a new authority, whose certificate does not end."""
        key = new_key()
        name = _named(common_name)
        certificate = (
            _unsigned(name, name, key.public_key(), BEGIN, NEVER)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(key_cert_sign=True, crl_sign=True), critical=True)
            .sign(key, hashes.SHA256())
        )
        return cls(key, certificate)

    def issue(
        self,
        name: str,
        key: ec.EllipticCurvePublicKey,
        host: x509.GeneralName | None,
        begin: datetime,
        end: datetime,
    ) -> x509.Certificate:
        """Return the certificate of the process `name`: for its calls and, if it has a `host`,
        for calls to it at this name or address."""
        uses = [ExtendedKeyUsageOID.CLIENT_AUTH]
        names: list[x509.GeneralName] = [x509.DNSName(name)]
        if host is not None:
            uses.append(ExtendedKeyUsageOID.SERVER_AUTH)
            names.append(host)
        above = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        return (
            _unsigned(_named(name), self.certificate.subject, key, begin, end)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(digital_signature=True), critical=True)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(above, critical=False)
            .sign(self.key, hashes.SHA256())
        )


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def key_pem(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()


def certificate_pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(Encoding.PEM).decode()


def host_name(host: str) -> x509.GeneralName:
    """Return the address or name for a certificate. Raises ConfigError if none can name it."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        pass  # then it is a name
    try:
        return x509.DNSName(host)
    except ValueError as error:
        raise ConfigError(
            f"worker.host is {host!r}, and no certificate can name it: give an address or a "
            "name of letters, digits, '-' and '.'"
        ) from error


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
