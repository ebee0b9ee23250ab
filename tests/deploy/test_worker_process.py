"""The worker process's own tasks: they outlast a registry that fails for a while."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from baton.deploy.host.cluster_secrets import ClusterSecrets
from baton.deploy.processes import worker_process
from baton.deploy.processes.worker_process import (
    _listen,
    _watch_steps,
    run_worker,
)
from baton.deploy.processes.worker_roles import Boot
from baton.engine.execution.runner import ModelRunner
from baton.engine.scheduling.batch import RunningStep, StepBatch
from baton.kv_transfer.nixl_agent import NixlAgent
from baton.kv_transfer.nixl_mover import NixlMover
from baton.kv_transfer.peers.handoff_service import HandoffService
from baton.runtime import logs, worker_lock
from baton.runtime.cluster_config import RegistryConfig, SecurityConfig
from baton.runtime.config import Config, WorkerConfig
from baton.runtime.errors import ConfigError, Draining, EngineError, ModelError
from baton.runtime.grpc_links import open_channel, open_server
from baton.runtime.registry import MemoryRegistry, Role
from baton.runtime.registry_client import InlineRegistry
from tests.support.machine_speed import slowness
from tests.support.waiting import eventually
from tests.support.worker_process_scene import OK, generate, next_record, send_order, started


class LostFolder(MemoryRegistry):
    """Its folder cannot be written any more when a worker wants to leave."""

    def withdraw(self, worker_id: str, boot_id: str) -> None:
        raise OSError(5, "Input/output error")


async def test_a_failing_registry_skips_no_step_of_a_workers_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[str] = []
    close = NixlMover.close

    async def noted(mover: NixlMover) -> None:
        ended.append("mover")
        await close(mover)

    monkeypatch.setattr(NixlMover, "close", noted)
    process, serving, registry = started("decode", registry=LostFolder())
    async with asyncio.timeout(60 * slowness()):
        record = await next_record(registry, serving)
        process.drain()
        await serving
    assert ended == ["mover"] and process.worker is None
    with pytest.raises(ConnectionError):
        await asyncio.open_connection(*record.address.split(":"))


async def test_a_ready_worker_logs_its_admin_address() -> None:
    with capture_logs() as said:
        process, serving, registry = started("decode")
        async with asyncio.timeout(60 * slowness()):
            record = await next_record(registry, serving)
            process.drain()
            await serving
    (ready,) = [each for each in said if each["event"] == "worker ready"]
    assert ready["admin"] == record.admin_address


def test_a_start_under_a_live_id_is_refused_before_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_lock, "LOCK_TIMEOUT_S", 0.0)
    monkeypatch.setattr(logs, "setup", lambda *_, **__: None)  # this and the next: the process's
    monkeypatch.setattr(worker_process, "SWITCH_INTERVAL_S", sys.getswitchinterval())
    plain = Config(
        security=SecurityConfig(tls="off"), registry=RegistryConfig(location=str(tmp_path))
    )
    secrets = ClusterSecrets(("secret",), "secret")
    start = partial(
        run_worker, plain, role="decode", model_folder=tmp_path / "no-model", secrets=secrets
    )
    with worker_lock.hold(tmp_path, "decode-0"):
        with pytest.raises(ConfigError, match=f"decode-0: process {os.getpid()} has this id"):
            start(worker_id="decode-0")
        with pytest.raises(ModelError):  # it is about to load it
            start(worker_id="decode-1")
    with pytest.raises(ModelError):
        start(worker_id="decode-0")
    assert list(tmp_path.glob("*.worker")) == []


def test_a_worker_with_a_wrong_authority_does_not_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "setup", lambda *_, **__: None)  # this and the next: the process's
    monkeypatch.setattr(worker_process, "SWITCH_INTERVAL_S", sys.getswitchinterval())
    registry = RegistryConfig(location="rediss://host", authority=str(tmp_path / "no.pem"))
    plain = Config(
        security=SecurityConfig(tls="off"),
        registry=registry,
        worker=WorkerConfig(advertise="127.0.0.1"),
    )
    with pytest.raises(ConfigError, match=r"registry\.authority: .*no\.pem cannot be used"):
        run_worker(
            plain,
            role="decode",
            worker_id="decode-0",
            model_folder=tmp_path / "no-model",
            secrets=ClusterSecrets(("secret",), "secret"),
        )


async def test_a_failure_in_a_workers_end_is_raised_after_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process, serving, registry = started("prefill")

    async def broken(*_: object) -> None:
        raise ValueError("a lease has no end")

    async with asyncio.timeout(60 * slowness()):
        record = await next_record(registry, serving)
        monkeypatch.setattr(HandoffService, "finished", broken)
        process.drain()
        with pytest.raises(ValueError, match="no end"):
            await serving
    assert registry.workers() == [] and process.worker is None
    with pytest.raises(ConnectionError):
        await asyncio.open_connection(*record.address.split(":"))


@pytest.mark.parametrize("role", [pytest.param("prefill", marks=pytest.mark.nightly), "decode"])
async def test_a_worker_all_of_whose_steps_fail_ends_by_itself(
    role: Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is red before, and alive, whatever it computes; nothing of it stays behind."""
    process, serving, registry = started(role, failing_s=2.0 * slowness())

    def fail(_: StepBatch) -> RunningStep:
        raise RuntimeError("an illegal memory access")

    async with asyncio.timeout(60 * slowness()), httpx.AsyncClient(timeout=60) as client:
        record = await next_record(registry, serving)
        url = f"http://{record.admin_address}"
        await readiness(client, url, 200)
        monkeypatch.setattr(process.runner, "start", fail)
        await readiness(client, url, 503)
        assert "illegal memory access" in (await client.get(f"{url}/readyz")).text
        assert not serving.done()
        assert (await client.get(f"{url}/healthz")).status_code == 200
        with pytest.raises(
            EngineError, match="illegal memory access; no step or probe has succeeded"
        ):
            await serving
    assert registry.workers() == []


