"""Each file that does not fit is named with its setting and what to do."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID

from baton.deploy.host.authority import LIFE, Authority
from baton.runtime import certificates
from baton.runtime.certificates import read, stamp
from baton.runtime.cluster_config import SecurityConfig
from baton.runtime.errors import ConfigError

NOON = datetime(2026, 5, 4, 12, tzinfo=UTC)


def made(folder: Path, at: datetime = NOON) -> SecurityConfig:
    files = Authority(folder, lambda: at).issue("decode-0", "127.0.0.1")
    return SecurityConfig("on", str(files.authority), str(files.certificate), str(files.key))


@pytest.fixture
def good(tmp_path: Path) -> SecurityConfig:
    return made(tmp_path / "good")


def refused(security: SecurityConfig, words: str, now: datetime = NOON) -> None:
    with pytest.raises(ConfigError, match=words):
        read(security, now)


def test_the_files_content_and_end(good: SecurityConfig) -> None:
    found = read(good, NOON)
    assert found.authority == Path(good.authority).read_bytes()
    assert found.chain == Path(good.certificate).read_bytes()
    assert found.key == Path(good.key).read_bytes()
    assert found.ends == NOON + LIFE


def test_none_at_all_says_both_ways_out() -> None:
    refused(SecurityConfig(), r"security\.certificate is not set: `baton serve`.*security.tls=off")


@pytest.mark.parametrize("setting", ["authority", "certificate", "key"])
def test_a_file_that_is_not_there(good: SecurityConfig, setting: str) -> None:
    moved = replace(good, **{setting: "/nowhere/at.all"})
    refused(moved, rf"security\.{setting}: /nowhere/at\.all cannot be read \(No such file")


@pytest.mark.parametrize("setting", ["authority", "certificate"])
def test_a_file_that_holds_no_certificate(good: SecurityConfig, setting: str) -> None:
    Path(getattr(good, setting)).write_text("hello")
    refused(good, rf"security\.{setting}: .* holds no certificate in PEM")


def test_a_key_that_is_none(good: SecurityConfig) -> None:
    Path(good.key).write_text("hello")
    refused(good, r"security\.key: .* holds no private key in PEM")


def test_a_key_with_a_passphrase(good: SecurityConfig) -> None:
    key = load_pem_private_key(Path(good.key).read_bytes(), None)
    locked = BestAvailableEncryption(b"secret")
    Path(good.key).write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, locked))
    refused(good, r"security\.key: .* has a passphrase: give the key without one")


def test_the_key_of_another_certificate(good: SecurityConfig, tmp_path: Path) -> None:
    refused(replace(good, key=made(tmp_path / "other").key), r"security\.key: .* is not the key of")


def test_a_certificate_of_another_authority(good: SecurityConfig, tmp_path: Path) -> None:
    other = made(tmp_path / "other")
    refused(replace(good, authority=other.authority), r"security\.certificate: .* is not issued by")


def test_a_certificate_that_has_ended_or_not_begun(good: SecurityConfig) -> None:
    read(good, NOON + LIFE - timedelta(seconds=1))
    refused(
        good, r"security\.certificate: .* ended at 2026-05-05 12:00:00 UTC: put a new", NOON + LIFE
    )
    refused(good, r"begins at 2026-05-04 11:55:00 UTC: .*clock", NOON - timedelta(hours=1))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660, 0o602])
def test_a_key_that_others_may_read_or_change(good: SecurityConfig, mode: int) -> None:
    os.chmod(good.key, mode)
    if os.getuid() == 0 and mode == 0o640:
        read(good, NOON)  # a secret of root's that is mounted for a group
        return
    refused(good, rf"security\.key: .* other users \(mode {mode:04o}\): chmod 600")


@pytest.mark.parametrize(
    ("owner", "mode", "fits"),
    [
        (0, 0o440, True),
        (0, 0o400, True),
        (0, 0o444, False),
        (0, 0o460, False),
        (4242, 0o400, False),
    ],
)
def test_a_mounted_secret_may_be_roots_and_for_a_group(
    monkeypatch: pytest.MonkeyPatch, owner: int, mode: int, fits: bool
) -> None:
    found = os.stat_result((0o100000 | mode, 0, 0, 1, owner, 0, 0, 0, 0, 0))
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    if fits:
        certificates.check_private("key", found)
    else:
        with pytest.raises(ConfigError, match=r"security\.key"):
            certificates.check_private("key", found)


def test_a_key_is_held_to_be_private_by_the_file_that_was_read(
    good: SecurityConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is taken away, as where a secret is mounted again, once its content is here."""
    fstat, key = os.fstat, Path(good.key)
    content, inode = key.read_bytes(), key.stat().st_ino

    def taken_away(descriptor: int) -> os.stat_result:
        found = fstat(descriptor)
        if found.st_ino == inode:
            key.unlink()
        return found

    monkeypatch.setattr(os, "fstat", taken_away)
    assert read(good, NOON).key == content and not key.exists()


