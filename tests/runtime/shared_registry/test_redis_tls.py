"""A registry over rediss://, with certificates that `baton authority` has issued."""

from __future__ import annotations

import contextlib
import shutil
import ssl
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from baton.deploy.host.authority import CertificateFiles
from baton.deploy.host.stored_authority import Request, create_authority, issue
from baton.runtime.cluster_config import RegistryConfig, SecurityConfig
from baton.runtime.registry_client import RegistryUnavailable
from baton.runtime.shared_registry.registry_location import check_tls_files, open_registry
from chaos.redis_server import RedisServer, running_server
from tests.runtime.shared_registry.conftest import ONE, TOKEN
from tests.support.redis_proxy import running_proxy
from tests.support.redis_server import required_binary, required_tls_binary
from tests.support.waiting import eventually

Serve = Callable[[CertificateFiles], contextlib.AbstractContextManager[RegistryConfig]]


def issued(folder: Path, authority: str, name: str, *hosts: str) -> CertificateFiles:
    """A certificate of the authority of that name, which is made at its first use."""
    if not (folder / authority).is_dir():
        create_authority(folder / authority, 10)
    return issue(folder / authority, folder / authority / name, Request(name, hosts, 10))


def server_context(files: CertificateFiles) -> ssl.SSLContext:
    """TLS of a server that asks each client for a certificate of its own authority."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(files.authority))
    context.load_cert_chain(files.certificate, files.key)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def security(files: CertificateFiles) -> SecurityConfig:
    return SecurityConfig("on", str(files.authority), str(files.certificate), str(files.key))


@pytest.fixture(params=["own", "proxy"])
def serve(request: pytest.FixtureRequest, tmp_path: Path) -> Serve:
    """Runs a server with a certificate until a context ends: one that speaks TLS itself, or one
    behind a proxy that does."""
    if request.param == "own":
        return lambda files: own_tls(tmp_path, files)
    return lambda files: proxied_tls(tmp_path, files)


@contextlib.contextmanager
def own_tls(folder: Path, files: CertificateFiles) -> Iterator[RegistryConfig]:
    with running_server(folder, required_tls_binary(), tls=files) as server:
        yield RegistryConfig(location=server.url)


@contextlib.contextmanager
def proxied_tls(folder: Path, files: CertificateFiles) -> Iterator[RegistryConfig]:
    with (
        running_server(folder, required_binary()) as server,
        running_proxy(server.port, server_context(files)) as proxy,
    ):
        yield RegistryConfig(location=f"rediss://127.0.0.1:{proxy.port}/0")


async def test_processes_of_one_authority_meet_over_tls(tmp_path: Path, serve: Serve) -> None:
    with serve(issued(tmp_path, "ours", "redis", "127.0.0.1")) as config:
        worker_files, router_files = (issued(tmp_path, "ours", e) for e in ("worker", "router"))
        worker = open_registry(config, security(worker_files), (TOKEN,))
        router = open_registry(config, security(router_files), (TOKEN,))
        try:
            await worker.announce(ONE)
            assert await router.workers() == [ONE]
        finally:
            await worker.close()
            await router.close()


@pytest.mark.parametrize(("authority", "host"), [("another", "127.0.0.1"), ("ours", "127.0.0.9")])
async def test_a_server_with_a_wrong_certificate_is_not_used(
    authority: str, host: str, tmp_path: Path, serve: Serve
) -> None:
    mine = issued(tmp_path, "ours", "worker")
    with serve(issued(tmp_path, authority, "redis", host)) as config:
        client = open_registry(config, security(mine), (TOKEN,))
        try:
            with capture_logs() as logs, pytest.raises(RegistryUnavailable, match="certificate"):
                await client.announce(ONE)
        finally:
            await client.close()
    assert logs[0]["event"] == "registry unavailable"


async def test_a_client_of_another_authority_is_refused(tmp_path: Path, serve: Serve) -> None:
    theirs, ours = (issued(tmp_path, e, "redis", "127.0.0.1") for e in ("another", "ours"))
    foreign = issued(tmp_path, "another", "worker")
    with serve(ours) as config:
        known = SecurityConfig(
            "on", str(ours.authority), str(foreign.certificate), str(foreign.key)
        )
        client = open_registry(config, known, (TOKEN,))
        try:
            with pytest.raises(RegistryUnavailable):
                await client.announce(ONE)
        finally:
            await client.close()
    assert theirs.authority.read_bytes() != ours.authority.read_bytes()


async def test_a_replaced_certificate_is_read_at_the_next_try(tmp_path: Path, serve: Serve) -> None:
    """A router that runs for longer than its certificate is valid goes on with the next one."""
    server = issued(tmp_path, "ours", "redis", "127.0.0.1")
    good, used = issued(tmp_path, "ours", "worker"), issued(tmp_path, "another", "worker")
    files = SecurityConfig("on", str(server.authority), str(used.certificate), str(used.key))
    with serve(server) as config:
        client = open_registry(config, files, (TOKEN,))

        async def announced() -> bool:
            """A handshake may take longer than the client's limit where processors are busy."""
            try:
                await client.announce(ONE)
            except RegistryUnavailable:
                return False
            return True

        try:
            with pytest.raises(RegistryUnavailable):
                await client.announce(ONE)
            shutil.copyfile(good.certificate, used.certificate)
            shutil.copyfile(good.key, used.key)
            await eventually(announced)
        finally:
            await client.close()