async def test_a_red_worker_returns_its_requests_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its mover has died: what it decodes could go on for long, and no handoff any more."""
    process, serving, registry = started("decode", failing_s=0.3, blocks=64)
    start = process.runner.start

    def slowly(batch: StepBatch) -> RunningStep:
        time.sleep(0.005)  # on no machine are 900 tokens through before it is known
        return start(batch)

    monkeypatch.setattr(process.runner, "start", slowly)
    async with asyncio.timeout(60 * slowness()):
        record = await next_record(registry, serving)
        going_on = asyncio.create_task(generate(record.address, 900))
        await eventually(lambda: process.worker and process.worker.audit().get("running"))
        monkeypatch.setattr(NixlAgent, "alive", False)
        with pytest.raises(
            EngineError, match="a NIXL thread has died; no step or probe has succeeded"
        ):
            await serving
        with pytest.raises(Draining):
            await going_on


async def test_time_in_which_the_process_stood_still_is_no_failure() -> None:
    """As after SIGCONT: the first reading is of a time in which nothing could move."""

    class Stale:
        readings = ["the checksum thread has ended no call for 20.0 s"]

        def persistent_failure(self) -> str | None:
            return self.readings.pop() if self.readings else None

    health: Any = Stale()
    watch = asyncio.create_task(_watch_steps(health, 0.75, lambda: None))
    await asyncio.sleep(0)
    # It holds up the loop, as a stop of the process does; a pause that yields would not.
    asyncio.get_running_loop().call_soon(time.sleep, 1.0)
    await eventually(lambda: not health.readings)
    done, _ = await asyncio.wait({watch}, timeout=0.5)
    watch.cancel()
    assert not done


def boot(**settings: Any) -> Boot:
    return Boot(
        config=Config(worker=WorkerConfig(**settings)),
        role="decode",
        worker_id="decode-3",
        boot_id=bytes(range(16)),
        model_folder=Path("models/tiny"),
        registry=InlineRegistry(MemoryRegistry()),
        secrets=ClusterSecrets(("t",), "t"),
    )


async def test_a_worker_announces_the_ports_that_it_has() -> None:
    server = open_server("t")
    record = await _listen(boot(), server, "127.0.0.1:9")
    try:
        assert (record.worker_id, record.role, record.model) == ("decode-3", "decode", "tiny")
        assert record.boot_id == bytes(range(16)).hex() and record.pid == os.getpid()
        assert record.admin_address == "127.0.0.1:9"
        port = int(record.address.split(":")[1])
        assert port
        socket.create_connection(("127.0.0.1", port), timeout=30).close()
    finally:
        await server.stop(None)


@pytest.mark.usefixtures("ipv6")
async def test_a_worker_on_ipv6_announces_a_reachable_address() -> None:
    server = open_server("t")
    record = await _listen(boot(host="::1"), server, "[::1]:9")
    try:
        assert record.address.startswith("[::1]:")
        channel = open_channel(record.address)
        async with asyncio.timeout(30):
            await channel.channel_ready()
        await channel.close()
    finally:
        await server.stop(None)


async def test_a_workers_port_that_is_taken_is_named_with_the_setting() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = open_server("t")
        with pytest.raises(ConfigError, match=f"worker.port {port} on 127.0.0.1"):
            await _listen(boot(port=port), server, "127.0.0.1:9")
        await server.stop(None)


async def test_a_port_still_held_by_the_previous_role_is_waited_for() -> None:
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    port, server = taken.getsockname()[1], open_server("t")
    listening = asyncio.create_task(_listen(boot(port=port), server, "127.0.0.1:9", 30.0))
    # The port stays taken, and nothing may listen in this time.
    await asyncio.sleep(0.1)
    assert not listening.done()
    taken.close()
    assert (await listening).address == f"127.0.0.1:{port}"
    await server.stop(None)


async def readiness(client: httpx.AsyncClient, url: str, status: int) -> None:
    """Wait until /readyz answers with this status."""

    async def answered() -> bool:
        return (await client.get(f"{url}/readyz")).status_code == status

    await eventually(answered)


async def red_while_its_device_hangs(
    client: httpx.AsyncClient,
    url: str,
    runner: ModelRunner,
    monkeypatch: pytest.MonkeyPatch,
    fair_watch: Callable[[], AbstractAsyncContextManager[Callable[[], float]]],
) -> None:
    hanging, start, probes = threading.Event(), runner.start, [0]

    def slow_start(batch: StepBatch) -> RunningStep:
        probes[0] += 1
        if probes[0] > 2:  # by then it is known how long a probe takes
            hanging.wait(60 * slowness())
        return start(batch)

    monkeypatch.setattr(runner, "start", slow_start)
    await eventually(lambda: probes[0] >= 3)
    async with fair_watch() as so_far_s:
        await readiness(client, url, 503)
        assert so_far_s() < 1.5 * slowness()
    assert "overdue" in (await client.get(f"{url}/readyz")).text
    assert (await client.get(f"{url}/healthz")).status_code == 200
    hanging.set()
    await readiness(client, url, 200)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_serves_until_drained_and_ends_in_order(
    role: Role,
    monkeypatch: pytest.MonkeyPatch,
    fair_watch: Callable[[], AbstractAsyncContextManager[Callable[[], float]]],
) -> None:
    process, serving, registry = started(role)
    made, engine = process.boot, process.engine
    async with asyncio.timeout(60 * slowness()), httpx.AsyncClient(timeout=60) as client:
        record = await next_record(registry, serving)
        assert (record.role, record.boot_id) == (role, made.boot_id.hex())
        url = f"http://{record.admin_address}"
        assert (await client.get(f"{url}/audit")).json()["role"] == role
        await readiness(client, url, 200)
        await red_while_its_device_hangs(client, url, process.runner, monkeypatch, fair_watch)
        monkeypatch.setattr(NixlAgent, "alive", False)
        assert "NIXL" in (await client.get(f"{url}/readyz")).text
        assert await send_order(record) is OK
        await serving
    assert registry.workers() == []
    with pytest.raises(EngineError, match="closed"):
        engine.submit(StepBatch(()))
