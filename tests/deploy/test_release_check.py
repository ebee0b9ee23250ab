"""`baton release check` against a scripted release: what passes, what fails, with which words."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from baton.deploy.cli import release_check
from baton.deploy.cli.chat import ChatClient
from baton.deploy.cli.release_check import STREAMS, check_release, handoffs_of
from baton.runtime.errors import BatonError, ConfigError, Unavailable
from tests.support.client_certificates import ClientCertificates

PIECES = [
    {"choices": [{"delta": {"content": "hello"}, "finish_reason": None}]},
    {"choices": [{"delta": {}, "finish_reason": "stop"}]},
]


class Release(HTTPServer):
    """A router and the one decode worker of a release. `moves`: whether prompts are handed off."""

    moves = True
    handoffs = 3
    finish_reason: str | None = "stop"
    refusals = 0  # of connections, before the models are listed


class Handler(BaseHTTPRequestHandler):
    server: Release

    def do_GET(self) -> None:
        if self.path == "/v1/models" and self.server.refusals:
            self.server.refusals -= 1
            self.close_connection = True  # without an answer
        elif self.path == "/v1/models":
            self._send(b'{"data": [{"id": "tiny"}]}')
        else:
            done = f'baton_handoffs_total{{outcome="completed"}} {self.server.handoffs}.0\n'
            lost = 'baton_handoffs_total{outcome="failed"} 100.0\n'
            size = f"baton_handoff_bytes_total {self.server.handoffs * 1000}.0\n"
            kind = "# TYPE baton_handoffs counter\n"
            self._send(
                (kind + done + lost + "# TYPE baton_handoff_bytes counter\n" + size).encode()
            )

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.handoffs += self.server.moves
        if body.get("stream"):
            ended = PIECES[1]["choices"][0] | {"finish_reason": self.server.finish_reason}
            events = [PIECES[0], {"choices": [ended]}]
            lines = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
            self._send(f"{lines}data: [DONE]\n\n".encode())
        else:
            choice = {"message": {"content": "hello"}, "finish_reason": "stop"}
            self._send(json.dumps({"choices": [choice]}).encode())

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def release() -> Iterator[Release]:
    server = Release(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def url_of(release: Release) -> str:
    return f"http://127.0.0.1:{release.server_port}"


def client_of(release: Release) -> ChatClient:
    return ChatClient(url_of(release))


def test_a_release_that_moves_kv_passes(release: Release) -> None:
    lines: list[str] = []
    check_release(client_of(release), "tiny", [url_of(release)], lines.append)
    assert lines[0] == "models: tiny"
    assert lines[-1] == f"handoffs: {STREAMS + 1} of {STREAMS + 1} prompts, 0.0 MB of KV"


def test_a_service_without_a_ready_router_is_asked_again(
    release: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release_check, "POLL_S", 0.01)
    release.refusals = 3
    lines: list[str] = []
    check_release(client_of(release), "tiny", [url_of(release)], lines.append)
    assert lines[0] == "models: tiny" and release.refusals == 0
    monkeypatch.setattr(release_check, "READY_S", 0.05)
    with pytest.raises(Unavailable, match="nothing answers"):
        check_release(ChatClient("http://127.0.0.1:1"), "tiny", [url_of(release)])


def test_a_release_that_never_disaggregates_fails(release: Release) -> None:
    release.moves = False
    with pytest.raises(BatonError, match="no KV moved between the roles"):
        check_release(client_of(release), "tiny", [url_of(release)])


def test_a_model_that_is_not_served_is_named(release: Release) -> None:
    with pytest.raises(BatonError, match="serves tiny, not large"):
        check_release(client_of(release), "large", [url_of(release)])


def test_a_stream_without_a_finish_reason_fails(release: Release) -> None:
    release.finish_reason = None
    with pytest.raises(BatonError, match="without a finish reason"):
        check_release(client_of(release), "tiny", [url_of(release)])


def test_decode_workers_that_cannot_be_asked(release: Release) -> None:
    with pytest.raises(ConfigError, match="no admin port"):
        handoffs_of("chat-decode:9001")
    with pytest.raises(Unavailable, match="does not answer"):
        handoffs_of("http://127.0.0.1:1")
    with pytest.raises(Unavailable, match="has no address"):
        handoffs_of("http://decode.invalid:9001")


def test_routers_must_present_the_certificate_that_is_given(
    release: Release, tmp_path: Path
) -> None:
    """An authority has signed it, for another name than that of the call."""
    files = ClientCertificates(tmp_path, host="models.example.org")
    given = files.folder / "tls.crt"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(given, files.folder / "tls.key")
    release.socket = context.wrap_socket(release.socket, server_side=True)
    url = f"https://127.0.0.1:{release.server_port}"
    (served,) = ChatClient(url, None, given).models()
    assert served.name == "tiny"
    files.replace()  # the same authority has signed another one
    given.write_bytes(given.read_bytes() + files.authority.read_bytes())
    for certificate in (given, tmp_path / "none"):
        with pytest.raises(ConfigError, match="presents another certificate than"):
            check_release(ChatClient(url, None, certificate), "tiny", [])
    with pytest.raises(ConfigError, match="is not trusted"):
        check_release(ChatClient(url), "tiny", [])
