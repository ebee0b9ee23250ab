"""The terminal's client against a scripted server: streaming, refusals, a stream cut short."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from baton.deploy import chat as chats
from baton.deploy.chat import ChatClient
from baton.runtime.errors import BatonError, ConfigError, Unavailable


class Scripted(HTTPServer):
    answers: list[tuple[int, bytes]]
    asked: list[tuple[str, Any, str | None]]


class Handler(BaseHTTPRequestHandler):
    server: Scripted

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, body, self.headers["Authorization"]))
        self._answer(*self.server.answers.pop(0))

    def do_GET(self) -> None:
        self._answer(200, b'{"data": [{"id": "first"}, {"id": "second"}]}')

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server() -> Iterator[Scripted]:
    scripted = Scripted(("127.0.0.1", 0), Handler)
    scripted.answers, scripted.asked = [], []
    thread = threading.Thread(target=scripted.serve_forever)
    thread.start()
    yield scripted
    scripted.shutdown()
    thread.join(60)
    scripted.server_close()


def client(server: Scripted, key: str | None = None) -> ChatClient:
    return ChatClient(f"http://127.0.0.1:{server.server_port}", key)


def events(*deltas: str, done: bool = True) -> bytes:
    lines = [
        "data: " + json.dumps({"choices": [{"delta": {"content": text}}]}) + "\n\n"
        for text in deltas
    ]
    return (": a comment\n\n" + "".join(lines) + ("data: [DONE]\n\n" if done else "")).encode()


def test_pieces_come_in_order_and_the_request_is_what_was_meant(server: Scripted) -> None:
    server.answers.append((200, events("Hel", "", "lo ü")))
    messages = [{"role": "user", "content": "hi"}]
    pieces = list(client(server, "key").stream("m", messages, max_tokens=3))
    assert pieces == ["Hel", "lo ü"]
    path, body, authorization = server.asked[0]
    assert (path, authorization) == ("/v1/chat/completions", "Bearer key")
    assert body == {"model": "m", "messages": messages, "stream": True, "max_tokens": 3}


def test_a_refusal_is_told_in_the_servers_words(server: Scripted) -> None:
    server.answers.append((404, b'{"error": {"message": "no model m: first is served"}}'))
    with pytest.raises(BatonError, match="404: no model m: first is served"):
        list(client(server).stream("m", []))
    server.answers.append((502, b"<html>proxy</html>"))
    with pytest.raises(BatonError, match="502: <html>proxy"):
        list(client(server).stream("m", []))


def test_an_error_event_ends_the_stream_as_an_error(server: Scripted) -> None:
    body = events("a", done=False) + b'data: {"error": {"message": "the worker died"}}\n\n'
    server.answers.append((200, body))
    stream = client(server).stream("m", [])
    assert next(stream) == "a"
    with pytest.raises(BatonError, match="the worker died"):
        next(stream)


def test_a_stream_without_its_end_is_an_error(server: Scripted) -> None:
    server.answers.append((200, events("a", done=False)))
    with pytest.raises(Unavailable, match="before its end"):
        list(client(server).stream("m", []))


def test_no_server_names_the_remedy() -> None:
    with pytest.raises(Unavailable, match="baton serve"):
        ChatClient("http://127.0.0.1:9").models()


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://", ""])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="write it as http"):
        ChatClient(url)


def talk(monkeypatch: pytest.MonkeyPatch, lines: list[str]) -> None:
    def read(*_: object, **__: object) -> str:
        if not lines:
            raise EOFError
        return lines.pop(0)

    monkeypatch.setattr("builtins.input", read)


def test_the_conversation_is_kept_and_new_starts_over(
    server: Scripted, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    talk(monkeypatch, ["one", "two", "   ", "/new", "three"])
    server.answers += [(200, events("A")), (200, events("B")), (200, events("C"))]
    chats.chat(f"http://127.0.0.1:{server.server_port}", None, None, "be brief")
    system = {"role": "system", "content": "be brief"}
    said = [[(m["role"], m["content"]) for m in body["messages"]] for _, body, _ in server.asked]
    assert said[0] == [("system", "be brief"), ("user", "one")]
    assert said[1] == [*said[0], ("assistant", "A"), ("user", "two")]
    assert said[2] == [("system", system["content"]), ("user", "three")]
    assert server.asked[0][1]["model"] == "first"
    assert "A\n" in capsys.readouterr().out


def test_a_command_that_there_is_not_is_answered_here_and_a_path_by_the_model(
    server: Scripted, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    talk(monkeypatch, ["/help", "/etc/hosts", "/ or not"])
    server.answers += [(200, events("A")), (200, events("B"))]
    chats.chat(f"http://127.0.0.1:{server.server_port}", "m", None, None)
    asked = [body["messages"][-1]["content"] for _, body, _ in server.asked]
    assert asked == ["/etc/hosts", "/ or not"]
    assert "There is no /help: /new starts over" in capsys.readouterr().out


def test_ctrl_c_at_the_prompt_ends_the_line_and_the_chat(
    server: Scripted, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupted)
    with pytest.raises(KeyboardInterrupt):
        chats.chat(f"http://127.0.0.1:{server.server_port}", "m", None, None)
    shown = capsys.readouterr().out
    assert shown.endswith("you \n") and shown.count("\n") == 2


def test_a_failed_answer_takes_its_question_back(
    server: Scripted, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    talk(monkeypatch, ["one", "two"])
    server.answers += [(503, b'{"error": {"message": "full"}}'), (200, events("B"))]
    chats.chat(f"http://127.0.0.1:{server.server_port}", "m", None, None)
    assert [m["content"] for m in server.asked[1][1]["messages"]] == ["two"]
    assert "503: full" in capsys.readouterr().err


def test_a_models_output_cannot_steer_the_terminal() -> None:
    assert chats.printable("a\x1b[2Jb\x07\n\tü\x9b1m") == "a[2Jb\n\tü1m"
