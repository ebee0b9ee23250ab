"""The routers that a worker is linked to, and the load that they could not give to any worker.

    router ── heartbeat: waiting, refused ──▶ worker ── status ──▶ controller

Each worker knows the same of a router, so the controller sees it while one worker answers. Owned by
the worker's loop.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.proto import worker_pb2


@dataclass(frozen=True, slots=True)
class LinkedRouter:
    """A router: `host` is where it called from, `waiting` its requests that no worker has,
    `refused` how many it has refused since it started because workers had no room."""

    router_id: str
    host: str
    waiting: int = 0
    refused: int = 0


class LinkedRouters:
    def __init__(self) -> None:
        self._routers: dict[object, LinkedRouter] = {}  # by stream

    def open(self, stream: object, router_id: str, host: str) -> None:
        self._routers[stream] = LinkedRouter(router_id, host)

    def record_heartbeat(self, stream: object, beat: worker_pb2.Heartbeat) -> None:
        """Take what a router says of itself."""
        known, reported = self._routers.pop(stream), beat.unplaced  # which makes it the last one
        self._routers[stream] = LinkedRouter(
            known.router_id, known.host, reported.waiting, reported.refused
        )

    def close(self, stream: object) -> None:
        """Forget a stream; it may never have been opened."""
        self._routers.pop(stream, None)

    def all(self) -> list[LinkedRouter]:
        """Return each router once, in the order of ids: of two streams of one the later heard,
        with the larger counter."""
        ordered = sorted(self._routers.values(), key=lambda each: (each.router_id, each.refused))
        return list({each.router_id: each for each in ordered}.values())
