"""Clients' HTTP by TLS: as on a plain port, with certificates that are replaced under load."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import openai
import pytest
from structlog.testing import capture_logs

from baton.router.http_frontend import http_protocol
from baton.runtime.errors import ConfigError
from baton.runtime.serving import secure_connection
from tests.support.client_certificates import ClientCertificates
from tests.support.machine_speed import slowness
from tests.support.plain_http import NO_AUTHORITIES
from tests.support.router_process import FAST_ROUTER, RunningRouter, StartRouter
from tests.support.waiting import eventually

pytestmark = pytest.mark.timed

LIVE = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
LAST = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


@pytest.fixture
async def running(
    router: StartRouter, certificates: ClientCertificates
) -> AsyncIterator[RunningRouter]:
    config = replace(FAST_ROUTER, tls=str(certificates.folder))
    async with router(config=config, trust=certificates.trusting()) as started:
        yield started


def address(running: RunningRouter) -> tuple[str, int]:
    host, port = running.url.removeprefix("https://").split(":")
    return host, int(port)


async def shown(running: RunningRouter, trust: ssl.SSLContext) -> str:
    """The name in the certificate that a new connection sees."""
    _, writer = await asyncio.open_connection(*address(running), ssl=trust)
    found: dict[str, Any] = writer.get_extra_info("peercert")
    writer.close()
    return str(dict(pair for (pair,) in found["subject"])["commonName"])


async def test_clients_speak_https(
    running: RunningRouter, certificates: ClientCertificates
) -> None:
    assert running.url.startswith("https://")
    reply = await running.chat(max_tokens=3)
    assert reply.status_code == 200
    http = openai.DefaultAsyncHttpxClient(verify=certificates.trusting())
    async with openai.AsyncOpenAI(
        base_url=f"{running.url}/v1", api_key="none", http_client=http
    ) as client:
        asked: Any = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
        whole = await client.chat.completions.create(**asked, max_tokens=8, seed=1)
        pieces = [
            piece.choices[0].delta.content or ""
            async for piece in await client.chat.completions.create(
                **asked, max_tokens=8, seed=1, stream=True
            )
        ]
    assert "".join(pieces) == whole.choices[0].message.content


@pytest.mark.filterwarnings("ignore:.*TLSv1_1 is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    ("version", "spoken"), [("TLSv1_3", True), ("TLSv1_2", True), ("TLSv1_1", False)]
)
async def test_versions_before_tls_1_2_are_refused(
    running: RunningRouter, certificates: ClientCertificates, version: str, spoken: bool
) -> None:
    trust = certificates.trusting()
    trust.set_alpn_protocols(["h2", "http/1.1"])
    trust.set_ciphers("DEFAULT:@SECLEVEL=0")
    trust.minimum_version = trust.maximum_version = ssl.TLSVersion[version]
    if not spoken:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.open_connection(*address(running), ssl=trust)
        return
    _, writer = await asyncio.open_connection(*address(running), ssl=trust)
    assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "http/1.1"
    writer.close()


async def test_new_connections_get_a_new_certificate(
    running: RunningRouter, certificates: ClientCertificates
) -> None:
    trust, worker = certificates.trusting(), running.workers["decode-0"]
    assert await shown(running, trust) == "router-1"
    worker.pause_at = 3
    asked = {"model": "tiny", "prompt": "a", "max_tokens": 40, "ignore_eos": True, "stream": True}
    async with running.http.stream("POST", "/v1/completions", json=asked) as reply:
        lines = reply.aiter_lines()
        first = await anext(lines)
        with capture_logs() as logged:
            name = certificates.replace()
            assert await shown(running, trust) == name == "router-2"
        assert [line["event"] for line in logged] == ["certificate reloaded"]
        worker.pause_at = None
        rest = [line async for line in lines if line]
    assert first.startswith("data: ") and rest[-1] == "data: [DONE]"


async def test_unusable_files_are_logged_once_and_the_old_serve(
    running: RunningRouter, certificates: ClientCertificates
) -> None:
    trust = certificates.trusting()
    other, _ = certificates.issue()
    for content, reason in ((b"half a file", "no certificate in PEM"), (other, "is not the key")):
        certificates.replace(content)
        with capture_logs() as logged:
            for _ in range(3):
                assert await shown(running, trust) == "router-1"
        (line,) = logged
        assert line["log_level"] == "error" and reason in line["reason"]
        assert "router.tls" in line["reason"]
    name = certificates.replace()
    assert await shown(running, trust) == name


@pytest.mark.parametrize("asked", [LIVE, b"OPTIONS / HTTP/1.1\r\nHost: localhost\r\n\r\n"])
async def test_plain_http_is_refused_with_the_remedy(running: RunningRouter, asked: bytes) -> None:
    async with running.http.stream("GET", "/metrics") as open_one:
        reader, writer = await asyncio.open_connection(*address(running))
        writer.write(asked)
        async with asyncio.timeout(20):
            answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 400 ") and b"begin the URL with https://" in answer
        assert b"baton_" in await open_one.aread()
    assert (await running.chat(max_tokens=1)).status_code == 200


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x02\x00\x01", b"\x00" * 64, b"\x80" * 64])
async def test_a_client_without_a_handshake_ends(
    running: RunningRouter, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(secure_connection, "HANDSHAKE_S", 0.3)
    with socket.create_connection(address(running)) as silent:
        silent.settimeout(20 * slowness())
        silent.sendall(sent)

        def read() -> bytes:
            try:
                return b"".join(iter(lambda: silent.recv(4096), b""))
            except ConnectionResetError:
                return b""

        assert b"HTTP" not in await asyncio.to_thread(read)
    assert (await running.chat(max_tokens=1)).status_code == 200


async def test_a_connection_without_a_handshake_delays_no_stop(running: RunningRouter) -> None:
    """uvicorn ends the connections that it knows."""
    reader, writer = await asyncio.open_connection(*address(running))
    assert (await running.http.get("/livez")).status_code == 200  # so it has come before
    running.serving.cancel()
    async with asyncio.timeout(secure_connection.HANDSHAKE_S / 2):
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
    writer.close()


@asynccontextmanager
async def narrow_router(
    router: StartRouter, certificates: ClientCertificates
) -> AsyncIterator[RunningRouter]:
    """It serves three connections, of which the client in `http` keeps one."""
    config = replace(
        FAST_ROUTER, tls=str(certificates.folder), max_requests=3, connections_per_request=1
    )
    async with router(config=config, trust=certificates.trusting()) as running:
        yield running


async def ask(running: RunningRouter, trust: ssl.SSLContext, head: bytes) -> bytes:
    """What is answered on a connection of its own, up to its end."""
    reader, writer = await asyncio.open_connection(*address(running), ssl=trust)
    writer.write(head)
    async with asyncio.timeout(20 * slowness()):
        answer = await reader.read()
    writer.close()
    return answer


async def test_connections_count_before_their_handshake(
    router: StartRouter, certificates: ClientCertificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    trust = certificates.trusting()
    async with narrow_router(router, certificates) as running:
        silent = [await asyncio.open_connection(*address(running)) for _ in range(2)]
        answer = await ask(running, trust, LAST)
        assert b" 503 " in answer and b"too many connections" in answer
        assert b" 200 " in await ask(running, trust, LIVE)
        surplus, writer = await asyncio.open_connection(*address(running))
        async with asyncio.timeout(secure_connection.HANDSHAKE_S / 2):
            assert await surplus.read() == b""  # long before the two that are counted
        writer.close()
        assert (await running.http.get("/v1/models")).status_code == 200
        silent[0][1].close()

        async def let_in() -> bool:
            return b" 200 " in await ask(running, trust, LAST)

        await eventually(let_in)  # once the router has seen the end
        silent[1][1].close()


def post(**fields: object) -> bytes:
    body = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 50, **fields}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    return head % len(body) + body


async def test_nothing_but_the_socket_holds_unsent_bytes(
    running: RunningRouter, certificates: ClientCertificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit of 0, by which the router learns of any unread byte, reaches the socket."""
    made, seen = http_protocol.BoundedHttpProtocol.connection_made, []

    def note(self: http_protocol.BoundedHttpProtocol, transport: asyncio.Transport) -> None:
        made(self, transport)
        seen.append(transport.get_write_buffer_limits())

    monkeypatch.setattr(http_protocol.BoundedHttpProtocol, "connection_made", note)
    assert b" 200 " in await ask(running, certificates.trusting(), LAST)
    assert seen == [(0, 0)]