def test_a_certificate_for_a_key_of_an_unknown_kind(
    good: SecurityConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Strange:
        def public_key(self) -> object:
            raise UnsupportedAlgorithm("curve 1.2.3")

    monkeypatch.setattr(certificates, "_certificates", lambda *_: [Strange()])
    refused(
        good, r"security\.certificate: .* not supported \(curve 1\.2\.3\): give one for an ECDSA"
    )


def named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def signed(
    subject: str, issuer: str, key: object, by: ec.EllipticCurvePrivateKey, days: int = 1
) -> bytes:
    certificate = (
        x509.CertificateBuilder()
        .subject_name(named(subject))
        .issuer_name(named(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOON - timedelta(days=9))
        .not_valid_after(NOON + timedelta(days=days))
        .sign(by, hashes.SHA256())
    )
    return certificate.public_bytes(Encoding.PEM)


class Chain:
    """root ─▶ middle ─▶ leaf, as other tools make them: an RSA key, no extensions."""

    def __init__(self, folder: Path, root_days: int = 1) -> None:
        self.root_key = ec.generate_private_key(ec.SECP384R1())
        middle_key = ec.generate_private_key(ec.SECP256R1())
        leaf_key = rsa.generate_private_key(65537, 2048)
        self.root = signed("root", "root", self.root_key, self.root_key, root_days)
        self.middle = signed("middle", "root", middle_key, self.root_key)
        self.leaf = signed("leaf", "middle", leaf_key, middle_key)
        folder.mkdir()
        key = leaf_key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
        self.folder = folder
        self._write("key", key)

    def security(self, authority: bytes, chain: bytes) -> SecurityConfig:
        return SecurityConfig(
            "on",
            self._write("authority", authority),
            self._write("chain", chain),
            str(self.folder / "key"),
        )

    def _write(self, name: str, content: bytes) -> str:
        path = self.folder / name
        path.write_bytes(content)
        path.chmod(0o600)
        return str(path)


def test_a_chain_leads_to_the_authority(tmp_path: Path) -> None:
    chain = Chain(tmp_path / "chain")
    read(chain.security(chain.root, chain.leaf + chain.middle), NOON)
    read(chain.security(chain.middle, chain.leaf), NOON)
    refused(chain.security(chain.root, chain.leaf), "is not issued by")
    stranger = Chain(tmp_path / "stranger")
    refused(chain.security(chain.root, chain.leaf + stranger.middle + chain.middle), "not issued")
    refused(chain.security(stranger.root, chain.leaf + chain.middle), "is not issued by")


def test_a_file_of_authorities_may_hold_one_that_has_ended(tmp_path: Path) -> None:
    chain, old = Chain(tmp_path / "chain"), Chain(tmp_path / "old", root_days=-1)
    whole = chain.leaf + chain.middle
    read(chain.security(old.root + chain.root, whole), NOON)
    refused(chain.security(old.root, whole), r"security\.authority: the certificate .* ended at")


def test_an_ended_authority_vouches_for_no_process(tmp_path: Path) -> None:
    ended, other = Chain(tmp_path / "ended", root_days=-1), Chain(tmp_path / "other")
    both = ended.root + other.root
    refused(ended.security(both, ended.leaf + ended.middle), "is not issued by")


def test_a_stamp_tells_of_every_change(good: SecurityConfig, tmp_path: Path) -> None:
    stamps = {stamp(good)}
    for file in (good.authority, good.certificate, good.key):
        os.replace(_copy(Path(file), tmp_path), file)
        stamps.add(stamp(good))
    Path(good.key).unlink()
    stamps.add(stamp(good))
    assert len(stamps) == 5


def _copy(path: Path, folder: Path) -> Path:
    copy = folder / "copy"
    copy.write_bytes(path.read_bytes())
    return copy
