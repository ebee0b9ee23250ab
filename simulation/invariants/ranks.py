"""Whether a worker ends with any of its ranks, soon enough; a short pause of one ends none.

    rank dies, or stands still for long ─ ENDS_S ─▶ the worker's loop has ended ─ LEAVES_S ─▶ its
                                                                    process is replaced by another

An idle worker notices by its next probe, a paused one after its pause. Looked at on the world's
clock; changes nothing of what happens.
"""

from __future__ import annotations

from baton.simulation.fleet.faults import RANK_HUNG_S
from baton.simulation.fleet.ranked_world import BRIEF_S
from baton.simulation.fleet.scenario import Fault
from baton.simulation.fleet.world import WorkerProcess, World

ENDS_S = 3.0
PROBED_S = 1.0  # until an idle worker computes a step, by the slowest of clocks
LEASES = 2  # that a prefill worker serves at its end
LEAVES_S = 1.5  # beside these leases


class RankEnds:
    """`breaches` gets a line for each worker that goes on without a rank, or ends with all."""

    def __init__(self, world: World, breaches: list[str]) -> None:
        self._world = world
        self._breaches = breaches
        self._paused_until_s: dict[str, float] = {}

    def struck(self, fault: Fault) -> None:
        """Record a fault before it strikes."""
        if fault.kind == "pause":
            for name in fault.targets:
                self._paused_until_s[name] = self._world.loop.world_s + fault.for_s
            return
        process = self._world.workers.get(fault.targets[0])
        if fault.kind != "rank" or process is None or not process.machine.alive:
            return
        if fault.what == "stops" and fault.for_s <= BRIEF_S:
            self._look_in(fault.for_s + RANK_HUNG_S, self._lives, process)
            return
        busy = bool(process.engine.under_way)
        ends_s = ENDS_S if busy else ENDS_S + PROBED_S
        self._look_in(ends_s, self._ended, process, ends_s)
        leaves_s = ends_s + LEASES * self._world.config.handoff.lease_s + LEAVES_S
        self._look_in(leaves_s, self._left, process, leaves_s)

    def _look_in(self, seconds: float, look: object, *arguments: object) -> None:
        self._world.loop.call_world(self._world.loop.world_s + seconds, look, *arguments)

    def _lives(self, process: WorkerProcess) -> None:
        if process.task.done() and process.machine.alive and not process.worker.draining.is_set():
            self._breaches.append(f"{process.machine.name} ended, and all of its ranks live")

    def _looks_later(self, look: object, process: WorkerProcess, within_s: float) -> bool:
        """Whether a pause has taken of the time, which then counts from its end."""
        over_s = self._paused_until_s.get(process.machine.name)
        left_s = -1.0 if over_s is None else over_s + within_s - self._world.loop.world_s
        if left_s > 0:
            self._look_in(left_s, look, process, within_s)
        return left_s > 0

    def _ended(self, process: WorkerProcess, within_s: float) -> None:
        if self._looks_later(self._ended, process, within_s):
            return
        healed = not process.engine.stands  # before its time, as the load was over
        if process.machine.alive and not process.task.done() and not healed:
            self._breaches.append(
                f"{process.machine.name} goes on {within_s:g} s after the end of a rank"
            )

    def _left(self, process: WorkerProcess, within_s: float) -> None:
        if self._looks_later(self._left, process, within_s):
            return
        still_there = self._world.workers[process.machine.name] is process
        if still_there and process.task.done():
            self._breaches.append(
                f"{process.machine.name} is still there {within_s:g} s after the end of a rank"
            )