async def test_a_leaving_client_ends_its_request(
    running: RunningRouter, certificates: ClientCertificates
) -> None:
    worker = running.workers["decode-0"]
    worker.pause_at = 2
    _, writer = await asyncio.open_connection(*address(running), ssl=certificates.trusting())
    writer.write(post())
    await eventually(lambda: worker.held)
    writer.close()
    await eventually(lambda: not worker.held)


async def narrow(running: RunningRouter, trust: ssl.SSLContext) -> ssl.SSLSocket:
    """A connection of which little is on the way unread."""

    def connect() -> ssl.SSLSocket:
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.settimeout(40 * slowness())
        raw.connect(address(running))
        return trust.wrap_socket(raw, server_hostname="127.0.0.1")

    return await asyncio.to_thread(connect)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> list[http_protocol.BoundedHttpProtocol]:
    """A short time for a slow reader; the connections that the router has lost."""
    lost: list[http_protocol.BoundedHttpProtocol] = []
    made = http_protocol.BoundedHttpProtocol.connection_made
    ended = http_protocol.BoundedHttpProtocol.connection_lost

    def small(self: http_protocol.BoundedHttpProtocol, transport: asyncio.Transport) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        made(self, transport)

    def note(self: http_protocol.BoundedHttpProtocol, exc: Exception | None) -> None:
        lost.append(self)
        ended(self, exc)

    monkeypatch.setattr(http_protocol.BoundedHttpProtocol, "connection_made", small)
    monkeypatch.setattr(http_protocol.BoundedHttpProtocol, "connection_lost", note)
    monkeypatch.setattr(http_protocol, "SEND_S", 0.5)
    return lost


