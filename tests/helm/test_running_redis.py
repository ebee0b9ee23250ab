"""The release's own Redis as processes of this machine: it serves by TLS alone, and shows a
replaced certificate without a restart."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.retry import Retry

from baton.deploy.host.authority import CertificateFiles
from baton.deploy.host.release_secrets import create_certificates
from baton.runtime.cluster_config import RegistryConfig, SecurityConfig
from baton.runtime.registry import WorkerRecord
from baton.runtime.shared_registry.registry_location import open_registry
from tests.support.chart import Values, example, render
from tests.support.machine_speed import slowness
from tests.support.rendered_pods import Host, PlannedPod, PodProcess, demo_host, running_pods
from tests.support.waiting import wait_until

RELOADED_S = 20.0 * slowness()
RECORD = WorkerRecord("decode-0", "a" * 32, "decode", "10.0.0.1:1", "10.0.0.1:2", "m", 10)


@dataclass(frozen=True, slots=True)
class RunningRedis:
    """The release's Redis, and the files of a router."""

    host: Host
    pod: PodProcess
    router: CertificateFiles

    @property
    def port(self) -> int:
        return int(self.host.names["chat-baton-redis.llm:6379"].rpartition(":")[2])

    @property
    def password(self) -> str:
        return self.host.secrets.held["chat-baton-secrets"].data["redis-password"].decode()

    def files(self) -> Path:
        return self.host.folder / self.pod.name / "tls"

    def client(self, **change: object) -> Redis:
        given: dict[str, Any] = {
            "ssl": True,
            "ssl_ca_certs": str(self.router.authority),
            "ssl_certfile": str(self.router.certificate),
            "ssl_keyfile": str(self.router.key),
            "retry": Retry(NoBackoff(), 0),
        }
        return Redis("127.0.0.1", self.port, password=self.password, **{**given, **change})

    def shown(self) -> bytes:
        """Return the certificate that a new connection gets."""
        context = ssl.create_default_context(cafile=str(self.router.authority))
        context.load_cert_chain(self.router.certificate, self.router.key)
        with (
            socket.create_connection(("127.0.0.1", self.port)) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as connected,
        ):
            assert connected.version() == "TLSv1.3"
            return connected.getpeercert(binary_form=True) or b""

    def until(self, seen: str) -> None:
        """Wait until the container's log has a text."""
        log = self.pod.log.read_text
        wait_until(lambda: seen in log(), RELOADED_S, every_s=0.05, show=log)

    def answers(self, probe: str) -> bool:
        return self.pod.run(self.pod.container[probe]["exec"]["command"]).returncode == 0


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RunningRedis]:
    template = render(example("cpu-demo")).named("StatefulSet", "redis")["spec"]["template"]
    planned = {"redis": PlannedPod(template["spec"], "chat-baton-redis-0", "127.0.0.1")}
    with demo_host(tmp_path) as host, running_pods(host, planned) as running:
        data = host.secrets.held["chat-baton-router-tls"].data
        for name, content in data.items():
            (tmp_path / name).write_bytes(content)
        router = CertificateFiles(*(tmp_path / name for name in ("ca.crt", "tls.crt", "tls.key")))
        yield RunningRedis(host, running["redis"], router)


async def test_a_worker_registers_at_the_releases_redis(redis: RunningRedis) -> None:
    location = f"rediss://127.0.0.1:{redis.port}/0"
    config = RegistryConfig(location, redis.password, str(redis.router.authority))
    files = redis.router
    security = SecurityConfig("on", *map(str, (files.authority, files.certificate, files.key)))
    client = open_registry(config, security, ("a token",))
    try:
        await client.announce(RECORD)
        assert await client.workers() == [RECORD]
    finally:
        await client.close()


@pytest.mark.parametrize("change", [{"ssl": False}, {"ssl_certfile": None, "ssl_keyfile": None}])
def test_redis_serves_holders_of_a_certificate_alone(redis: RunningRedis, change: Values) -> None:
    with redis.client() as client:
        assert client.ping()
    with redis.client(**change) as refused, pytest.raises(RedisConnectionError):
        refused.ping()


def test_a_replaced_certificate_is_shown_without_a_restart(redis: RunningRedis) -> None:
    secrets, before = redis.host.secrets, redis.shown()
    del secrets.held["chat-baton-redis-tls"]
    names = ("127.0.0.1",)
    create_certificates(secrets, "chat-baton", "chat-baton-worker.llm", redis_names=names)
    with redis.client() as client:
        client.set("key", "value")
        for name, content in secrets.held["chat-baton-redis-tls"].data.items():
            (redis.files() / name).write_bytes(content)
        wait_until(
            lambda: redis.shown() != before,
            RELOADED_S,
            every_s=0.05,
            show=redis.pod.log.read_text,
        )
        assert client.get("key") == b"value"
    assert redis.answers("readinessProbe") and redis.answers("livenessProbe")


def test_an_unusable_certificate_makes_redis_unready_not_dead(redis: RunningRedis) -> None:
    before = redis.shown()
    assert redis.answers("readinessProbe")
    (redis.files() / "tls.crt").write_text("no certificate")
    redis.until(f"the certificate in {redis.files()} is not in use")
    assert redis.shown() == before
    assert not redis.answers("readinessProbe") and redis.answers("livenessProbe")
