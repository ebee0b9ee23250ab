"""Mutual TLS over real gRPC: which peers are let in, which are not, and that no other notices."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import grpc.aio
import pytest
from cryptography import x509
from structlog.testing import capture_logs

from baton.deploy.host.authority import LIFE, Authority
from baton.runtime.cluster_config import SecurityConfig
from baton.runtime.errors import ConfigError, Unavailable
from baton.runtime.grpc_links import (
    ClientLink,
    credentials,
    open_channel,
    open_port,
    open_server,
    translate,
)
from baton.runtime.links import LinkClosed
from baton.runtime.tls import Tls, advice, tls_of

TOKEN = "a token"
Channels = Callable[[str], grpc.aio.Channel]


def now() -> datetime:
    return datetime.now(UTC)


def issued(authority: Authority, name: str, host: str | None) -> SecurityConfig:
    files = authority.issue(name, host)
    return SecurityConfig("on", str(files.authority), str(files.certificate), str(files.key))


class Party:
    """Two processes of one authority: a worker that serves, and a router that calls. `ahead` sets
    the authority's clock alone."""

    def __init__(
        self, folder: Path, host: str = "127.0.0.1", ahead: timedelta = timedelta(0)
    ) -> None:
        self.ahead = ahead
        self.authority = Authority(folder, lambda: now() + self.ahead)
        self.worker = issued(self.authority, "decode-0", host)
        self.router = issued(self.authority, "router", None)


@pytest.fixture
def party(tmp_path: Path) -> Party:
    return Party(tmp_path / "tls")


def link_on(channel: grpc.aio.Channel, token: str = TOKEN) -> ClientLink[bytes, bytes]:
    return ClientLink(channel.stream_stream("/t/Echo")(metadata=credentials(token)))


async def heard(channel: grpc.aio.Channel, token: str = TOKEN) -> str:
    """What comes back on a new link; the reason if nothing does."""
    link = link_on(channel, token)
    try:
        async with asyncio.timeout(20):
            await link.send(b"word")
            return (await link.receive()).decode()
    except LinkClosed as closed:
        return str(closed)
    finally:
        await link.close()


async def asked(address: str, tls: Tls | None, token: str = TOKEN) -> str:
    async with open_channel(address, tls) as channel:
        return await heard(channel, token)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "0.0.0.0"])
async def test_both_sides_with_certificates_of_one_authority(
    served: Callable[..., AbstractAsyncContextManager[str]],
    tmp_path: Path,
    host: str,
    request: pytest.FixtureRequest,
) -> None:
    if host == "[::1]":
        request.getfixturevalue("ipv6")
    party = Party(tmp_path / "tls", host)
    async with served(TOKEN, Tls(party.worker), host) as address:
        assert await asked(address, Tls(party.router)) == "word"
        assert await asked(address, Tls(party.worker)) == "word"  # a worker calls, too


async def test_a_certificate_is_no_token(
    served: Callable[..., AbstractAsyncContextManager[str]], party: Party
) -> None:
    async with served(TOKEN, Tls(party.worker)) as address:
        for token in ("", "guessed"):
            assert "UNAUTHENTICATED" in await asked(address, Tls(party.router), token)


def plain(_: Party, __: Path) -> Channels:
    return open_channel


def without_certificate(party: Party, _: Path) -> Channels:
    trusted = Path(party.worker.authority).read_bytes()
    return lambda address: grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(trusted))


def of_another_authority(party: Party, folder: Path) -> Channels:
    """It believes the server, but the server not it."""
    own = Party(folder / "other").router
    return by(own, party.worker.authority)


def ended(party: Party, folder: Path) -> Channels:
    """Of the right authority, an hour too late."""
    party.ahead = -LIFE - timedelta(hours=1)
    return by(issued(party.authority, "late", None), party.worker.authority)


def by(own: SecurityConfig, trusted: str) -> Channels:
    pair = Path(own.key).read_bytes(), Path(own.certificate).read_bytes()
    given = grpc.ssl_channel_credentials(Path(trusted).read_bytes(), *pair)
    return lambda address: grpc.aio.secure_channel(address, given)


