"""The admin port over real sockets: routes, refusals, a broken audit, and a clean stop."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from baton.deploy.processes import admin, admin_protocol
from baton.deploy.processes.admin import AdminServer, Audit
from baton.deploy.processes.admin_protocol import AdminHttpProtocol
from baton.runtime import metrics
from baton.runtime.errors import ConfigError
from tests.support.json_values import JsonObject


def ready() -> None:
    return None


def empty_audit(_: bool) -> JsonObject:
    return {}


@asynccontextmanager
async def serving(audit: Audit = empty_audit) -> AsyncIterator[str]:
    server = AdminServer("127.0.0.1", 0, audit, not_ready=ready)
    address = await server.start()
    try:
        yield address
    finally:
        await server.stop()


async def ask(address: str, raw: bytes) -> tuple[int, dict[str, str], bytes]:
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(raw)
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    await writer.wait_closed()
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    fields = (line.split(": ", 1) for line in lines[1:])
    headers = {name.lower(): value for name, value in fields}
    return int(lines[0].split()[1]), headers, body


async def get(address: str, path: str) -> tuple[int, dict[str, str], bytes]:
    return await ask(address, f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())


async def test_audit_is_current_at_each_request() -> None:
    books = {"free": 1}
    async with serving(lambda check: dict(books)) as address:
        assert json.loads((await get(address, "/audit"))[2]) == {"free": 1}
        books["free"] = 2
        status, headers, body = await get(address, "/audit?now=1")
    assert (status, json.loads(body)) == (200, {"free": 2})
    assert headers["content-type"] == "application/json"
    assert int(headers["content-length"]) == len(body)


async def test_metrics_are_prometheus_text() -> None:
    async with serving() as address:
        status, headers, body = await get(address, "/metrics")
    assert status == 200
    assert "version=0.0.4" in headers["content-type"]
    assert b"# HELP baton_" in body


async def test_health_and_head() -> None:
    async with serving() as address:
        assert (await get(address, "/healthz"))[2] == b"ok\n"
        status, headers, body = await ask(address, b"HEAD /healthz HTTP/1.1\r\n\r\n")
    assert (status, headers["content-length"], body) == (200, "3", b"")


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"GET /nothing HTTP/1.1\r\n\r\n", 404),
        (b"POST /audit HTTP/1.1\r\nContent-Length: 0\r\n\r\n", 405),
        (b"hello\r\n\r\n", 400),
        (b"\xff\xfe\x00\r\n\r\n", 400),
        (b"GET /audit HTTP/1.1\r\nX: " + b"y" * (3 * admin_protocol.HEAD_BYTES) + b"\r\n\r\n", 431),
    ],
)
async def test_bad_requests_are_refused_with_their_status(raw: bytes, status: int) -> None:
    async with serving() as address:
        assert (await ask(address, raw))[0] == status
        assert (await get(address, "/healthz"))[0] == 200


async def test_a_broken_audit_is_a_500_and_the_server_lives_on() -> None:
    def broken(_: bool) -> JsonObject:
        raise ValueError("books do not add up")

    async with serving(broken) as address:
        status, _, body = await get(address, "/audit")
        assert status == 500
        assert json.loads(body) == {"error": "ValueError: books do not add up"}
        assert (await get(address, "/healthz"))[0] == 200


async def test_a_port_in_use_is_a_config_error_that_names_it() -> None:
    async with serving() as address:
        port = int(address.rsplit(":", 1)[1])
        with pytest.raises(ConfigError, match=str(port)):
            await AdminServer("127.0.0.1", port, empty_audit, not_ready=ready).start()


async def test_stop_closes_the_port_and_idle_connections() -> None:
    server = AdminServer("127.0.0.1", 0, empty_audit, not_ready=ready)
    address = await server.start()
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    assert (await get(address, "/healthz"))[0] == 200  # so the earlier connection is accepted too
    await server.stop()
    await server.stop()
    assert await asyncio.wait_for(reader.read(), 10) == b""
    writer.close()
    with pytest.raises(ConnectionError):
        await asyncio.open_connection(host, int(port))
    assert "admin" not in {thread.name for thread in threading.enumerate()}


async def ended(reader: asyncio.StreamReader) -> bool:
    try:
        return await asyncio.wait_for(reader.read(), 10) == b""
    except ConnectionError:
        return True


async def test_a_silent_client_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_protocol, "HEAD_TIMEOUT_S", 0.05)
    async with serving() as address:
        reader, writer = await asyncio.open_connection(*address.rsplit(":", 1))
        assert await ended(reader)
        writer.close()


async def test_idle_connections_are_bounded_and_probes_answered() -> None:
    most = admin_protocol.MAX_CONNECTIONS
    async with serving() as address:
        host, port = address.rsplit(":", 1)
        idle = [await asyncio.open_connection(host, int(port)) for _ in range(most)]
        assert (await get(address, "/healthz"))[0] == 200
        assert await ended(idle[0][0])  # the oldest, and no other
        reader, writer = idle[-1]
        writer.write(b"GET /healthz HTTP/1.1\r\n\r\n")
        assert (await asyncio.wait_for(reader.read(), 10)).startswith(b"HTTP/1.1 200")
        more = [await asyncio.open_connection(host, int(port)) for _ in range(most + 10)]
        assert (await get(address, "/healthz"))[0] == 200
        for left, _ in idle[1:-1] + more[:10]:
            assert await ended(left)
        for _, writer in idle + more:
            writer.close()


async def test_a_connection_is_closed_when_its_answer_is_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admin_protocol, "SEND_TIMEOUT_S", 0.2)
    lost = threading.Event()
    connection_lost = AdminHttpProtocol.connection_lost

    def record_loss(connection: AdminHttpProtocol, error: Exception | None) -> None:
        connection_lost(connection, error)
        lost.set()

    def large_audit(_: bool) -> JsonObject:
        return {"x": "y" * (32 << 20)}  # more than a kernel holds

    monkeypatch.setattr(AdminHttpProtocol, "connection_lost", record_loss)
    async with serving(large_audit) as address:
        reader, writer = await asyncio.open_connection(*address.rsplit(":", 1))
        writer.write(b"GET /audit HTTP/1.1\r\n\r\n")
        assert await asyncio.to_thread(lost.wait, 20)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(reader.readexactly(32 << 20), 20)
        writer.close()


class Books:
    """A worker's audit that counts its calls and its checks."""

    def __init__(self) -> None:
        self.looks = 0
        self.checks = 0

    def __call__(self, check: bool) -> JsonObject:
        self.looks += 1
        self.checks += check
        return {"looks": self.looks}


