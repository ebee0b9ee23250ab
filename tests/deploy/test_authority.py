"""What an instance's authority issues, which user may read it, and when it is renewed."""

from __future__ import annotations

import ipaddress
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID

from baton.deploy.host import authority as module
from baton.deploy.host.authority import LIFE, RETRY, SKEW, Authority, files_of
from baton.runtime.certificates import read
from baton.runtime.cluster_config import SecurityConfig
from baton.runtime.errors import ConfigError
from tests.support.calendar_clock import NOON, CalendarClock


def security(files: module.CertificateFiles) -> SecurityConfig:
    given = {name.split(".")[1]: value for name, value in files.settings().items()}
    return SecurityConfig(**given)


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def test_what_it_issues_fits_together_and_is_read_as_such(tmp_path: Path) -> None:
    files = Authority(tmp_path / "tls", CalendarClock()).issue("decode-0", "10.0.0.7")
    assert files == files_of(tmp_path / "tls", "decode-0")
    found = read(security(files), NOON)
    assert found.ends == NOON + LIFE
    key = load_pem_private_key(found.key, None)
    assert isinstance(key, ec.EllipticCurvePrivateKey) and key.curve.name == "secp256r1"


def test_keys_are_private_and_the_authoritys_is_in_no_file(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "tls", CalendarClock())
    authority.issue("decode-0", "127.0.0.1")
    authority.issue("router", None)
    assert (tmp_path / "tls").stat().st_mode & 0o777 == 0o700
    files = {path.name: path for path in (tmp_path / "tls").iterdir()}
    assert sorted(files) == [
        "authority.pem", "decode-0.key", "decode-0.pem", "router.key", "router.pem",
    ]  # fmt: skip
    assert {path.stat().st_mode & 0o777 for path in files.values()} == {0o600}
    own = certificate(files["authority.pem"]).public_key()
    for name in ("decode-0.key", "router.key"):
        assert load_pem_private_key(files[name].read_bytes(), None).public_key() != own


def test_a_worker_may_serve_and_call_at_its_address_alone(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "tls", CalendarClock())
    for host, known_as in (
        ("10.0.0.7", ipaddress.ip_address("10.0.0.7")),
        ("fd00::7", ipaddress.ip_address("fd00::7")),
        ("[fd00::7]", ipaddress.ip_address("fd00::7")),
        ("node-7.lan", "node-7.lan"),
    ):
        found = certificate(authority.issue("prefill-3", host).certificate).extensions
        names = found.get_extension_for_class(x509.SubjectAlternativeName).value
        assert [name.value for name in names] == ["prefill-3", known_as]
        uses = found.get_extension_for_class(x509.ExtendedKeyUsage).value
        assert set(uses) == {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}


def test_a_router_may_only_call(tmp_path: Path) -> None:
    found = certificate(
        Authority(tmp_path / "tls", CalendarClock()).issue("router", None).certificate
    )
    uses = found.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(uses) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [name.value for name in names] == ["router"]


def test_only_the_authority_signs_certificates(tmp_path: Path) -> None:
    files = Authority(tmp_path / "tls", CalendarClock()).issue("decode-0", "127.0.0.1")
    for path, signs in ((files.authority, True), (files.certificate, False)):
        found = certificate(path).extensions
        basic = found.get_extension_for_class(x509.BasicConstraints)
        usage = found.get_extension_for_class(x509.KeyUsage)
        assert basic.critical and usage.critical
        assert basic.value.ca is signs and usage.value.key_cert_sign is signs
        assert usage.value.digital_signature is not signs
    above = certificate(files.authority).extensions
    assert above.get_extension_for_class(x509.BasicConstraints).value.path_length == 0


def test_a_host_unfit_for_certificates_is_refused_by_its_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"worker\.host is 'knöten'"):
        Authority(tmp_path / "tls", CalendarClock()).issue("decode-0", "knöten")


def test_each_instance_has_an_authority_of_its_own(tmp_path: Path) -> None:
    one = Authority(tmp_path / "one", CalendarClock()).issue("decode-0", "127.0.0.1")
    two = Authority(tmp_path / "two", CalendarClock()).issue("decode-0", "127.0.0.1")
    mixed = module.CertificateFiles(one.authority, two.certificate, two.key)
    with pytest.raises(ConfigError, match=r"not issued by the authority"):
        read(security(mixed), NOON)


def test_half_way_to_their_end_all_are_renewed_for_the_same_keys(tmp_path: Path) -> None:
    clock = CalendarClock()
    authority = Authority(tmp_path / "tls", clock)
    files = [authority.issue("decode-0", "127.0.0.1"), authority.issue("router", None)]
    before = [(each.certificate.read_bytes(), each.key.read_bytes()) for each in files]
    clock.now += LIFE / 2 - timedelta(seconds=1)
    authority.renew()
    assert [(each.certificate.read_bytes(), each.key.read_bytes()) for each in files] == before
    clock.now += timedelta(seconds=2)
    authority.renew()
    for each, (old, key) in zip(files, before, strict=True):
        assert each.certificate.read_bytes() != old and each.key.read_bytes() == key
        assert read(security(each), clock.now).ends == clock.now + LIFE


def test_one_that_is_issued_late_does_not_put_off_the_others(tmp_path: Path) -> None:
    clock = CalendarClock()
    authority = Authority(tmp_path / "tls", clock)
    early = authority.issue("decode-0", "127.0.0.1")
    clock.now += LIFE / 3
    authority.issue("decode-1", "127.0.0.1")
    clock.now += LIFE / 3
    authority.renew()
    assert read(security(early), clock.now).ends == clock.now + LIFE


@pytest.mark.parametrize("step", [LIFE * 30, -timedelta(days=400), -2 * SKEW])
def test_after_a_leap_of_the_clock_they_are_valid_again(tmp_path: Path, step: timedelta) -> None:
    clock = CalendarClock()
    authority = Authority(tmp_path / "tls", clock)
    files = authority.issue("decode-0", "127.0.0.1")
    clock.now += step
    with pytest.raises(ConfigError, match=r"security\.certificate: .* (ended|begins) at"):
        read(security(files), clock.now)
    authority.renew()
    read(security(files), clock.now)


def test_a_full_disk_is_reported_and_retried_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = CalendarClock()
    authority = Authority(tmp_path / "tls", clock)
    files = authority.issue("decode-0", "127.0.0.1")
    clock.now += LIFE * 0.75
    with monkeypatch.context() as broken:

        def full(path: Path, text: str) -> None:
            raise OSError(28, "No space left on device")

        broken.setattr(module, "write_private", full)
        with pytest.raises(OSError, match="No space left"):
            authority.renew()
        authority.renew()  # not on every turn of a loop
    assert read(security(files), clock.now).ends == NOON + LIFE
    clock.now += RETRY + timedelta(seconds=1)
    authority.renew()
    assert read(security(files), clock.now).ends == clock.now + LIFE
