"""Which workers are passed over for a while: a circuit for each, by boot id.

    closed ─(strikes, slow, hung)─▶ open ─(OPEN_S, twice as long each time)─▶ half-open
      ▲                              ▲                                          │ one request
      │                              └───────────── it fails ───────────────────┤
      └── probation: one strike opens ◀──────────── it is served ───────────────┘

Workers are compared with those of their own role. At most a third of them is passed over at
once, or one of two that fails: those whose circuits have been open for the longest time. Knows
no links and no requests. Pure: time and randomness are given. Owned by the fleet.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from baton.runtime import metrics

STRIKES = 5.0  # a failure is one; a served request takes half of one away
OPEN_S = 5.0
OPEN_MOST_S = 300.0
MOST_DOUBLINGS = 20
PROBE_S = 30.0  # then another request may probe
SLOW_FACTOR = 5.0  # times the fellows' median step
SLOW_MS = 20.0  # and more than so much above it: short steps differ by what else the host does
SLOW_FOR_S = 3.0

Reason = Literal["failing", "slow", "hung"]


@dataclass(slots=True)
class _Circuit:
    strikes: float = 0.0
    reason: Reason | None = None  # None: closed
    opened_s: float = 0.0
    until_s: float = 0.0
    openings: int = 0  # in a row, each on the probation of the one before
    probe_s: float | None = None
    probation_s: float = 0.0  # until then
    slow_s: float | None = None  # since then

    def passed_over(self, now_s: float) -> bool:
        if self.reason is None:
            return False
        probed = self.probe_s is not None and now_s < self.probe_s + PROBE_S
        return now_s < self.until_s or probed


class Circuits:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._circuits: dict[bytes, _Circuit] = {}
        self.version = 0  # another one: other workers may be passed over

    # -- what has happened -------------------------------------------------------------------

    def failed(self, boot_id: bytes, now_s: float) -> None:
        """A request failed there for the worker's sake, or its link broke."""
        circuit = self._circuits.setdefault(boot_id, _Circuit())
        if circuit.reason is not None:
            if circuit.probe_s is not None:
                self._open(circuit, now_s, "failing")
            return  # else it was placed there before
        circuit.strikes += 1
        if circuit.strikes >= (1 if now_s < circuit.probation_s else STRIKES):
            self._open(circuit, now_s, "failing")

    def hung(self, boot_id: bytes, now_s: float) -> None:
        circuit = self._circuits.setdefault(boot_id, _Circuit())
        if circuit.reason is None or circuit.probe_s is not None:
            self._open(circuit, now_s, "hung")

    def served(self, boot_id: bytes, now_s: float) -> None:
        """A request ended there as it should."""
        circuit = self._circuits.get(boot_id)
        if circuit is None:
            return
        if circuit.probe_s is not None:
            self.version += 1
            circuit.probation_s = now_s + circuit.until_s - circuit.opened_s
            circuit.reason = circuit.probe_s = circuit.slow_s = None
            circuit.strikes = 0.0
        elif circuit.reason is None:
            circuit.strikes = max(0.0, circuit.strikes - 0.5)

    def placed(self, boot_id: bytes, now_s: float) -> None:
        """A request goes there: where the circuit is half-open, it is the probe."""
        circuit = self._circuits.get(boot_id)
        if circuit is not None and circuit.reason is not None and not circuit.passed_over(now_s):
            circuit.probe_s = now_s
            self.version += 1

    def compare(
        self, step_ms: Mapping[bytes, float], busy: Collection[bytes], now_s: float
    ) -> None:
        """Judge the speed of one role's workers by their mean steps; only who is `busy` can be
        found slow, and only among three or more."""
        known = sorted(ms for ms in step_ms.values() if ms > 0)
        for boot_id in busy:
            usual_ms = _median_without(known, step_ms[boot_id])
            slow = step_ms[boot_id] > max(SLOW_FACTOR * usual_ms, usual_ms + SLOW_MS)
            circuit = self._circuits.setdefault(boot_id, _Circuit())
            if not slow or circuit.reason is not None:
                circuit.slow_s = None
            elif circuit.slow_s is None:
                circuit.slow_s = now_s
            elif now_s - circuit.slow_s >= SLOW_FOR_S:
                self._open(circuit, now_s, "slow")

    def keep(self, boot_ids: Collection[bytes]) -> None:
        """Forget all other workers."""
        for boot_id in self._circuits.keys() - set(boot_ids):
            del self._circuits[boot_id]
            self.version += 1

    # -- what follows ------------------------------------------------------------------------

    def passed_over(self, fleet: Mapping[bytes, str], now_s: float) -> frozenset[bytes]:
        """Who gets nothing now, of the linked workers and their roles."""
        found: dict[str, list[tuple[float, bytes]]] = {}
        for boot_id, circuit in self._circuits.items():
            if boot_id in fleet and circuit.passed_over(now_s):
                found.setdefault(fleet[boot_id], []).append((circuit.opened_s, boot_id))
        if not found:
            return frozenset()
        roles = list(fleet.values())
        return frozenset(
            boot_id
            for role, opened in found.items()
            for boot_id in self._longest(sorted(opened), roles.count(role))
        )

    def change_s(self, now_s: float) -> float:
        """Return when `passed_over` may next change by itself."""
        moments = [
            moment
            for circuit in self._circuits.values()
            if circuit.reason is not None
            for moment in (circuit.until_s, (circuit.probe_s or 0.0) + PROBE_S)
        ]
        return min((moment for moment in moments if moment > now_s), default=float("inf"))

    def counts(self, now_s: float) -> dict[str, int]:
        """Circuits by state."""
        states = {"closed": 0, "open": 0, "half_open": 0}
        for circuit in self._circuits.values():
            if circuit.reason is None:
                states["closed"] += 1
            else:
                states["open" if now_s < circuit.until_s else "half_open"] += 1
        return states

    def _longest(self, opened: list[tuple[float, bytes]], workers: int) -> list[bytes]:
        if workers == 2:  # it would draw all requests, since it is never busy
            opened = [entry for entry in opened if self._circuits[entry[1]].reason != "slow"]
        most = 1 if workers == 2 else workers // 3
        return [boot_id for _, boot_id in opened[:most]]

    def _open(self, circuit: _Circuit, now_s: float, reason: Reason) -> None:
        again = circuit.reason is not None or now_s < circuit.probation_s
        circuit.openings = circuit.openings + 1 if again else 1
        open_s = min(OPEN_S * 2 ** min(circuit.openings - 1, MOST_DOUBLINGS), OPEN_MOST_S)
        circuit.reason, circuit.opened_s = reason, now_s
        circuit.until_s = now_s + open_s * self._rng.uniform(1.0, 1.2)
        circuit.probe_s = circuit.slow_s = None
        circuit.strikes = 0.0
        self.version += 1
        metrics.CIRCUITS_OPENED.labels(reason).inc()


def _median_without(known: Sequence[float], own: float) -> float:
    """Return the median of the sorted values without one that is `own`, if that is one of them;
    infinity where fewer than two are left."""
    count = len(known) - (own > 0)
    if count < 2:
        return float("inf")
    place = bisect_left(known, own) if own > 0 else len(known)
    low, high = (known[at + (at >= place)] for at in ((count - 1) // 2, count // 2))
    return (low + high) / 2
