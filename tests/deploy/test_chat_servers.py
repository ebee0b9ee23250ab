"""`baton chat` against servers that are none, or not ours: one clear error, no traceback."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from socket import SHUT_RDWR, create_server, socket

import pytest

from baton.deploy.cli import chat_session
from baton.deploy.cli.chat import ChatClient
from baton.runtime.errors import BatonError, ConfigError, Unavailable

Serve = Callable[[bytes], str]
HEAD = b"HTTP/1.1 200 OK\r\nConnection: close\r\n"


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Answers every connection with these very bytes, then closes; gives the URL."""
    ends: list[Callable[[], None]] = []

    def start(raw: bytes) -> str:
        listener = create_server(("127.0.0.1", 0))
        thread = threading.Thread(target=_answer_all, args=(listener, raw))
        thread.start()

        def end() -> None:
            with suppress(OSError):
                listener.shutdown(SHUT_RDWR)
            listener.close()
            thread.join(60)

        ends.append(end)
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for end in ends:
        end()


def _answer_all(listener: socket, raw: bytes) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return  # the test is over
        with connection, connection.makefile("rb") as asked, suppress(ConnectionError):
            length = 0
            while (line := asked.readline()).strip():
                name, _, value = line.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
            asked.read(length)  # all of it, or the close would reset the connection
            connection.sendall(raw)


def events(*data: str) -> bytes:
    return HEAD + b"\r\n" + "".join(f"data: {one}\n\n" for one in data).encode()


@pytest.mark.parametrize(
    "url", ["http://[::1", "http://127.0.0.1:abc", "http://127.0.0.1:99999", "http://host:0"]
)
def test_an_impossible_address_is_refused_before_any_call(url: str) -> None:
    with pytest.raises(ConfigError, match="write it as http"):
        ChatClient(url)


def test_an_ipv6_address_is_one() -> None:
    with pytest.raises(Unavailable):
        ChatClient("http://[::1]:9").models()


@pytest.mark.parametrize("key", ["a\nb", "schlüssel", "a\x00"])
def test_a_key_unfit_for_a_header_is_refused_without_showing_it(key: str) -> None:
    with pytest.raises(ConfigError, match="API key") as caught:
        ChatClient("http://127.0.0.1:9", key)
    assert key not in str(caught.value)


@pytest.mark.parametrize(
    "body", [b"<html>hello</html>", b"[]", b'{"data": 3}', b'{"data": [{"name": "x"}]}', b"\xff"]
)
def test_a_web_server_that_is_not_ours_is_named(serve: Serve, body: bytes) -> None:
    url = serve(HEAD + b"\r\n" + body)
    with pytest.raises(ConfigError, match="is no server of the OpenAI API"):
        ChatClient(url).models()


def test_a_server_without_a_model_is_said(serve: Serve) -> None:
    with pytest.raises(ConfigError, match="serves no model"):
        ChatClient(serve(HEAD + b'\r\n{"data": []}')).models()


def test_a_list_cut_short_is_a_server_that_stopped(serve: Serve) -> None:
    url = serve(HEAD + b'Content-Length: 500\r\n\r\n{"data": [')
    with pytest.raises(Unavailable, match="stopped answering"):
        ChatClient(url).models()


def test_what_speaks_no_http_is_no_server(serve: Serve) -> None:
    with pytest.raises(ConfigError, match="speaks no HTTP") as caught:
        ChatClient(serve(b"\x1b[2JSSH-2.0-OpenSSH\r\n")).models()
    assert "\x1b" not in str(caught.value)


def test_a_refused_model_list_cannot_steer_the_terminal(serve: Serve) -> None:
    """It ends `baton chat`, before anything is said: it was shown as it came."""
    bodies = b"\x1b[2Jboo", b'{"error": {"message": "\\u001b[2Jboo"}}'
    for body in bodies:
        with pytest.raises(BatonError, match=r"500: \[2Jboo$"):
            ChatClient(serve(b"HTTP/1.1 500 No\r\n\r\n" + body)).models()


@pytest.mark.parametrize(
    "data", ["{", "7", "[]", '{"choices": [{}]}', '{"choices": [{"delta": null}]}', '{"id": "x"}']
)
def test_an_event_that_is_no_piece_ends_the_answer(serve: Serve, data: str) -> None:
    url = serve(events('{"choices": [{"delta": {"content": "a"}}]}', data, "[DONE]"))
    stream = ChatClient(url).stream("m", [])
    assert next(stream) == "a"
    with pytest.raises(BatonError, match="no piece of an answer"):
        next(stream)


def test_a_stream_cut_within_a_chunk_is_a_stopped_server(serve: Serve) -> None:
    url = serve(HEAD + b"Transfer-Encoding: chunked\r\n\r\nffff\r\ndata: {")
    with pytest.raises(BatonError) as caught:
        list(ChatClient(url).stream("m", []))
    assert url in str(caught.value)


def test_a_servers_error_cannot_steer_the_terminal(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["hello"]

    def read(*_: object, **__: object) -> str:
        if not lines:
            raise EOFError
        return lines.pop(0)

    monkeypatch.setattr("builtins.input", read)
    chat_session.chat(serve(b"HTTP/1.1 500 No\r\n\r\n\x1b[2Jboo"), "[/odd]", None, None)
    captured = capsys.readouterr()
    assert "500: [2Jboo" in captured.err and "\x1b[2J" not in captured.err
    assert "[/odd] at http" in captured.out
