"""`baton cluster status`: every worker asked over mutual TLS, and what is wrong said in a line."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from baton.deploy.cli import cluster_status, doctor
from baton.deploy.cli.cluster_status import ClusterStatus, WorkerRow, status_of
from baton.deploy.cli.main import main
from baton.deploy.control.orders import Cluster, cluster_at, find
from baton.deploy.host.cluster_secrets import ClusterSecrets
from baton.runtime.cluster_config import RegistryConfig, SecurityConfig
from baton.runtime.config import Config
from baton.runtime.registry import DirectoryRegistry, WorkerRecord
from baton.runtime.shared_registry.registry_location import open_registry, open_reports
from baton.runtime.shared_registry.router_report import RouterReport
from chaos.redis_server import RedisServer, running_server
from tests.support.control_server import ControlServer, served_control
from tests.support.redis_server import required_binary

TOKEN = "the instance's secret"  # as the control port has it
CLOSED = "127.0.0.1:9"  # nothing listens there
BOOT = "b" * 32


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[ControlServer]:
    with served_control(tmp_path / "tls") as server:
        yield server


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with running_server(tmp_path, required_binary()) as made:
        yield made


def record_of(worker: ControlServer) -> WorkerRecord:
    return WorkerRecord("decode-0", BOOT, "decode", worker.address, CLOSED, "tiny", 7)


def cluster_of(worker: ControlServer, location: str) -> Cluster:
    secrets = ClusterSecrets((TOKEN,), TOKEN)
    return cluster_at(RegistryConfig(location=location), secrets, worker.security("client"))


def in_folder(tmp_path: Path, *records: WorkerRecord) -> str:
    registry = DirectoryRegistry(tmp_path / "registry", tokens=(TOKEN,))
    for record in records:
        registry.announce(record)
    return str(tmp_path / "registry")


def announce_at(server: RedisServer, *records: WorkerRecord) -> None:
    async def announce() -> None:
        config = RegistryConfig(location=server.url)
        client = open_registry(config, SecurityConfig(tls="off"), (TOKEN,))
        for record in records:
            await client.announce(record)
        await client.close()

    asyncio.run(announce())


@contextlib.contextmanager
def reporting_router(server: RedisServer, router_id: str, age_s: float = 0.0) -> Iterator[None]:
    """Report as a router does, again and again, from reports that were made `age_s` ago."""
    over = threading.Event()

    async def report() -> None:
        config = RegistryConfig(location=server.url)
        exchange = open_reports(config, SecurityConfig(tls="off"), (TOKEN,))
        assert exchange is not None
        while not over.is_set():
            counter = exchange.wall_ns() - round(age_s * 1e9)
            await exchange.publish(RouterReport(router_id, counter))
            # A router repeats its report at this period.
            await asyncio.sleep(0.1)
        await exchange.close()

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(asyncio.run, report())
        try:
            yield
        finally:
            over.set()
        running.result(10)


def test_a_worker_that_answers_is_listed_with_its_router(
    worker: ControlServer, tmp_path: Path
) -> None:
    status = status_of(cluster_of(worker, in_folder(tmp_path, record_of(worker))))
    (row,) = status.workers
    assert (row.worker_id, row.role, row.state, row.version) == (
        "decode-0", "decode", "ready", "1.0"
    )  # fmt: skip
    assert (row.running, row.waiting, row.busy_blocks, row.total_blocks) == (2, 1, 10, 64)
    (router,) = status.routers
    assert (router.host, router.workers) == ("10.0.0.9", 1)
    assert status.warnings == [] and status.registry_state == "readable"


def test_a_worker_that_is_not_reached_is_a_warning(worker: ControlServer, tmp_path: Path) -> None:
    lost = WorkerRecord("prefill-0", "d" * 32, "prefill", CLOSED, CLOSED, "tiny", 7)
    status = status_of(cluster_of(worker, in_folder(tmp_path, record_of(worker), lost)))
    states = {row.worker_id: row.state for row in status.workers}
    assert states == {"decode-0": "ready", "prefill-0": "unreachable"}
    assert len(status.warnings) == 1 and "prefill-0 is unreachable" in status.warnings[0]


def test_another_boot_at_the_address_is_not_taken_for_it(
    worker: ControlServer, tmp_path: Path
) -> None:
    other = replace(record_of(worker), boot_id="e" * 32)
    status = status_of(cluster_of(worker, in_folder(tmp_path, other)))
    assert status.workers[0].state == "unreachable"
    assert "no decode worker is ready: no request can be served" in status.warnings


def test_the_newest_boot_of_a_worker_is_asked_over_redis(
    worker: ControlServer, redis: RedisServer
) -> None:
    older = replace(record_of(worker), boot_id="e" * 32, address=CLOSED)
    announce_at(redis, older, record_of(worker))
    cluster = cluster_of(worker, redis.url)
    assert [row.state for row in status_of(cluster).workers] == ["ready"]
    assert find("decode-0", [cluster]).record == record_of(worker)


@pytest.mark.parametrize("reachable", [True, False])
def test_a_router_without_a_link_is_listed_over_redis(
    worker: ControlServer, redis: RedisServer, reachable: bool
) -> None:
    """It reports itself, also while no worker answers or none is registered."""
    if reachable:
        announce_at(redis, record_of(worker))
    with reporting_router(redis, "d" * 32):
        status = status_of(cluster_of(worker, redis.url))
    rows = {row.router_id: (row.host, row.workers) for row in status.routers}
    linked = {"c" * 32: ("10.0.0.9", 1)} if reachable else {}
    assert rows == linked | {"d" * 32: (socket.gethostname(), 0)}
    missing = f"router dddddddd at {socket.gethostname()} has no link to decode-0"
    assert (missing in status.warnings) == reachable


def test_a_copied_report_lists_no_router(worker: ControlServer, redis: RedisServer) -> None:
    with reporting_router(redis, "d" * 32, age_s=60.0):
        assert status_of(cluster_of(worker, redis.url)).routers == []


def test_a_registry_that_is_gone_is_reported(worker: ControlServer, redis: RedisServer) -> None:
    redis.kill()
    status = status_of(cluster_of(worker, redis.url))
    assert status.registry_state.startswith("not readable: ") and status.workers == []


def test_the_command_prints_json_and_a_table(
    worker: ControlServer,
    redis: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    announce_at(redis, record_of(worker))
    monkeypatch.delenv("COLUMNS", raising=False)  # xdist sets it
    monkeypatch.setenv("BATON_TOKEN", TOKEN)
    files = worker.authority.issue("client", None).settings()
    settings = [f"--set={name}={value}" for name, value in files.items()]
    for command in (["cluster", "status"], ["ps"]):
        assert main([*command, "--registry", redis.url, "--json", *settings]) == 0
        assert json.loads(capsys.readouterr().out)["workers"][0]["worker_id"] == "decode-0"
    assert main(["cluster", "status", "--registry", redis.url, *settings]) == 0
    table = capsys.readouterr().out
    for word in ("decode-0", "ready", "10/64", "router cccccccc", "10.0.0.9", redis.url):
        assert word in table
    redis.kill()
    assert main(["cluster", "status", "--registry", redis.url, *settings]) == 1


def test_status_without_a_registry_says_what_to_give(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "status"]) == 78
    assert "--registry" in capsys.readouterr().err


def test_the_doctor_checks_the_registry(
    worker: ControlServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_TOKEN", TOKEN)
    location = in_folder(tmp_path, record_of(worker))
    config = Config(registry=RegistryConfig(location=location), security=worker.security("client"))
    (found,) = doctor.registry(config)
    assert (found.level, found.found) == ("ok", f"{location}: 1 workers, 1 routers")
    assert doctor.registry(Config()) == []


def test_versions_and_missing_links_are_warnings() -> None:
    one = WorkerRow("d0", "decode", "a:1", "m", BOOT, "ready", version="1", routers=("c" * 32,))
    two = replace(one, worker_id="d1", version="2", routers=())
    router = cluster_status.RouterRow("c" * 32, "10.0.0.9", 1)
    assert cluster_status.cluster_warnings([one, two], [router]) == [
        "workers have 2 versions: 1, 2",
        "router cccccccc at 10.0.0.9 has no link to d1",
    ]
    assert ClusterStatus("c", "r", "readable").warnings == []
