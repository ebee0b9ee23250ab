"""A registry over rediss://, with certificates that `baton authority` has issued."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from baton.deploy.host.authority import CertificateFiles
from baton.deploy.host.stored_authority import Request, create_authority, issue
from baton.runtime.cluster_config import RegistryConfig, SecurityConfig
from baton.runtime.registry_client import RegistryUnavailable
from baton.runtime.shared_registry.registry_location import open_registry
from chaos.redis_server import RedisServer
from tests.runtime.shared_registry.conftest import ONE, TOKEN
from tests.support.redis_proxy import running_proxy


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


@contextlib.contextmanager
def tls_server(server: RedisServer, files: CertificateFiles) -> Iterator[RegistryConfig]:
    with running_proxy(server.port, server_context(files)) as proxy:
        yield RegistryConfig(location=f"rediss://127.0.0.1:{proxy.port}/0")


async def test_processes_of_one_authority_meet_over_tls(
    tmp_path: Path, server: RedisServer
) -> None:
    redis = issued(tmp_path, "ours", "redis", "127.0.0.1")
    with tls_server(server, redis) as config:
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
    authority: str, host: str, tmp_path: Path, server: RedisServer
) -> None:
    mine = issued(tmp_path, "ours", "worker")
    with tls_server(server, issued(tmp_path, authority, "redis", host)) as config:
        client = open_registry(config, security(mine), (TOKEN,))
        try:
            with capture_logs() as logs, pytest.raises(RegistryUnavailable, match="certificate"):
                await client.announce(ONE)
        finally:
            await client.close()
    assert logs[0]["event"] == "registry unavailable"


async def test_a_client_of_another_authority_is_refused(
    tmp_path: Path, server: RedisServer
) -> None:
    theirs, ours = (issued(tmp_path, e, "redis", "127.0.0.1") for e in ("another", "ours"))
    foreign = issued(tmp_path, "another", "worker")
    with tls_server(server, ours) as config:
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


async def test_a_server_without_tls_is_not_used(tmp_path: Path, server: RedisServer) -> None:
    config = RegistryConfig(location=f"rediss://127.0.0.1:{server.port}/0")
    client = open_registry(config, security(issued(tmp_path, "ours", "worker")), (TOKEN,))
    try:
        with pytest.raises(RegistryUnavailable):
            await client.announce(ONE)
    finally:
        await client.close()
