"""`baton authority`: what it creates and issues is what processes read, and what it refuses."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from baton.deploy.cli.main import main
from baton.deploy.host.authority import CertificateFiles
from baton.deploy.host.stored_authority import Request, create_authority, issue
from baton.runtime.certificates import read
from baton.runtime.cluster_config import SecurityConfig
from baton.runtime.errors import ConfigError
from chaos.redis_server import running_server
from tests.support.redis_server import required_tls_binary

NOON = datetime(2026, 5, 4, 12, tzinfo=UTC)
WORKER = Request("decode-0", ("10.0.0.7", "fd00::7", "decode-0.workers.svc"), 90)


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    create_authority(tmp_path / "authority", 100, NOON)
    return tmp_path / "authority"


def security(files: CertificateFiles) -> SecurityConfig:
    given = {name.split(".")[1]: value for name, value in files.settings().items()}
    return SecurityConfig(**given)


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def uses(path: Path) -> set[x509.ObjectIdentifier]:
    found = certificate(path).extensions.get_extension_for_class(x509.ExtendedKeyUsage)
    return set(found.value)


def test_an_issued_certificate_is_valid_and_bears_every_host(
    authority: Path, tmp_path: Path
) -> None:
    files = issue(authority, tmp_path / "out", WORKER, NOON)
    read(security(files), NOON)
    names = certificate(files.certificate).extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    assert [str(name.value) for name in names.value] == [
        "decode-0", "10.0.0.7", "fd00::7", "decode-0.workers.svc",
    ]  # fmt: skip
    assert uses(files.certificate) == {
        ExtendedKeyUsageOID.CLIENT_AUTH,
        ExtendedKeyUsageOID.SERVER_AUTH,
    }


def test_a_process_without_hosts_can_only_call(authority: Path, tmp_path: Path) -> None:
    files = issue(authority, tmp_path / "out", Request("router", (), 90), NOON)
    assert uses(files.certificate) == {ExtendedKeyUsageOID.CLIENT_AUTH}


def test_the_authoritys_key_stays_in_its_private_folder(authority: Path, tmp_path: Path) -> None:
    issue(authority, tmp_path / "out", WORKER, NOON)
    assert authority.stat().st_mode & 0o777 == 0o700
    files = {path.name: path for path in (tmp_path / "out").iterdir()}
    assert sorted(files) == ["authority.pem", "decode-0.key", "decode-0.pem"]
    assert {path.stat().st_mode & 0o777 for path in files.values()} == {0o600}
    secret = (authority / "authority.key").read_text()
    assert all(path.read_text() != secret for path in files.values())


def test_a_certificate_issued_again_keeps_the_key(authority: Path, tmp_path: Path) -> None:
    files = issue(authority, tmp_path / "out", WORKER, NOON)
    key = files.key.read_bytes()
    later = NOON + timedelta(days=60)
    issue(authority, tmp_path / "out", WORKER, later)
    assert files.key.read_bytes() == key
    read(security(files), later)


def test_no_certificate_outlives_its_authority(authority: Path, tmp_path: Path) -> None:
    late = NOON + timedelta(days=50)
    files = issue(authority, tmp_path / "out", WORKER, late)
    ends = certificate(authority / "authority.pem").not_valid_after_utc
    assert certificate(files.certificate).not_valid_after_utc == ends
    with pytest.raises(ConfigError, match="has ended: create another one"):
        issue(authority, tmp_path / "out", WORKER, NOON + timedelta(days=101))


def test_an_authority_is_not_replaced(authority: Path) -> None:
    with pytest.raises(ConfigError, match="has an authority already"):
        create_authority(authority, 100)


def test_an_unfinished_authority_is_completed(tmp_path: Path) -> None:
    folder = tmp_path / "authority"
    draft = folder / f"authority.pem.{os.getpid()}.draft"
    draft.mkdir(parents=True)  # its certificate cannot be written
    with pytest.raises(ConfigError, match=r"authority cannot be written \(Is a dir.*free space"):
        create_authority(folder, 100, NOON)
    key = (folder / "authority.key").read_bytes()
    draft.rmdir()
    create_authority(folder, 100, NOON)
    assert (folder / "authority.key").read_bytes() == key
    read(security(issue(folder, tmp_path / "out", WORKER, NOON)), NOON)


@pytest.mark.parametrize("name", ["decode-0.key", "decode-0.pem", "authority.pem"])
def test_a_file_that_cannot_be_written_is_a_wrong_folder(
    name: str, authority: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    (out / f"{name}.{os.getpid()}.draft").mkdir(parents=True)
    with pytest.raises(ConfigError, match=rf"{out} cannot be written \(Is a dir.*free space"):
        issue(authority, out, WORKER, NOON)


@pytest.mark.parametrize("name", ["", "authority", "a/b", "../x", "a" * 64, "-x"])
def test_a_name_that_is_no_file_is_refused(name: str, authority: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--name"):
        issue(authority, tmp_path / "out", replace(WORKER, name=name), NOON)


def test_a_host_that_no_certificate_can_bear_is_refused(authority: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--host is 'h\xf6st'"):
        issue(authority, tmp_path / "out", replace(WORKER, hosts=("h\xf6st",)), NOON)


def test_a_folder_without_an_authority_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="`baton authority create`"):
        issue(tmp_path, tmp_path / "out", WORKER, NOON)


def test_the_command_prints_the_settings_of_the_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = ["--folder", str(tmp_path / "authority")], ["--out", str(tmp_path / "out")]
    assert main(["authority", "create", *folder]) == 0
    capsys.readouterr()
    named = ["--role", "worker", "--name", "decode-0", "--host", "10.0.0.7"]
    assert main(["authority", "issue", *folder, *out, *named]) == 0
    lines = dict(line.split("=", 1) for line in capsys.readouterr().out.splitlines())
    given = {name.split(".")[1]: value for name, value in lines.items()}
    read(SecurityConfig(**given), datetime.now(UTC))


def test_the_command_prints_a_redis_servers_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = ["--folder", str(tmp_path / "authority")], ["--out", str(tmp_path / "out")]
    assert main(["authority", "create", *folder]) == 0
    capsys.readouterr()
    named = ["--role", "redis", "--name", "redis", "--host", "127.0.0.1"]
    assert main(["authority", "issue", *folder, *out, *named]) == 0
    given = dict(line.split(" ", 1) for line in capsys.readouterr().out.splitlines())
    files = CertificateFiles(
        *(Path(given[f"tls-{name}-file"]) for name in ("ca-cert", "cert", "key"))
    )
    with running_server(tmp_path, required_tls_binary(), tls=files) as server:
        assert server.flush() == 0


@pytest.mark.parametrize("given", [["worker"], ["redis"], ["router", "--host", "10.0.0.7"]])
def test_what_is_called_has_hosts_and_nothing_else(given: list[str], tmp_path: Path) -> None:
    where = ["--folder", str(tmp_path), "--out", str(tmp_path / "out"), "--name", "x"]
    assert main(["authority", "issue", *where, "--role", *given]) == 78
