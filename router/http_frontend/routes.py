"""The routes of the API, and the nearest route for a path that does not exist.

Knows only names. Stateless.
"""

from __future__ import annotations

import difflib

from baton.runtime.errors import NotFound

CHAT_PATH = "/v1/chat/completions"
COMPLETION_PATH = "/v1/completions"
EXPLAIN = "/explain"  # behind one of the two: how such a request would be placed
GENERATION_PATHS = frozenset({CHAT_PATH, COMPLETION_PATH})
ROUTES = (
    CHAT_PATH,
    COMPLETION_PATH,
    CHAT_PATH + EXPLAIN,
    COMPLETION_PATH + EXPLAIN,
    "/v1/models",
    "/tokenize",
    "/detokenize",
    "/tokenizer_info",
    "/health",
    "/livez",
    "/readyz",
    "/metrics",
    "/version",
    "/trace/{request_id}",
    "/traces",
    "/openapi.json",
)
_EQUIVALENTS = {  # routes of other APIs, and ours for the same purpose
    "/v1/responses": CHAT_PATH,
    "/v1/messages": CHAT_PATH,
    "/api/chat": CHAT_PATH,
    "/generate": COMPLETION_PATH,
    "/api/generate": COMPLETION_PATH,
}
_MAX_PATH = 200  # characters that are compared
_MIN_SIMILARITY = 0.75  # from 0 to 1: below it, a route is not suggested


def no_route(path: str) -> NotFound:
    """Return the error for a path that has no route; it names the nearest one."""
    shown = path[:_MAX_PATH]
    instead = _nearest(shown)
    use = f"use {instead}" if instead else f"the routes are {', '.join(ROUTES)}"
    return NotFound(f"there is no route {shown}: {use}")


def _nearest(path: str) -> str | None:
    parts = [part for part in path.lower().split("/") if part not in ("", "v1")]
    wanted = "/" + "/".join(parts)
    by_end = {route.removeprefix("/v1"): route for route in (*ROUTES, *_EQUIVALENTS)}
    if wanted not in by_end:
        near = difflib.get_close_matches(wanted, by_end, n=1, cutoff=_MIN_SIMILARITY)
        if not near:
            return None
        wanted = near[0]
    found = by_end[wanted]
    return _EQUIVALENTS.get(found, found)