@pytest.mark.parametrize("caller", [plain, without_certificate, of_another_authority, ended])
async def test_a_refused_peer_gets_a_reason_and_others_do_not_notice(
    served: Callable[..., AbstractAsyncContextManager[str]],
    party: Party,
    tmp_path: Path,
    caller: Callable[[Party, Path], Channels],
) -> None:
    refused = caller(party, tmp_path)
    async with (
        served(TOKEN, Tls(party.worker)) as address,
        open_channel(address, Tls(party.router)) as channel,
    ):
        standing = link_on(channel)
        await standing.send(b"before")
        assert await standing.receive() == b"before"
        for _ in range(3):
            async with refused(address) as channel_of_refused:
                answer = await heard(channel_of_refused)
            assert answer.startswith("UNAVAILABLE") and "security.certificate" in answer
        await standing.send(b"after")
        assert await standing.receive() == b"after"
        await standing.close()
        assert await asked(address, Tls(party.router)) == "word"


async def test_a_server_that_cannot_prove_itself_is_not_called(
    served: Callable[..., AbstractAsyncContextManager[str]], party: Party, tmp_path: Path
) -> None:
    stranger, elsewhere = Party(tmp_path / "other"), issued(party.authority, "d", "10.1.1.1")
    may_only_call = party.router
    for security in (stranger.worker, elsewhere, may_only_call):
        async with served(TOKEN, Tls(security)) as address:
            answer = await asked(address, Tls(party.router))
            assert answer.startswith("UNAVAILABLE") and "security.authority" in answer
    async with served(TOKEN, None) as address:
        answer = await asked(address, Tls(party.router))
        assert answer.startswith("UNAVAILABLE") and "security.tls is the same" in answer


async def test_a_plain_port_never_sees_the_token_of_a_caller_with_tls(party: Party) -> None:
    seen = bytearray()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.extend(await reader.read(1 << 16))
        writer.close()

    server = await asyncio.start_server(listen, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    await asked(f"{host}:{port}", Tls(party.router))
    server.close()
    assert seen and TOKEN.encode() not in seen


def handshake(address: str, own: SecurityConfig) -> tuple[str | None, datetime]:
    """The version that a server speaks, and when the certificate ends that it shows now."""
    host, port = address.split(":")
    context = ssl.create_default_context(cafile=own.authority)
    context.load_cert_chain(own.certificate, own.key)
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection((host, int(port)), 20) as raw,
        context.wrap_socket(raw, server_hostname=host) as secured,
    ):
        shown = secured.getpeercert(binary_form=True)
        assert shown is not None
        return secured.version(), x509.load_der_x509_certificate(shown).not_valid_after_utc


async def test_the_newest_tls_is_spoken(
    served: Callable[..., AbstractAsyncContextManager[str]], party: Party
) -> None:
    async with served(TOKEN, Tls(party.worker)) as address:
        version, _ = await asyncio.to_thread(handshake, address, party.router)
    assert version == "TLSv1.3"


async def test_a_certificate_may_bear_a_name_instead_of_addresses(
    served: Callable[..., AbstractAsyncContextManager[str]], party: Party
) -> None:
    named = issued(party.authority, "any", "workers.baton")
    async with served(TOKEN, Tls(named)) as address:
        assert "Hostname" in await asked(address, Tls(party.router))
        by_name = replace(party.router, server_name="workers.baton")
        assert await asked(address, Tls(by_name)) == "word"


async def test_a_renewed_certificate_is_taken_without_a_break(
    served: Callable[..., AbstractAsyncContextManager[str]], tmp_path: Path
) -> None:
    party = Party(tmp_path / "tls", ahead=-LIFE * 0.75)
    worker, router = Tls(party.worker), Tls(party.router)
    async with served(TOKEN, worker) as address, open_channel(address, router) as channel:
        standing = link_on(channel)
        await standing.send(b"old")
        assert await standing.receive() == b"old"
        _, before = await asyncio.to_thread(handshake, address, party.router)
        party.ahead = timedelta(0)
        party.authority.renew()
        _, after = await asyncio.to_thread(handshake, address, party.router)
        assert timedelta(hours=17) < after - before < timedelta(hours=19)
        assert await asked(address, router) == "word"
        assert router.current().ends == worker.current().ends == after
        await standing.send(b"still")
        assert await standing.receive() == b"still"
        await standing.close()


def contents(*files: Path) -> list[bytes]:
    return [file.read_bytes() for file in files]


def replaced(file: Path, content: bytes) -> None:
    draft = file.with_suffix(".draft")
    draft.write_bytes(content)
    draft.chmod(0o600)
    os.replace(draft, file)


