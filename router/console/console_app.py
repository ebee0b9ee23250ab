"""The application of the admin port: the console's page, its stream, and the router's own API.

    GET /                   the page and its files, without a key: they hold no data
    GET /console/stream     the state and its changes, as server-sent events
    POST /console/advice    recommendations, which the page shows: see advice_board.py
    everything else         the routes of the API, /metrics, /traces and .../explain among them

One key opens all of it: the operator's, which reads the traces of all API keys. It goes in the
Authorization header, never in a URL or a cookie, so that no web page can use it for another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.router.answers.request_handler import ClientGone
from baton.router.client_access.router import Router
from baton.router.console.advice_board import MAX_BYTES, AdviceBoard
from baton.router.console.console_feed import ConsoleFeed, Viewer
from baton.router.http_frontend.app import build_app
from baton.router.http_frontend.auth_middleware import OPEN_PATHS, AuthMiddleware, check_host
from baton.router.http_frontend.client_connection import ClientConnection, while_connected
from baton.router.http_frontend.cors import Cors
from baton.router.http_frontend.http_error import HostNotAllowed, error_response
from baton.runtime.errors import InvalidRequest, TooLarge

STREAM_PATH, ADVICE_PATH = "/console/stream", "/console/advice"
UPLOAD_S = 10.0  # for the body of advice
_LOCAL_ONLY = (
    "an admin port of this host gives it without a key to localhost or an address alone, and to no "
    "web page from another host: use one of these"
)
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Only files of this page run or load, and only this server is called.
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    media_type: str
    body: bytes


def page_files() -> dict[str, PageFile]:
    """Return the files of the page by their paths. They are read once, at the start."""
    found = {
        f"/{file.name}": PageFile(_TYPES[file.suffix], file.read_bytes())
        for file in sorted((Path(__file__).parent / "page").iterdir())
    }
    found["/"] = found["/index.html"]
    return found


def console_app(
    router: Router, feed: ConsoleFeed, board: AdviceBoard, key: str, *, on_loopback: bool
) -> ASGIApp:
    """Return the application. `key` is the operator's. `on_loopback`: only this host reaches it."""
    app = build_app(router, operator=True)
    _add_stream(app, feed)
    _add_advice(app, board)
    checked: ASGIApp = AuthMiddleware(app, (key,))
    return ConsolePages(page_files(), LocalPages(checked) if on_loopback else checked)


class LocalPages:
    """Refuses web pages of other hosts the routes that need no key: see `check_host`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._cors = Cors(())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] in OPEN_PATHS:
            try:
                check_host(scope["headers"], self._cors, _LOCAL_ONLY)
            except HostNotAllowed as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class ConsolePages:
    """Answers GET for the page's files, and passes everything else on."""

    def __init__(self, pages: Mapping[str, PageFile], app: ASGIApp) -> None:
        self._pages = pages
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        page = None
        if scope["type"] == "http" and scope["method"] in ("GET", "HEAD"):
            page = self._pages.get(scope["path"])
        if page is None:
            await self._app(scope, receive, send)
            return
        body = page.body if scope["method"] == "GET" else b""
        headers = HEADERS | {"content-length": str(len(page.body))}
        response = Response(body, media_type=page.media_type, headers=headers)
        await response(scope, receive, send)


def _add_stream(app: FastAPI, feed: ConsoleFeed) -> None:
    @app.get(STREAM_PATH)
    async def stream() -> Response:
        return StreamResponse(feed)


def _add_advice(app: FastAPI, board: AdviceBoard) -> None:
    @app.post(ADVICE_PATH)
    async def advice(request: Request) -> Response:
        board.post(await _body_of(request))
        return Response(status_code=204)


async def _body_of(request: Request) -> bytes:
    """Return a body of MAX_BYTES at most. Raises TooLarge, or InvalidRequest if it comes slowly."""
    body = b""
    try:
        async with asyncio.timeout(UPLOAD_S):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BYTES:
                    raise TooLarge(f"the advice is larger than {MAX_BYTES} bytes: send less")
    except TimeoutError as error:
        raise InvalidRequest(f"the advice did not come within {UPLOAD_S:.0f} s", "body") from error
    return body


class StreamResponse(Response):
    """One page's stream, until it disconnects or stops reading."""

    def __init__(self, feed: ConsoleFeed) -> None:
        super().__init__()
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = ClientConnection(send)
        try:
            with self._feed.open() as viewer:
                await while_connected(receive, self._send(client, viewer))
        except ClientGone:
            pass  # the page was closed

    async def _send(self, client: ClientConnection, viewer: Viewer) -> None:
        await client.start(b"text/event-stream; charset=utf-8")
        while (message := await viewer.next()) is not None:
            await client.write(message)
        await client.write(b"", last=True)