async def test_the_pool_is_checked_once_a_second_for_all_clients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admin, "CHECK_INTERVAL_S", 60.0)
    books = Books()
    async with serving(books) as address:
        answers = await asyncio.gather(*(get(address, "/audit") for _ in range(40)))
        assert {answer[0] for answer in answers} == {200}
        assert books.checks == 1 and books.looks <= 40
        found = {"looks": books.looks + 1}  # as they are now
        assert json.loads((await get(address, "/audit"))[2]) == found


async def test_requests_share_one_call_while_the_loop_is_blocked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admin, "AUDIT_TIMEOUT_S", 0.1)
    books = Books()
    statuses: list[int] = []

    def ask_beside() -> None:
        for _ in range(10):
            connection = http.client.HTTPConnection(address, timeout=30)
            connection.request("GET", "/audit")
            statuses.append(connection.getresponse().status)
            connection.close()

    async with serving(books) as address:
        threads = [threading.Thread(target=ask_beside) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:  # while this loop, which is the worker's, stands still
            thread.join(30)
        assert statuses == [503] * 40
        assert (await get(address, "/audit"))[0] == 200
    assert books.looks <= 2


async def test_readyz_reports_the_workers_reason() -> None:
    reason: str | None = None
    server = AdminServer("127.0.0.1", 0, empty_audit, not_ready=lambda: reason)
    address = await server.start()
    try:
        assert (await get(address, "/readyz"))[::2] == (200, b"ready\n")
        reason = "a step is overdue"
        assert (await get(address, "/readyz"))[::2] == (503, b"a step is overdue\n")
        assert (await get(address, "/healthz"))[0] == 200
    finally:
        await server.stop()


async def test_a_blocked_loop_is_reported_and_the_process_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Asked by threads, while this loop, which is the worker's, stands still. An answer may take
    longer than a head may."""
    monkeypatch.setattr(admin_protocol, "HEAD_TIMEOUT_S", 2.4)
    monkeypatch.setattr(admin, "AUDIT_TIMEOUT_S", 3.0)
    async with serving() as address:
        answers: dict[str, tuple[int, float]] = {}

        def ask_beside(path: str) -> None:
            began = time.monotonic()
            connection = http.client.HTTPConnection(address, timeout=30)
            connection.request("GET", path)
            answers[path] = connection.getresponse().status, time.monotonic() - began
            connection.close()

        paths = ("/readyz", "/healthz", "/metrics", "/audit")
        threads = [threading.Thread(target=ask_beside, args=(path,)) for path in paths]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert {path: answers[path][0] for path in paths} == {
            "/readyz": 503,
            "/healthz": 200,
            "/metrics": 200,
            "/audit": 503,
        }
        assert (
            answers["/audit"][1]
            >= admin.AUDIT_TIMEOUT_S
            > answers["/readyz"][1]
            >= admin.READY_TIMEOUT_S
        )
        assert answers["/healthz"][1] < admin.AUDIT_TIMEOUT_S
        assert (await get(address, "/readyz"))[0] == 200


@pytest.mark.usefixtures("ipv6")
async def test_an_ipv6_address_is_returned_in_brackets() -> None:
    server = AdminServer("::1", 0, empty_audit, not_ready=ready)
    try:
        address = await server.start()
    except ConfigError:
        pytest.skip("no loopback of IPv6 here")
    try:
        assert address.startswith("[::1]:")
        connection = http.client.HTTPConnection(address, timeout=30)
        await asyncio.to_thread(connection.request, "GET", "/healthz")
        assert (await asyncio.to_thread(connection.getresponse)).status == 200
        connection.close()
    finally:
        await server.stop()


async def test_gauges_are_set_before_each_scrape() -> None:
    calls = []

    def publish() -> None:
        calls.append(1)
        metrics.QUEUED_TOKENS.set(len(calls))

    server = AdminServer("127.0.0.1", 0, empty_audit, not_ready=ready, publish_gauges=publish)
    address = await server.start()
    try:
        for expected in (b"baton_queued_tokens 1.0", b"baton_queued_tokens 2.0"):
            _, _, body = await get(address, "/metrics")
            assert expected in body.splitlines()
    finally:
        await server.stop()
