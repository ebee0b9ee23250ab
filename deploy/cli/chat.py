"""The OpenAI API from the client's side, for the terminal: the models that are served, and one
streamed chat.

By TLS where the URL begins with https://. What the server answers in error becomes one of our
errors with its own words. Keeps no conversation (`chat_session`).
"""

from __future__ import annotations

import http.client
import json
import unicodedata
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from baton.deploy.host.router_trust import connect, fault_of
from baton.runtime.errors import BatonError, ConfigError, Unavailable

TIMEOUT_S = 120.0  # without any byte from the server
Message = dict[str, str]


class ServerRefusal(BatonError):
    """The server refused a request; `reason` is the code in its answer, None without one."""

    def __init__(self, status: int, message: str, code: str | None) -> None:
        super().__init__(f"the server answered {status}: {message}")
        self.reason = code


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model of the server; `context` in tokens, None where the server does not say it."""

    name: str
    context: int | None = None


class ChatClient:
    """A server's chat endpoint. `url` is the server's root, as in http://127.0.0.1:8000;
    `certificate` is the PEM file of the certificate that an https:// server has to present."""

    def __init__(
        self, url: str, api_key: str | None = None, certificate: Path | None = None
    ) -> None:
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
        self.url = url
        self._certificate = certificate
        self.finish_reason: str | None = None  # of the last answer that was read to its end
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def models(self) -> list[ServedModel]:
        """The models that are served, at least one. Raises Unavailable where nothing
        answers, and ConfigError where something else than such a server does."""
        connection, response = self._ask("GET", "/v1/models", None)
        with closing(connection), response:
            try:
                models = [_served(entry) for entry in json.loads(response.read())["data"]]
            except (OSError, http.client.HTTPException) as error:
                raise Unavailable(f"{self.url} stopped answering ({error})") from error
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{self.url} is no server of the OpenAI API") from error
        if not models:
            raise ConfigError(f"{self.url} serves no model")
        return models

    def stream(self, model: str, messages: list[Message], **fields: Any) -> Iterator[str]:
        """Yield pieces of the answer's text as they come; `finish_reason` is set with the last.

        Raises ServerRefusal when the server refuses, BatonError with its words when it fails
        midway, Unavailable when it does not answer.
        """
        body = {"model": model, "messages": messages, "stream": True} | fields
        connection, response = self._ask("POST", "/v1/chat/completions", body)
        with closing(connection), response:
            try:
                yield from self._pieces(response)
            except (OSError, http.client.HTTPException) as error:
                raise Unavailable(f"{self.url} stopped answering ({error})") from error
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise BatonError(f"{self.url} sent what is no piece of an answer") from error

    def answer(self, model: str, messages: list[Message], **fields: Any) -> str:
        """Return the text of a whole answer, and set `finish_reason`. Raises what `stream` does."""
        body = {"model": model, "messages": messages} | fields
        connection, response = self._ask("POST", "/v1/chat/completions", body)
        with closing(connection), response:
            try:
                (choice,) = json.loads(response.read())["choices"]
                self.finish_reason = choice["finish_reason"]
                return str(choice["message"]["content"])
            except (OSError, http.client.HTTPException) as error:
                raise Unavailable(f"{self.url} stopped answering ({error})") from error
            except (ValueError, KeyError, TypeError) as error:
                raise BatonError(f"{self.url} sent what is no answer") from error

    def explanation(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return how the server would place a request of this route. Raises what `answer` does."""
        return self._object("POST", f"{path}/explain", body, "prompts")

    def trace(self, path: str, needed: str) -> dict[str, Any]:
        """Return the JSON object of a trace route, which has the list `needed`. Raises what
        `answer` does."""
        return self._object("GET", path, None, needed)

    def _object(
        self, method: str, path: str, body: dict[str, Any] | None, needed: str
    ) -> dict[str, Any]:
        connection, response = self._ask(method, path, body)
        with closing(connection), response:
            try:
                found = json.loads(response.read())
                if not isinstance(found[needed], list):
                    raise ValueError(f"no list of {needed}")
                return dict(found)
            except (OSError, http.client.HTTPException) as error:
                raise Unavailable(f"{self.url} stopped answering ({error})") from error
            except (ValueError, KeyError, TypeError) as error:
                raise BatonError(f"{self.url} sent an answer without {needed}") from error

    def _ask(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = connect(self.url, TIMEOUT_S, self._certificate)
        try:
            connection.request(method, path, json.dumps(body) if body else None, self._headers)
            response = connection.getresponse()
            if response.status == 200:
                return connection, response
            with response:
                refusal = response.read().decode(errors="replace")
        except OSError as error:
            connection.close()
            if (fault := fault_of(self.url, error, self._certificate)) is not None:
                raise ConfigError(fault) from error
            raise Unavailable(
                f"nothing answers at {self.url} ({error}): start `baton serve`, or give --url"
            ) from error
        except http.client.HTTPException as error:  # whose words are what was sent
            connection.close()
            raise ConfigError(
                f"what answers at {self.url} speaks no HTTP: give --url the address that "
                "`baton serve` says, and not that of gRPC"
            ) from error
        connection.close()
        raise ServerRefusal(response.status, _message(refusal), _code(refusal))

    def _pieces(self, response: http.client.HTTPResponse) -> Iterator[str]:
        self.finish_reason = None
        while line := response.readline():
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            event = json.loads(data)
            if "error" in event:
                raise BatonError(_message(data.decode()))
            for choice in event["choices"]:
                self.finish_reason = choice.get("finish_reason") or self.finish_reason
                text = choice["delta"].get("content")
                if text:
                    yield text
        raise Unavailable("the server ended the stream before its end")


def _served(entry: dict[str, Any]) -> ServedModel:
    context = entry.get("max_model_len")
    return ServedModel(str(entry["id"]), context if isinstance(context, int) else None)


def printable(text: str) -> str:
    """The text without control characters: a model's output must not steer the terminal."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")


def _message(body: str) -> str:
    """Return the message of an OpenAI error body, or else the body itself, `printable`."""
    try:
        return printable(str(json.loads(body)["error"]["message"]))
    except (ValueError, KeyError, TypeError):
        return printable(body.strip()[:500])


def _code(body: str) -> str | None:
    """Return the code of an OpenAI error body; None if it has none."""
    try:
        code = json.loads(body)["error"]["code"]
    except (ValueError, KeyError, TypeError):
        return None
    return None if code is None else str(code)