PAGE = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize(
    "asked",
    [post(max_tokens=900, stream=True, ignore_eos=True), PAGE],
    ids=["stream", "one page and the close"],
)
async def test_a_client_that_does_not_read_is_cut_off(
    running: RunningRouter,
    certificates: ClientCertificates,
    impatient: list[http_protocol.BoundedHttpProtocol],
    asked: bytes,
) -> None:
    """Also where what it does not read is less than asyncio's TLS would take for sent."""
    with await narrow(running, certificates.trusting()) as client:
        client.sendall(asked)
        await eventually(lambda: impatient)
        await eventually(lambda: not running.workers["decode-0"].held)


async def test_a_slow_reader_gets_everything(
    running: RunningRouter,
    certificates: ClientCertificates,
    impatient: list[http_protocol.BoundedHttpProtocol],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One long body before a close, of which something is taken in every SEND_S."""
    monkeypatch.setattr(http_protocol, "SEND_BYTES", 1)
    asked = post(max_tokens=2000, logprobs=5, ignore_eos=True)
    asked = asked.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1)
    with await narrow(running, certificates.trusting()) as client:
        await asyncio.to_thread(client.sendall, asked)
        loop, read = asyncio.get_running_loop(), b""
        began_s = loop.time()
        while piece := await asyncio.to_thread(client.recv, 2048):
            read += piece
            if loop.time() < began_s + 3:
                await asyncio.sleep(0.03)  # this client reads slowly
    head, _, body = read.partition(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split()[0])
    assert len(body) == length > 64 << 10 and json.loads(body)["choices"]


@pytest.mark.parametrize("fault", ["folder", "certificate", "key", "other"])
async def test_wrong_files_end_the_start_by_name(
    router: StartRouter, certificates: ClientCertificates, fault: str
) -> None:
    folder, words = certificates.folder, "cannot be read"
    if fault == "folder":
        folder, words = folder / "none", "which is no folder: give the folder that holds tls.crt"
    elif fault == "other":
        certificates.replace(certificates.issue()[0])
        words = "is not the key of the certificate"
    else:
        (folder / {"certificate": "tls.crt", "key": "tls.key"}[fault]).unlink()
    with pytest.raises(ConfigError, match=rf"^router\.tls.*{words}"):
        async with router(config=replace(FAST_ROUTER, tls=str(folder)), trust=NO_AUTHORITIES):
            pass
