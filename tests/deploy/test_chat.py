"""The terminal's client against a scripted server, and the chat: on a real pseudo-terminal too."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from unittest.mock import Mock

import pytest

from baton.deploy.cli import chat_session
from baton.deploy.cli.chat import ChatClient, ServedModel, printable
from baton.deploy.host.instance import Instance
from baton.models.embedded import EMBEDDED
from baton.models.evaluation.model_card import WORDINGS
from baton.runtime.errors import BatonError, ConfigError, Unavailable
from tests.support.json_values import Json
from tests.support.machine_speed import slowness


class Scripted(HTTPServer):
    answers: list[tuple[int, bytes]]
    asked: list[tuple[str, Json, str | None]]


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


def test_a_refusal_is_shown_in_the_servers_words(server: Scripted) -> None:
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


def url_of(server: Scripted) -> str:
    return f"http://127.0.0.1:{server.server_port}"


def asked_of(server: Scripted) -> list[list[str]]:
    """The texts of each request's messages."""
    return [[m["content"] for m in body["messages"]] for _, body, _ in server.asked]


def test_a_conversation_is_kept_until_a_new_one(
    server: Scripted, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    talk(monkeypatch, ["one", "two", "   ", "/new", "three"])
    server.answers += [(200, events("A")), (200, events("B")), (200, events("C"))]
    chat_session.chat(url_of(server), None, None, "be brief")
    system = {"role": "system", "content": "be brief"}
    said = [[(m["role"], m["content"]) for m in body["messages"]] for _, body, _ in server.asked]
    assert said[0] == [("system", "be brief"), ("user", "one")]
    assert said[1] == [*said[0], ("assistant", "A"), ("user", "two")]
    assert said[2] == [("system", system["content"]), ("user", "three")]
    assert server.asked[0][1]["model"] == "first"
    assert "A\n" in capsys.readouterr().out


def test_commands_are_answered_here_and_paths_by_the_model(
    server: Scripted, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    talk(monkeypatch, ["/help", "/halp", "/etc/hosts", "/ or not"])
    server.answers += [(200, events("A")), (200, events("B"))]
    chat_session.chat(url_of(server), "m", None, None)
    assert asked_of(server) == [["/etc/hosts"], ["/etc/hosts", "A", "/ or not"]]
    shown = capsys.readouterr().out
    assert all(f"\n{name} " in shown for name in chat_session.COMMANDS)
    assert "There is no /halp: did you mean /help?" in shown


@pytest.mark.parametrize("end", ["/quit", "/exit", "exit", "quit", " exit "])
def test_the_chat_ends_when_asked_to(
    server: Scripted, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    lines = [end, "never sent"]
    talk(monkeypatch, lines)
    chat_session.chat(url_of(server), "m", None, None)
    assert lines == ["never sent"] and server.asked == []


def test_ctrl_c_ends_the_chat_where_stdin_is_no_terminal(
    server: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with pytest.raises(KeyboardInterrupt):
        chat_session.chat(url_of(server), "m", None, None)


def test_a_failed_answer_takes_its_question_back(
    server: Scripted, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    talk(monkeypatch, ["one", "two"])
    server.answers += [(503, b'{"error": {"message": "full"}}'), (200, events("B"))]
    chat_session.chat(url_of(server), "m", None, None)
    assert asked_of(server)[1] == ["two"]
    assert "503: full" in capsys.readouterr().err


FULL = b'{"error": {"message": "too long", "code": "context_length_exceeded"}}'


def test_a_full_context_drops_the_oldest_turns_and_says_so(
    server: Scripted, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    talk(monkeypatch, ["1", "2", "3", "4"])
    server.answers += [(200, events(answer)) for answer in "ABC"]
    server.answers += [(400, FULL), (400, FULL), (200, events("D"))]
    chat_session.chat(url_of(server), "m", None, "brief")
    assert asked_of(server)[3:] == [
        ["brief", "1", "A", "2", "B", "3", "C", "4"],
        ["brief", "3", "C", "4"],
        ["brief", "4"],
    ]
    shown = capsys.readouterr().out
    assert "the oldest 2 questions and answers were dropped" in shown and "/new" in shown


def test_a_question_that_fits_no_context_is_refused(
    server: Scripted, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    talk(monkeypatch, ["1"])
    server.answers.append((400, FULL))
    chat_session.chat(url_of(server), "m", None, None)
    assert len(server.asked) == 1
    assert "400: too long" in capsys.readouterr().err


def test_a_cut_answer_suggests_a_new_conversation(
    server: Scripted, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    talk(monkeypatch, ["1"])
    last = b'data: {"choices": [{"delta": {}, "finish_reason": "length"}]}\n\ndata: [DONE]\n\n'
    server.answers.append((200, events("A", done=False) + last))
    chat_session.chat(url_of(server), "m", None, None)
    assert "/new starts a new one" in capsys.readouterr().out


def test_the_demonstration_model_is_introduced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With two things to try that its card holds, so that it answers them."""
    suggestions = chat_session.DEMONSTRATION_SUGGESTIONS
    assert len(suggestions) == 2
    assert set(suggestions) <= {question for question, _ in WORDINGS}
    served = [ServedModel(EMBEDDED, 2048)]
    monkeypatch.setattr(ChatClient, "models", lambda _: served)
    talk(monkeypatch, [])
    chat_session.chat("http://127.0.0.1:1", None, None, None)
    shown = " ".join(capsys.readouterr().out.split())
    assert chat_session.DEMONSTRATION in shown and "2,048 tokens" in shown
    assert all(text in shown for text in suggestions)


def test_a_real_model_is_not_called_a_demonstration(
    server: Scripted, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    talk(monkeypatch, [])
    chat_session.chat(url_of(server), None, None, None)
    shown = capsys.readouterr().out
    assert f"first at {url_of(server)}" in shown and "demonstration" not in shown
    assert all(text in shown for text in chat_session.SUGGESTIONS)


def test_the_running_instance_is_found(
    instance_of: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(ChatClient, "models", lambda client: asked.append(client.url) or ["m"])
    monkeypatch.setattr(chat_session.ChatSession, "introduce", lambda *_: None)
    talk(monkeypatch, [])
    chat_session.chat(None, None, None, None)
    instance_of("127.0.0.1:4321")
    chat_session.chat(None, None, None, None)
    assert asked == [chat_session.DEFAULT_URL, "http://127.0.0.1:4321"]
    instance_of("127.0.0.1:4322")
    with pytest.raises(ConfigError, match=r"--url http://127.0.0.1:4321 or http://127.0.0.1:4322"):
        chat_session.chat(None, None, None, None)


@pytest.fixture
def instance_of() -> Iterator[Callable[[str], None]]:
    """Claims an instance whose router listens at an address."""
    instances: list[Instance] = []

    def claim(address: str) -> None:
        instance = Instance.claim(f"port-{address.rpartition(':')[2]}")
        assert instance is not None
        (instance.folder / "router.address").write_text(address)
        instances.append(instance)

    yield claim
    for instance in instances:
        instance.end()


def test_a_models_output_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[2Jb\x07\n\tü\x9b1m") == "a[2Jb\n\tü1m"


# -- on a real pseudo-terminal -------------------------------------------------------------------

CHAT = """\
import fcntl, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # Ctrl-C reaches the process by its terminal alone
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run detached
from baton.deploy.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
LEFT, UP, CTRL_C, CTRL_D = "\x1b[D", "\x1b[A", "\x03", "\x04"


class Terminal:
    """`baton chat` on a terminal of its own, as a user sees it."""

    def __init__(self, url: str) -> None:
        self._screen, own = pty.openpty()
        self._shown = ""
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", CHAT, "chat", "--url", url],
            stdin=own,
            stdout=own,
            stderr=own,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm", "INPUTRC": os.devnull},
        )
        os.close(own)

    def type(self, keys: str) -> None:
        os.write(self._screen, keys.encode())

    def wait_for(self, text: str) -> str:
        """Return what was shown up to `text`, which must come within a minute."""
        deadline = time.monotonic() + 60 * slowness()
        while text not in self._shown:
            ready, _, _ = select.select([self._screen], [], [], deadline - time.monotonic())
            assert ready, self._shown
            self._shown += os.read(self._screen, 65536).decode()
        before, _, self._shown = self._shown.partition(text)
        return before

    def interrupt(self) -> None:
        """Press Ctrl-C until the prompt is there again: CPython's readline module may miss one
        that comes just after a key, until the next key."""
        deadline = time.monotonic() + 60 * slowness()
        while PROMPT not in self._shown:
            assert time.monotonic() < deadline, self._shown
            self.type(CTRL_C)
            while select.select([self._screen], [], [], 1)[0]:
                self._shown += os.read(self._screen, 65536).decode()
        self._shown = ""

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(60)
        os.close(self._screen)


@pytest.fixture
def terminal(server: Scripted) -> Iterator[Terminal]:
    made = Terminal(url_of(server))
    yield made
    made.end()


PROMPT = "you\x1b[0m "


def test_lines_are_edited_cleared_and_remembered(server: Scripted, terminal: Terminal) -> None:
    server.answers += [(200, events("first.")), (200, events("second.")), (200, events("third."))]
    assert "Try:" in terminal.wait_for(PROMPT)
    terminal.type(f"ac{LEFT}b\r")
    terminal.wait_for("first.")
    terminal.wait_for(PROMPT)
    terminal.type("never sent")
    terminal.wait_for("never sent")
    terminal.interrupt()
    terminal.type("clean\r")
    terminal.wait_for("second.")
    terminal.wait_for(PROMPT)
    terminal.type(f"{UP}{UP}\r")  # over "clean" to the first line
    terminal.wait_for("third.")
    terminal.wait_for(PROMPT)
    terminal.type("exit\r")
    assert terminal.process.wait(60 * slowness()) == 0
    assert [texts[-1] for texts in asked_of(server)] == ["abc", "clean", "abc"]


def test_ctrl_d_ends_the_chat_on_a_terminal(terminal: Terminal) -> None:
    terminal.wait_for(PROMPT)
    terminal.type(CTRL_D)
    assert terminal.process.wait(60 * slowness()) == 0
