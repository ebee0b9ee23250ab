"""Keys and certificates of an authority and of the processes that trust it: their contents.

X.509 with ECDSA keys on P-256. A process's certificate names it, and the hosts at which others
call it. Holds no state and writes no file.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from datetime import datetime

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from baton.runtime.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Issuer:
    """An authority's certificate and its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


@dataclass(frozen=True, slots=True)
class Subject:
    """A process. With `hosts` others call it there; without, it only calls others."""

    name: str
    key: ec.EllipticCurvePublicKey
    hosts: tuple[x509.GeneralName, ...]


def new_issuer(
    name: str, begin: datetime, end: datetime, key: ec.EllipticCurvePrivateKey | None = None
) -> Issuer:
    """Return a new authority, whose certificate it has signed itself, with this key or a new
    one."""
    own, key = _named(name), key or new_key()
    certificate = (
        _unsigned(own, own, key.public_key(), begin, end)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(key_cert_sign=True, crl_sign=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    return Issuer(certificate, key)


def process_certificate(
    subject: Subject, issuer: Issuer, begin: datetime, end: datetime
) -> x509.Certificate:
    """Return the certificate of a process."""
    uses = [ExtendedKeyUsageOID.CLIENT_AUTH]
    if subject.hosts:
        uses.append(ExtendedKeyUsageOID.SERVER_AUTH)
    names = dict.fromkeys([x509.DNSName(subject.name), *subject.hosts])
    above = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.key.public_key())
    return (
        _unsigned(_named(subject.name), issuer.certificate.subject, subject.key, begin, end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(x509.SubjectAlternativeName(list(names)), critical=False)
        .add_extension(above, critical=False)
        .sign(issuer.key, hashes.SHA256())
    )


def general_name(host: str, option: str) -> x509.GeneralName:
    """Return an address or a name as certificates bear it. Raises ConfigError, which names the
    option that `host` is from."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        pass  # then it is a name
    try:
        return x509.DNSName(host)
    except ValueError as error:
        raise ConfigError(
            f"{option} is {host!r}, and no certificate can bear that: give an address or a "
            "name of letters, digits, '-' and '.'"
        ) from error


def pem_of(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(Encoding.PEM).decode()


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def key_pem_of(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()


def read_key(pem: bytes) -> ec.EllipticCurvePrivateKey:
    """Return the key in `pem`. Raises ValueError if it is no key for ECDSA, or has a passphrase."""
    try:
        key = load_pem_private_key(pem, None)
    except TypeError as error:  # it has a passphrase
        raise ValueError(str(error)) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("it is not a key for ECDSA")
    return key


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
