"""Whether a draining worker keeps what it has promised: it finishes, or hands back.

    begins ─ drain_s ─▶ may hand back ─ two leases ─▶ may leave its readers ─▶ ends

Looks at the three stages of simulation/fleet/rolling_restart.py. A decode worker ends no request
before its time is over, and leaves none that it has neither finished nor handed back; a prefill
worker fails no prompt before, and serves its readers until their leases are over.
Changes nothing of what happens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from baton.decode_worker.worker import DecodeWorker
from baton.prefill_worker.worker import PrefillWorker
from baton.runtime.errors import Draining, StalePlacement
from baton.simulation.fleet.scenario import Fault
from baton.simulation.fleet.world import WorkerProcess, World

ORDERLY = ("drain", "role")  # faults beside which every router hears what a worker says


class Drains:
    """`breaches` gets a line for each promise that a worker's end breaks."""

    def __init__(self, world: World, breaches: list[str]) -> None:
        self._world = world
        self._breaches = breaches
        self._begun_s: dict[bytes, float] = {}  # by boot, on the world's clock
        self._disturbed = False
        world.restart_stage = self._look

    def struck(self, fault: Fault) -> None:
        self._disturbed = self._disturbed or fault.kind not in ORDERLY

    def _look(self, stage: str, process: WorkerProcess) -> None:
        worker = process.worker
        if stage == "begins":
            self._begun_s[process.boot_id] = self._world.loop.world_s
            if isinstance(worker, DecodeWorker):
                self._watch_requests(process, worker)
            else:
                self._watch_prompts(process, worker)
            return
        if isinstance(worker, PrefillWorker):
            found = self._left_readers(process, worker) if stage == "stops" else ()
        else:
            found = _left(worker) if stage == "stops" else self._untold(process)
        self._breaches += [f"{process.machine.name} drains, and {what}" for what in found]

    def _so_far_s(self, process: WorkerProcess) -> float:
        """Seconds since its SIGTERM, by its own clock."""
        so_far_s = self._world.loop.world_s - self._begun_s[process.boot_id]
        return so_far_s * process.machine.rate

    def _too_early(self, process: WorkerProcess, what: str) -> None:
        so_far_s, drain_s = self._so_far_s(process), self._world.config.worker.drain_s
        if so_far_s < drain_s:
            self._breaches.append(
                f"{process.machine.name} drains, and {what} after {so_far_s:.3f} s of {drain_s:g} s"
            )

    def _watch_requests(self, process: WorkerProcess, worker: DecodeWorker) -> None:
        requests: Any = worker._requests
        fail = requests.fail

        def watched(sequence: Any, error: Any) -> None:
            goes_on = isinstance(error, StalePlacement)  # its prefill workers have gone, not it
            if isinstance(error, Draining) and not goes_on and not sequence.ended:
                self._too_early(process, f"hands back {sequence.request.request_id}")
            fail(sequence, error)

        requests.fail = watched

    def _watch_prompts(self, process: WorkerProcess, worker: PrefillWorker) -> None:
        scheduler: Any = worker._scheduler
        stop = scheduler.stop

        def watched(error: Any) -> None:
            if count := scheduler.waiting + scheduler.computing:
                self._too_early(process, f"fails {count} prompts")
            stop(error)

        scheduler.stop = watched

    def _left_readers(self, process: WorkerProcess, worker: PrefillWorker) -> Iterable[str]:
        config, so_far_s = self._world.config, self._so_far_s(process)
        if worker.grants.open and so_far_s < config.worker.drain_s + 2 * config.handoff.lease_s:
            yield f"leaves {worker.grants.open} readers after {so_far_s:.3f} s"

    def _untold(self, process: WorkerProcess) -> Iterable[str]:
        """Routers that still wait for what it has handed back, where nothing kept them from
        hearing of it."""
        for router in self._world.routers.values():
            link = router.fleet.link(process.machine.name)
            if self._disturbed or link is None or not link.up or link.boot_id != process.boot_id:
                continue
            for attempt in router.dispatcher.attempts.values():
                if attempt.link is link:
                    yield f"{router.machine.name} still waits there for {attempt.wire_id}"


def _left(worker: DecodeWorker) -> Iterable[str]:
    for request in worker._requests.living():
        yield f"{request.request_id} is neither finished nor handed back"
    if worker._handoffs.open:
        yield f"leaves {worker._handoffs.open} handoffs open"
