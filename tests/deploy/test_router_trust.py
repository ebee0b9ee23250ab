"""Commands that call a router by https://: which certificate they trust, and what they say."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from baton.deploy.bench.http_client import ExchangeFailed, HttpClient, ServerAddress
from baton.deploy.cli.chat import ChatClient
from baton.deploy.cli.chat_session import DEFAULT_URL, running_url
from baton.deploy.cli.process_list import ports_in_use, router_urls
from baton.deploy.control.router_admin import RouterAdmin
from baton.deploy.host.instance import Instance, router_address_file
from baton.deploy.host.router_trust import check_certificate, fault_of
from baton.deploy.serve.router_state import linked_workers
from baton.runtime.config import RouterConfig
from baton.runtime.errors import BatonError, ConfigError
from tests.support.client_certificates import ClientCertificates

MODELS = {"data": [{"id": "tiny"}], "traces": [], "workers": {"decode": 1}}
NOT_TRUSTED = "is not trusted .*SSL_CERT_FILE"


class Handler(BaseHTTPRequestHandler):
    """Answers everything alike."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(MODELS).encode())

    do_POST = do_GET

    def log_message(self, *_: object) -> None: ...


class SecureServer(HTTPServer):
    """A client that refuses the certificate is no error here."""

    def get_request(self) -> tuple[object, object]:  # type: ignore[override]  # the base's types
        try:
            return super().get_request()
        except OSError as error:
            raise ConnectionAbortedError(str(error)) from error

    def handle_error(self, *_: object) -> None: ...


@pytest.fixture
def certificates(tmp_path: Path) -> ClientCertificates:
    return ClientCertificates(tmp_path / "clients")


@pytest.fixture
def server(certificates: ClientCertificates) -> Iterator[str]:
    """host:port of a server that shows the folder's certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.folder / "tls.crt", certificates.folder / "tls.key")
    with SecureServer(("127.0.0.1", 0), Handler) as listening:
        listening.socket = context.wrap_socket(listening.socket, server_side=True)
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        yield f"127.0.0.1:{listening.server_port}"
        listening.shutdown()
        thread.join()


def chat(url: str) -> None:
    assert [model.name for model in ChatClient(url).models()] == ["tiny"]


def admin(url: str) -> None:
    assert RouterAdmin(url, "key").traces() == []


class Sink:
    def head(self, status: int, headers: dict[bytes, bytes]) -> None:
        assert status == 200

    def body(self, data: bytes, now_s: float) -> None: ...


def bench(url: str) -> None:
    async def post() -> None:
        client = HttpClient(ServerAddress.parse(url, None), lambda: 0.0)
        try:
            await client.post("/", b"", Sink())
        finally:
            client.close()

    asyncio.run(post())


CALLERS = pytest.mark.parametrize("call", [chat, admin, bench])
Call = Callable[[str], None]


@CALLERS
def test_authorities_of_the_environment_are_trusted(
    call: Call, server: str, certificates: ClientCertificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises((ConfigError, ExchangeFailed), match=NOT_TRUSTED):
        call(f"https://{server}")
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates.authority))
    call(f"https://{server}")
    port = server.rpartition(":")[2]
    with pytest.raises((ConfigError, ExchangeFailed), match="Hostname mismatch.*SSL_CERT_FILE"):
        call(f"https://localhost:{port}")  # which the certificate does not bear


@CALLERS
def test_the_own_instances_certificate_is_trusted(
    call: Call, server: str, certificates: ClientCertificates, instance: Instance
) -> None:
    router_address_file(instance.folder).write_text(f"https://{server}")
    instance.write_client_settings({"router.tls": str(certificates.folder)})
    call(f"https://{server}")
    assert linked_workers(f"https://{server}") == {"decode": 1}
    assert router_urls() == [f"https://{server}"]
    assert ports_in_use() == {int(server.rpartition(":")[2])}


@pytest.mark.parametrize(
    ("listening", "trusted"), [("0.0.0.0", True), ("localhost", True), ("10.0.0.7", False)]
)
def test_an_instance_is_known_by_each_name_of_the_loopback(
    server: str,
    certificates: ClientCertificates,
    instance: Instance,
    listening: str,
    trusted: bool,
) -> None:
    port = server.rpartition(":")[2]
    router_address_file(instance.folder).write_text(f"https://{listening}:{port}")
    instance.write_client_settings({"router.tls": str(certificates.folder)})
    if trusted:
        chat(f"https://localhost:{port}")
    else:
        with pytest.raises(ConfigError, match=NOT_TRUSTED):
            chat(f"https://localhost:{port}")


@pytest.mark.parametrize("spoilt", ["another", "half", "gone"])
def test_another_certificate_at_its_port_is_not_trusted(
    server: str, certificates: ClientCertificates, instance: Instance, spoilt: str
) -> None:
    """Of the same authority, too."""
    router_address_file(instance.folder).write_text(f"https://{server}")
    instance.write_client_settings({"router.tls": str(certificates.folder)})
    if spoilt == "gone":
        (certificates.folder / "tls.crt").unlink()
    else:
        certificates.replace(b"half a file" if spoilt == "half" else None)
    with pytest.raises(ConfigError, match=r"another certificate than .*/tls\.crt has"):
        chat(f"https://{server}")
    assert linked_workers(f"https://{server}") == {}


def test_a_scheme_that_does_not_fit_is_said(
    server: str, certificates: ClientCertificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates.authority))
    with HTTPServer(("127.0.0.1", 0), Handler) as plain:
        thread = threading.Thread(target=plain.serve_forever)
        thread.start()
        for call in (chat, admin, bench):
            with pytest.raises(BatonError, match="write http:// if the server has no router.tls"):
                call(f"https://127.0.0.1:{plain.server_port}")
        plain.shutdown()
        thread.join()
    with suppress(BatonError):
        chat(f"http://{server}")  # it ends, whatever this server makes of it


def test_other_failures_are_not_those_of_tls() -> None:
    assert fault_of("https://a", ConnectionRefusedError("no")) is None


def test_serve_refuses_wrong_files_before_it_starts(certificates: ClientCertificates) -> None:
    check_certificate(RouterConfig())
    check_certificate(RouterConfig(tls=str(certificates.folder)))
    (certificates.folder / "tls.key").unlink()
    with pytest.raises(ConfigError, match=r"^router\.tls: .*tls\.key cannot be read"):
        check_certificate(RouterConfig(tls=str(certificates.folder)))


def test_a_key_is_not_sent_where_no_instance_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert running_url(None) == DEFAULT_URL
    with pytest.raises(ConfigError, match="give --url"):
        running_url("key-of-a-client")
