"""TLS 1.2 is refused by our ports and by our channels, whatever certificate the other side has."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from datetime import UTC, datetime
from pathlib import Path

import grpc
import pytest

from baton.deploy.host.authority import Authority
from baton.runtime.cluster_config import SecurityConfig
from baton.runtime.grpc_links import credentials, open_channel
from baton.runtime.tls import Tls, advice
from baton.runtime.tls_version import CIPHERS_KEY, UNUSABLE_CIPHER, check_enforced
from tests.support.machine_speed import slowness

TOKEN = "a token"
OLD, NEW = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3
PREFACE = b"PRI * HTTP/2.0"


class Party:
    """A worker and a router with certificates of one authority."""

    def __init__(self, folder: Path) -> None:
        authority = Authority(folder, lambda: datetime.now(UTC))
        self.worker = _issued(authority, "decode-0", "127.0.0.1")
        self.router = _issued(authority, "router", None)


def _issued(authority: Authority, name: str, host: str | None) -> SecurityConfig:
    files = authority.issue(name, host)
    return SecurityConfig("on", str(files.authority), str(files.certificate), str(files.key))


def context_of(
    own: SecurityConfig, purpose: ssl.Purpose, version: ssl.TLSVersion
) -> ssl.SSLContext:
    context = ssl.create_default_context(purpose, cafile=own.authority)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(own.certificate, own.key)
    context.minimum_version = context.maximum_version = version
    context.set_alpn_protocols(["h2"])
    return context


@pytest.fixture
def party(tmp_path: Path) -> Party:
    return Party(tmp_path / "tls")


def greeted(address: str, context: ssl.SSLContext) -> bytes:
    """The first bytes that a server sends after the handshake."""
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), 20) as raw, context.wrap_socket(raw) as secure:
        return secure.recv(9)


async def test_a_port_refuses_tls_1_2_and_serves_tls_1_3(
    served: Callable[..., AbstractAsyncContextManager[str]], party: Party
) -> None:
    async with served(TOKEN, Tls(party.worker)) as address:
        old = context_of(party.router, ssl.Purpose.SERVER_AUTH, OLD)
        with pytest.raises(ssl.SSLError):
            await asyncio.to_thread(greeted, address, old)
        new = context_of(party.router, ssl.Purpose.SERVER_AUTH, NEW)
        assert len(await asyncio.to_thread(greeted, address, new)) == 9  # its HTTP/2 settings


@contextmanager
def listening(context: ssl.SSLContext) -> Iterator[tuple[str, list[bytes | str]]]:
    """A server of one version of TLS: its address, and what each connection became."""
    heard: list[bytes | str] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(20)

        def accept() -> None:
            try:
                raw, _ = listener.accept()
                raw.settimeout(20)
                with context.wrap_socket(raw, server_side=True) as secure:
                    heard.append(secure.recv(len(PREFACE)))
            except OSError as error:
                heard.append(str(error))

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}", heard
        finally:
            thread.join()


@pytest.mark.parametrize("version", [OLD, NEW])
async def test_a_channel_gives_its_token_to_tls_1_3_alone(
    party: Party, version: ssl.TLSVersion
) -> None:
    context = context_of(party.worker, ssl.Purpose.CLIENT_AUTH, version)
    with listening(context) as (address, heard):
        async with open_channel(address, Tls(party.router)) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                call = channel.unary_unary("/t/None")
                await call(b"", metadata=credentials(TOKEN), timeout=20)
    (what,) = heard
    if version is NEW:
        assert what == PREFACE
    else:
        assert "no shared cipher" in str(what).lower().replace("_", " ")
        assert "TLS 1.3 alone" in advice(failed.value.details() or "")


ORDERS = {
    "import grpc": "was imported before",
    "import baton.runtime.tls_version\nimport grpc": "enforced",
    "import baton.deploy.cli.main\nimport grpc": "enforced",
}


@pytest.mark.parametrize("order", ORDERS)
def test_a_process_that_imports_grpc_first_has_no_tls(order: str) -> None:
    program = f"{order}\nfrom baton.runtime.errors import ConfigError\n"
    program += "from baton.runtime.tls_version import check_enforced\n"
    program += "try:\n    check_enforced()\n    print('enforced')\n"
    program += "except ConfigError as error:\n    print(error)\n"
    ran = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env={},
        capture_output=True,
        text=True,
        timeout=60 * slowness(),
        check=True,
    )
    assert ORDERS[order] in ran.stdout
    if order.startswith("import grpc"):
        assert f"{CIPHERS_KEY}={UNUSABLE_CIPHER}" in ran.stdout


def test_this_process_enforces_it() -> None:
    check_enforced()
