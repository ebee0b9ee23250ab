"""Whether a worker of which no step ends says so in time: what turns its `/readyz` red.

    hang ─ PROBED_S ─▶ a step has begun, and hangs ─ RED_S ─▶ `health` names a reason

An idle worker is probed, so that it is judged too. Looked at on the worker's own clock, and only
where nothing else has befallen it: a slow or stopped worker may take longer
(docs/reliability/promises.md). Changes nothing of what happens.
"""

from __future__ import annotations

import asyncio
from typing import Any

from baton.engine.scheduling.batch import StepBatch
from baton.simulation.fleet.scenario import Fault
from baton.simulation.fleet.world import WorkerProcess, World

PROBED_S = 0.7  # a probe is asked for twice a second, and waits for the steps under way
RED_S = 2.0  # after the step began, with steps of up to 0.62 s
SUMS_RED_S = 2.5  # a call that was asked for so long ago has turned its worker red
SUMS_LOOK_S = 3.5  # after its thread was stuck
KNOWN_STEPS = 2  # of a kind, without which it may be a slow first one
BEFALLEN = ("hang", "pause", "slow", "kill", "drain", "role")  # what else keeps it from telling


class Readiness:
    """`breaches` gets a line for each worker that hangs and is not red."""

    def __init__(self, world: World, breaches: list[str]) -> None:
        self._world = world
        self._breaches = breaches
        self._befallen: dict[str, int] = {}  # workers, and how often

    def struck(self, fault: Fault) -> None:
        """Record a fault before it strikes."""
        name = fault.targets[0]
        if fault.kind == "checksums" and fault.for_s > SUMS_LOOK_S:
            self._watch_checksums(self._world.workers[name])
        if fault.kind not in BEFALLEN or name not in self._world.workers:
            return
        self._befallen[name] = self._befallen.get(name, 0) + 1
        process = self._world.workers[name]
        if fault.kind == "hang" and process.machine.alive:
            self._watch_next(process, fault.for_s)

    def _watch_checksums(self, process: WorkerProcess) -> None:
        def look() -> None:
            stuck = process.mover.oldest_checksum_s() > SUMS_RED_S
            if stuck and process.machine.alive and not process.worker.health.not_ready_reason():
                self._breaches.append(f"{process.machine.name} ends no checksums, and is ready")

        process.machine.context.run(asyncio.get_running_loop().call_later, SUMS_LOOK_S, look)

    def _watch_next(self, process: WorkerProcess, for_s: float) -> None:
        """The next step that begins is the one that hangs."""
        engine = process.engine
        step_s, begun = engine.step_s, False

        def watched(batch: StepBatch) -> float:
            nonlocal begun
            begun, engine.step_s = True, step_s
            hangs = process.machine.hang_s > 0  # else it began after the fault was over
            if hangs and for_s > RED_S:  # on its machine, as a probe of `/readyz` does
                asyncio.get_running_loop().call_later(RED_S, self._look, process, batch)
            return step_s(batch)

        def look() -> None:
            if not begun and self._is_judged(process) and process.pool.available:
                self._breaches.append(f"{process.machine.name} hangs, and is not probed")

        engine.step_s = watched
        if for_s > PROBED_S:
            process.machine.context.run(asyncio.get_running_loop().call_later, PROBED_S, look)

    def _look(self, process: WorkerProcess, batch: StepBatch) -> None:
        chunks = sum(len(piece.tokens) for piece in batch.slices) > len(batch.slices)
        steps: Any = process.worker.loop.steps
        known = len(steps._last[chunks]) >= KNOWN_STEPS
        if known and self._is_judged(process) and not process.worker.health.not_ready_reason():
            self._breaches.append(
                f"{process.machine.name}: a step has run for {RED_S:g} s, and it says it is ready"
            )

    def _is_judged(self, process: WorkerProcess) -> bool:
        return process.machine.alive and self._befallen[process.machine.name] == 1