async def test_a_replaced_authority_is_believed_while_both_are_named(
    served: Callable[..., AbstractAsyncContextManager[str]], tmp_path: Path
) -> None:
    old, new = Party(tmp_path / "old"), Party(tmp_path / "new")
    worker, router = Tls(old.worker), Tls(old.router)
    trusted = Path(old.worker.authority)  # of both
    before, after = contents(trusted, Path(new.worker.authority))
    async with served(TOKEN, worker) as address:
        replaced(trusted, before + after)
        assert await asked(address, router) == "word"
        for mine, issued_now in ((old.worker, new.worker), (old.router, new.router)):
            key, chain = contents(Path(issued_now.key), Path(issued_now.certificate))
            replaced(Path(mine.key), key)
            replaced(Path(mine.certificate), chain)
            assert await asked(address, router) == "word"
        replaced(trusted, after)
        assert await asked(address, router) == "word"
        assert await asked(address, Tls(new.router)) == "word"


async def test_an_unreadable_file_is_logged_once_and_the_old_serves(
    served: Callable[..., AbstractAsyncContextManager[str]], party: Party, tmp_path: Path
) -> None:
    worker, router = Tls(party.worker), Tls(party.router)
    good, stranger = Path(party.worker.certificate), Party(tmp_path / "other")
    whole, wrong = contents(good, Path(stranger.worker.certificate))
    async with served(TOKEN, worker) as address:
        with capture_logs() as logged:
            for content in (b"half a file", wrong):
                replaced(good, content)
                for _ in range(3):
                    assert await asked(address, router) == "word"
        assert [line["log_level"] for line in logged] == ["error", "error"]
        assert "holds no certificate in PEM" in logged[0]["reason"]
        assert "security.key" in logged[1]["reason"]
        with capture_logs() as logged:
            replaced(good, whole)
            assert await asked(address, router) == "word"
        assert [line["event"] for line in logged] == ["certificate reloaded"]


def test_that_ones_own_certificate_has_ended_is_said_once(party: Party) -> None:
    clock = [now()]
    tls = Tls(party.worker, lambda: clock[0])
    with capture_logs() as logged:
        tls.current()
        clock[0] += LIFE
        for _ in range(3):
            tls.channel_credentials()
    (line,) = logged
    assert line["log_level"] == "error" and "(security.certificate) ended at" in line["reason"]
    assert "put a new one there" in line["reason"]


def test_off_is_off_by_name_alone_and_the_log_warns(party: Party) -> None:
    with capture_logs() as logged:
        assert tls_of(SecurityConfig(tls="off")) is None
        assert tls_of(replace(party.worker, tls="off")) is None
    assert [(line["log_level"], line["setting"]) for line in logged] == [
        ("warning", "security.tls")
    ] * 2
    with pytest.raises(ConfigError, match=r"security\.certificate is not set"):
        tls_of(SecurityConfig())
    with capture_logs() as logged:
        assert isinstance(tls_of(party.worker), Tls)
    assert logged == []


def test_a_wrong_file_is_refused_before_anything_is_opened(party: Party) -> None:
    Path(party.worker.key).chmod(0o644)
    with pytest.raises(ConfigError, match=r"security\.key"):
        Tls(party.worker)


@pytest.mark.parametrize(
    "detail",
    [
        "Tls handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: certificate has expired: OK",
        "Custom verification check failed with error: Hostname Verification Check failed.",
    ],
)
def test_a_failed_handshake_names_the_settings(detail: str) -> None:
    for setting in ("security.authority", "security.certificate", "security.tls"):
        assert setting in advice(detail)


@pytest.mark.parametrize(
    "detail",
    [
        "",
        "drain started",
        "failed to connect to all addresses; last error: ipv4:127.0.0.1:1: Connection refused",
        "Socket closed",
    ],
)
def test_what_has_nothing_to_do_with_certificates_stays_as_it_is(detail: str) -> None:
    assert advice(detail) == detail


async def test_errors_of_single_calls_tell_it_too(
    served: Callable[..., AbstractAsyncContextManager[str]], party: Party, tmp_path: Path
) -> None:
    stranger = Party(tmp_path / "other")
    async with (
        served(TOKEN, Tls(party.worker)) as address,
        open_channel(address, Tls(stranger.router)) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await channel.unary_unary("/t/None")(b"", metadata=credentials(TOKEN), timeout=20)
    reported = translate(failed.value)
    assert isinstance(reported, Unavailable) and "security.authority" in str(reported)


async def test_a_port_that_is_taken_is_an_error_with_tls_as_without(party: Party) -> None:
    for tls in (None, Tls(party.worker)):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            server = open_server(TOKEN)
            with pytest.raises(RuntimeError):
                open_port(server, f"127.0.0.1:{taken.getsockname()[1]}", tls)
            await server.stop(None)
