"""The OpenAI API from the client's side, for the terminal: one streamed chat, and `baton chat`.

Standard library alone beneath; rich only draws. Keeps the conversation of this process and
nothing else. What the server answers in error becomes one of our errors with its own words.
"""

from __future__ import annotations

import http.client
import json
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

from baton.runtime.errors import BatonError, ConfigError, Unavailable

TIMEOUT_S = 120.0  # without any byte from the server
COMMANDS = "/new starts over, Ctrl-D ends."
Message = dict[str, str]


class ChatClient:
    """A server's chat endpoint. `url` is the server's root, as in http://127.0.0.1:8000."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        wrong = ConfigError(f"{url} is no URL of a server: write it as http://127.0.0.1:8000")
        try:
            parts = urlsplit(url)
            known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError as error:  # half an IPv6 address, or a port that is no number
            raise wrong from error
        if not known:
            raise wrong
        if api_key and not (api_key.isascii() and api_key.isprintable()):
            raise ConfigError("the API key holds a character that no HTTP header can carry")
        kind = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        self._kind = kind
        self._url = url
        self._netloc = parts.netloc
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def models(self) -> list[str]:
        """Names of the models that are served, at least one. Raises Unavailable where nothing
        answers, and ConfigError where something else than such a server does."""
        connection, response = self._ask("GET", "/v1/models", None)
        with closing(connection), response:
            try:
                names = [str(entry["id"]) for entry in json.loads(response.read())["data"]]
            except (OSError, http.client.HTTPException) as error:
                raise Unavailable(f"{self._url} stopped answering ({error})") from error
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{self._url} is no server of the OpenAI API") from error
        if not names:
            raise ConfigError(f"{self._url} serves no model")
        return names

    def stream(self, model: str, messages: list[Message], **fields: Any) -> Iterator[str]:
        """Pieces of the answer's text as they come.

        Raises BatonError with the server's words when it refuses or fails midway, Unavailable
        when it does not answer.
        """
        body = {"model": model, "messages": messages, "stream": True} | fields
        connection, response = self._ask("POST", "/v1/chat/completions", body)
        with closing(connection), response:
            try:
                yield from _pieces(response)
            except (OSError, http.client.HTTPException) as error:
                raise Unavailable(f"{self._url} stopped answering ({error})") from error
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise BatonError(f"{self._url} sent what is no piece of an answer") from error

    def _ask(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = self._kind(self._netloc, timeout=TIMEOUT_S)
        try:
            connection.request(method, path, json.dumps(body) if body else None, self._headers)
            response = connection.getresponse()
            if response.status == 200:
                return connection, response
            with response:
                refusal = _message(response.read().decode(errors="replace"))
        except OSError as error:
            connection.close()
            raise Unavailable(
                f"nothing answers at {self._url} ({error}): start `baton serve`, or give --url"
            ) from error
        except http.client.HTTPException as error:  # whose words are what was sent
            connection.close()
            raise ConfigError(
                f"what answers at {self._url} speaks no HTTP: give --url the address that "
                "`baton serve` says, and not that of gRPC"
            ) from error
        connection.close()
        raise BatonError(f"the server answered {response.status}: {refusal}")


def _pieces(response: http.client.HTTPResponse) -> Iterator[str]:
    ended = False
    while line := response.readline():
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            ended = True
            break
        event = json.loads(data)
        if "error" in event:
            raise BatonError(_message(data.decode()))
        for choice in event["choices"]:
            text = choice["delta"].get("content")
            if text:
                yield text
    if not ended:
        raise Unavailable("the server ended the stream before its end")


def printable(text: str) -> str:
    """The text without control characters: a model's output must not steer the terminal."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")


def _message(body: str) -> str:
    """What an OpenAI error body says, or the body itself: `printable`, as it is shown."""
    try:
        return printable(str(json.loads(body)["error"]["message"]))
    except (ValueError, KeyError, TypeError):
        return printable(body.strip()[:500])


def chat(url: str, model: str | None, api_key: str | None, system: str | None) -> None:
    """`baton chat`: read a line, print the answer as it comes, until end of input."""
    from rich.console import Console
    from rich.markup import escape

    console = Console()
    client = ChatClient(url, api_key)
    name = model or client.models()[0]
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    shown = escape(printable(name))
    console.print(f"[bold]{shown}[/] at {escape(url)}. {COMMANDS}")
    while True:
        try:
            said = console.input("[bold cyan]you[/] ")
        except EOFError:
            console.print()
            return
        except KeyboardInterrupt:
            console.print()  # the shell's prompt begins a line
            raise
        if said.strip() == "/new":
            messages = list(opening)
        elif said.startswith("/") and said[1:].strip().isalpha():  # as /help: no question
            console.print(f"There is no {escape(said.strip())}: {COMMANDS}")
        elif said.strip():
            messages.append({"role": "user", "content": said})
            _answer(client, name, messages)


def _answer(client: ChatClient, model: str, messages: list[Message]) -> None:
    """Print one answer and add it; a failure, or Ctrl-C, takes the question back."""
    answer = ""
    try:
        for piece in client.stream(model, messages):
            answer += piece
            print(printable(piece), end="", flush=True)
        print()
        messages.append({"role": "assistant", "content": answer})
    except BatonError as error:
        messages.pop()
        print(f"\nbaton: error: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        messages.pop()
        print("\n(stopped)")
