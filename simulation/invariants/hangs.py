"""Whether requests wait for a prefill worker that their router knows to hang.

    handoff opened at p ─ p hangs, router notified ─ FOR_S ─▶ it waits for p still: a breach

The worker that a request really asks is what its decode worker does, not what it tells. Looked at
from the moment at which a router finds a worker to hang, as long as it does. Sits on the processes
of one world, and changes nothing of what happens.
"""

from __future__ import annotations

from typing import Any

from baton.decode_worker.worker import DecodeWorker
from baton.router.fleet.worker_link import WorkerLink
from baton.simulation.fleet.world import RouterProcess, WorkerProcess, World

FOR_S = 1.4  # for the words to come; a link that brings none for so long has ended by silence


class Hangs:
    """`breaches` gets a line for each request that waits in vain."""

    def __init__(self, world: World, breaches: list[str]) -> None:
        self._world = world
        self._breaches = breaches
        # by decode worker's boot, request and attempt: the worker asked, and since when
        self._asked: dict[tuple[bytes, str, int], tuple[bytes, float]] = {}

    def over(self, process: WorkerProcess) -> None:
        """Watch a worker that has just been started."""
        if not isinstance(process.worker, DecodeWorker):
            return
        handoffs: Any = process.worker._handoffs
        attempt = handoffs._try

        async def watched(group: Any, candidate: Any, on_first: Any) -> None:
            key = (process.boot_id, group.request.request_id, group.request.attempt)
            self._asked[key] = (candidate.boot_id, self._world.loop.world_s)
            try:
                await attempt(group, candidate, on_first)
            finally:
                del self._asked[key]

        handoffs._try = watched

    def over_router(self, process: RouterProcess) -> None:
        dispatcher, hung = process.dispatcher, process.dispatcher.hung

        def watched(link: WorkerLink) -> None:
            hung(link)
            self._look_later(process, link, link.boot_id)

        dispatcher.hung = watched  # type: ignore[method-assign]  # wraps this instance alone

    def _look_later(self, process: RouterProcess, link: WorkerLink, boot_id: bytes) -> None:
        loop = self._world.loop
        loop.call_world(loop.world_s + FOR_S, self._look, process, link, boot_id)

    def _look(self, process: RouterProcess, link: WorkerLink, boot_id: bytes) -> None:
        if not (process.machine.alive and link.up and link.hung and link.boot_id == boot_id):
            return
        self._look_later(process, link, boot_id)
        if process.machine.stopped:
            return
        for attempt in process.dispatcher.attempts.values():
            decode_link = attempt.link
            if decode_link is None or not decode_link.up or attempt.answered:
                continue
            key = (decode_link.boot_id, attempt.wire_id, attempt.attempt)
            asked, since_s = self._asked.get(key, (b"", 0.0))
            waits_s = self._world.loop.world_s - since_s
            if asked == boot_id and waits_s >= FOR_S:
                self._breaches.append(
                    f"{process.machine.name}: {attempt.wire_id} waits for {link.worker_id} for "
                    f"{waits_s:.1f} s, which is known to hang"
                )
