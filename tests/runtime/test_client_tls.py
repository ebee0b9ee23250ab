"""The certificate for clients: which files are refused, and how changed ones come into use."""

from __future__ import annotations

import errno
import os
import ssl
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtensionOID, NameOID
from structlog.testing import capture_logs

from baton.deploy.host.authority import LIFE
from baton.deploy.host.certificate_forms import Subject, new_issuer, pem_of, process_certificate
from baton.runtime.errors import ConfigError
from baton.runtime.serving.client_tls import ClientTls, client_tls
from tests.support.calendar_clock import NOON, CalendarClock
from tests.support.client_certificates import ClientCertificates

PrivateKey = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey


@pytest.fixture
def clock() -> CalendarClock:
    return CalendarClock()


@pytest.fixture
def certificates(tmp_path: Path, clock: CalendarClock) -> ClientCertificates:
    return ClientCertificates(tmp_path / "clients", clock)


def test_without_a_folder_there_is_no_tls() -> None:
    assert client_tls("") is None


def refused(certificates: ClientCertificates, words: str, now: datetime = NOON) -> None:
    with pytest.raises(ConfigError, match=rf"^router\.tls.*{words}"):
        ClientTls(str(certificates.folder), lambda: now)


def test_wrong_files_are_refused_by_name(certificates: ClientCertificates) -> None:
    key = certificates.folder / "tls.key"
    ClientTls(str(certificates.folder), lambda: NOON)
    key.chmod(0o644)
    refused(certificates, r"tls\.key can be read or changed by other users \(mode 0644\)")
    key.chmod(0o600)
    refused(certificates, r"tls\.crt ended at .*: put a new one in its place", NOON + LIFE)
    refused(certificates, r"tls\.crt begins at .*clock", NOON - timedelta(days=1))
    locked = BestAvailableEncryption(b"secret")
    own = load_pem_private_key(key.read_bytes(), None)
    key.write_bytes(own.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, locked))
    refused(certificates, r"tls\.key has a passphrase: give the key without one")
    key.write_bytes(b"hello")
    refused(certificates, r"tls\.key holds no private key in PEM")


def issue_for(certificates: ClientCertificates, key: PrivateKey) -> None:
    """Put a certificate for `key` into the folder; it is for calls alone, since it has no host."""
    issuer = new_issuer("old", NOON, NOON + LIFE)
    certificate = process_certificate(
        Subject("odd", key.public_key(), ()), issuer, NOON, NOON + LIFE
    )
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    certificates.replace(pem_of(certificate).encode(), pem)


@pytest.mark.parametrize(
    "key",
    [
        rsa.generate_private_key(65537, 1024),
        ec.generate_private_key(ec.SECP521R1()),
        ed25519.Ed25519PrivateKey.generate(),
    ],
    ids=["short RSA", "P-521", "Ed25519"],
)
def test_a_kind_of_key_that_clients_refuse_is_refused(
    certificates: ClientCertificates, key: PrivateKey
) -> None:
    issue_for(certificates, key)
    refused(certificates, r"P-256 or P-384, or an RSA key of 2048 bits or more")


def test_a_certificate_for_calls_alone_is_refused(certificates: ClientCertificates) -> None:
    issue_for(certificates, ec.generate_private_key(ec.SECP256R1()))
    refused(certificates, r"not for servers: .*serverAuth.*--role worker")


def test_a_certificate_with_an_unreadable_extension_is_refused(
    certificates: ClientCertificates,
) -> None:
    """It was an error of another kind, which no log named."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "odd")])
    alternative = x509.UnrecognizedExtension(ExtensionOID.SUBJECT_ALTERNATIVE_NAME, b"rubbish")
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), 1, NOON, NOON + LIFE)
        .add_extension(alternative, critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    certificates.replace(pem_of(made).encode(), pem)
    refused(certificates, r"an extension of the certificate in .* cannot be read .*: issue another")


def test_a_version_that_does_not_exist_is_refused(certificates: ClientCertificates) -> None:
    certificate, key = certificates.issue()
    version_3, version_6 = bytes.fromhex("a003020102"), bytes.fromhex("a003020105")
    changed = ssl.PEM_cert_to_DER_cert(certificate.decode()).replace(version_3, version_6, 1)
    certificates.replace(ssl.DER_cert_to_PEM_cert(changed).encode(), key)
    refused(certificates, "holds no certificate in PEM")


def test_an_unusable_file_is_not_read_for_each_connection(
    certificates: ClientCertificates, clock: CalendarClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = ClientTls(str(certificates.folder), clock)
    first, read = tls.context(), []
    certificates.replace(b"half a file")
    fstat = os.fstat

    def note(file: int) -> os.stat_result:
        read.append(file)
        return fstat(file)

    monkeypatch.setattr(os, "fstat", note)
    with capture_logs() as logged:
        assert all(tls.context() is first for _ in range(100))
        once = len(read)
        clock.now += timedelta(seconds=2)
        assert tls.context() is first and len(read) == 2 * once > 0
    assert len(logged) == 1


def test_a_certificate_that_begins_later_is_used_then(
    certificates: ClientCertificates, clock: CalendarClock
) -> None:
    tls = ClientTls(str(certificates.folder), clock)
    first = tls.context()
    clock.now += timedelta(hours=1)
    certificates.replace()
    clock.now -= timedelta(hours=1)
    with capture_logs() as logged:
        for _ in range(3):  # it is read again each time, and reported once
            assert tls.context() is first
            clock.now += timedelta(seconds=2)
        clock.now += timedelta(hours=1)
        assert tls.context() is not first
    assert [line["event"] for line in logged] == ["certificate unusable", "certificate reloaded"]


def test_no_free_descriptor_costs_no_connection(
    certificates: ClientCertificates, clock: CalendarClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_free(_: str) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    tls = ClientTls(str(certificates.folder), clock)
    first = tls.context()
    certificates.replace()
    with monkeypatch.context() as without, capture_logs() as logged:
        without.setattr(os, "memfd_create", none_free)
        assert tls.context() is first
    assert "Too many open files" in logged[0]["reason"]
    clock.now += timedelta(seconds=2)
    assert tls.context() is not first


def test_changed_rights_are_seen(certificates: ClientCertificates, clock: CalendarClock) -> None:
    """The file's content and time of change stay as they were."""
    tls = ClientTls(str(certificates.folder), clock)
    certificates.replace()
    key = certificates.folder / "tls.key"
    key.chmod(0o644)
    first = tls.context()
    key.chmod(0o600)
    assert tls.context() is not first


def test_the_end_of_the_one_in_use_is_said_once(
    certificates: ClientCertificates, clock: CalendarClock
) -> None:
    tls = ClientTls(str(certificates.folder), clock)
    first = tls.context()
    clock.now += LIFE
    with capture_logs() as logged:
        assert all(tls.context() is first for _ in range(3))
    (line,) = logged
    assert "(router.tls) ended at" in line["reason"] and "clients refuse it" in line["reason"]