async def test_a_file_that_is_gone_later_is_named_and_read_again(tmp_path: Path) -> None:
    own = security(issued(tmp_path, "ours", "worker"))
    authority = tmp_path / "registry.pem"
    shutil.copyfile(own.authority, authority)
    config = RegistryConfig(location="rediss://127.0.0.1:1/0", authority=str(authority))
    check_tls_files(config, own)
    client = open_registry(config, own, (TOKEN,))
    named = f"registry.authority: {authority} cannot be used"
    try:
        authority.unlink()
        with pytest.raises(RegistryUnavailable, match=named):
            await client.announce(ONE)
        shutil.copyfile(own.authority, authority)
        with pytest.raises(RegistryUnavailable) as refused:  # nothing listens there
            await client.announce(ONE)
    finally:
        await client.close()
    assert named not in str(refused.value)


@pytest.mark.parametrize("alone", [True, False])
async def test_authorities_of_the_system_count_unless_one_is_named(
    alone: bool, tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = issued(tmp_path, "ours", "worker")
    theirs = issued(tmp_path, "public", "redis", "127.0.0.1")
    monkeypatch.setenv("SSL_CERT_FILE", str(theirs.authority))
    with serve(replace(theirs, authority=mine.authority)) as config:
        named = str(mine.authority) if alone else ""
        client = open_registry(replace(config, authority=named), security(mine), (TOKEN,))
        try:
            with pytest.raises(RegistryUnavailable) if alone else contextlib.nullcontext():
                await client.announce(ONE)
        finally:
            await client.close()


async def test_a_server_without_tls_is_not_used(tmp_path: Path, server: RedisServer) -> None:
    config = RegistryConfig(location=f"rediss://127.0.0.1:{server.port}/0")
    client = open_registry(config, security(issued(tmp_path, "ours", "worker")), (TOKEN,))
    try:
        with pytest.raises(RegistryUnavailable):
            await client.announce(ONE)
    finally:
        await client.close()


async def test_a_client_without_tls_is_not_served(tmp_path: Path) -> None:
    with own_tls(tmp_path, issued(tmp_path, "ours", "redis", "127.0.0.1")) as config:
        plain = replace(config, location=config.location.replace("rediss", "redis"))
        client = open_registry(plain, SecurityConfig(tls="off"), (TOKEN,))
        try:
            with pytest.raises(RegistryUnavailable):
                await client.announce(ONE)
        finally:
            await client.close()
