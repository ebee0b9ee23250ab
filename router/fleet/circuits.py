"""Workers that get no requests for a while: one circuit for each worker, by boot id.

    closed ─(strikes, slow, hung)─▶ open ─(OPEN_S, doubled each time)─▶ half-open
      ▲                              ▲                                     │ one request, the probe
      │                              └───────────── it fails ──────────────┤
      └── probation: one strike opens ◀──────────── it succeeds ───────────┘

A worker is compared with the others of its role. At most a third of a role's workers is passed
over at once, or one of two if it fails: those whose circuits have been open for the longest time.
What fails another router is suspected: two strikes open its circuit, and none opens by itself.
Knows no links and no requests. Pure: time and randomness are given. Owned by the fleet.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from baton.runtime import metrics

STRIKES = 5.0  # a failure adds one, a success takes half of one away
SUSPECTED_STRIKES = 2.0  # while another router holds the worker's circuit open
OPEN_S = 5.0
MAX_OPEN_S = 300.0
MAX_DOUBLINGS = 20
PROBE_TIMEOUT_S = 30.0  # then another request may be the probe
SLOW_FACTOR = 5.0  # times the median step of the other workers
SLOW_MS = 20.0  # and at least so much above it: short steps vary with the host's other load
SLOW_FOR_S = 3.0

Reason = Literal["failing", "slow", "hung"]


@dataclass(slots=True)
class _Circuit:
    strikes: float = 0.0
    reason: Reason | None = None  # None: closed
    opened_s: float = 0.0
    until_s: float = 0.0
    openings: int = 0  # in a row, each within the probation of the previous one
    probe_s: float | None = None
    probation_until_s: float = 0.0
    slow_since_s: float | None = None

    def passed_over(self, now_s: float) -> bool:
        if self.reason is None:
            return False
        probed = self.probe_s is not None and now_s < self.probe_s + PROBE_TIMEOUT_S
        return now_s < self.until_s or probed


class Circuits:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._circuits: dict[bytes, _Circuit] = {}
        self.version = 0  # changes when other workers may be passed over
        self.suspected: frozenset[bytes] = frozenset()  # boot ids that fail other routers

    # -- events ------------------------------------------------------------------------------

    def record_failure(self, boot_id: bytes, now_s: float) -> None:
        """Record that the worker failed a request, or that its link was lost."""
        circuit = self._circuits.setdefault(boot_id, _Circuit())
        if circuit.reason is not None:
            if circuit.probe_s is not None:
                self._open(circuit, now_s, "failing")
            return  # without a probe: the request was placed before the circuit opened
        circuit.strikes += 1
        if circuit.strikes >= self._enough(boot_id, circuit, now_s):
            self._open(circuit, now_s, "failing")

    def _enough(self, boot_id: bytes, circuit: _Circuit, now_s: float) -> float:
        if now_s < circuit.probation_until_s:
            return 1.0
        return SUSPECTED_STRIKES if boot_id in self.suspected else STRIKES

    def record_hang(self, boot_id: bytes, now_s: float) -> None:
        circuit = self._circuits.setdefault(boot_id, _Circuit())
        if circuit.reason is None or circuit.probe_s is not None:
            self._open(circuit, now_s, "hung")

    def record_success(self, boot_id: bytes, now_s: float) -> None:
        """Record that the worker served a request."""
        circuit = self._circuits.get(boot_id)
        if circuit is None:
            return
        if circuit.probe_s is not None:
            self.version += 1
            circuit.probation_until_s = now_s + circuit.until_s - circuit.opened_s
            circuit.reason = circuit.probe_s = circuit.slow_since_s = None
            circuit.strikes = 0.0
        elif circuit.reason is None:
            circuit.strikes = max(0.0, circuit.strikes - 0.5)

    def record_placement(self, boot_id: bytes, now_s: float) -> None:
        """Record a placement: if the circuit is half-open, the request is the probe."""
        circuit = self._circuits.get(boot_id)
        if circuit is not None and circuit.reason is not None and not circuit.passed_over(now_s):
            circuit.probe_s = now_s
            self.version += 1

    def compare_steps(
        self, step_ms: Mapping[bytes, float], busy: Collection[bytes], now_s: float
    ) -> None:
        """Compare the mean steps of one role's workers; only a `busy` worker can be found slow,
        and only among three or more."""
        known = sorted(ms for ms in step_ms.values() if ms > 0)
        for boot_id in busy:
            usual_ms = median_without(known, step_ms[boot_id])
            slow = step_ms[boot_id] > max(SLOW_FACTOR * usual_ms, usual_ms + SLOW_MS)
            circuit = self._circuits.setdefault(boot_id, _Circuit())
            if not slow or circuit.reason is not None:
                circuit.slow_since_s = None
            elif circuit.slow_since_s is None:
                circuit.slow_since_s = now_s
            elif now_s - circuit.slow_since_s >= SLOW_FOR_S:
                self._open(circuit, now_s, "slow")

    def forget_others(self, boot_ids: Collection[bytes]) -> None:
        """Forget all workers but these."""
        for boot_id in self._circuits.keys() - set(boot_ids):
            del self._circuits[boot_id]
            self.version += 1

    # -- results -----------------------------------------------------------------------------

    def passed_over(self, fleet: Mapping[bytes, str], now_s: float) -> frozenset[bytes]:
        """Return the workers that get no requests now. `fleet`: linked workers and their roles."""
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

    def failing(self) -> list[bytes]:
        """Return the workers whose circuit is open or half-open since they failed requests."""
        return [e for e, circuit in self._circuits.items() if circuit.reason == "failing"]

    def next_change_s(self, now_s: float) -> float:
        """Return when `passed_over` may next change without an event."""
        times = [
            time_s
            for circuit in self._circuits.values()
            if circuit.reason is not None
            for time_s in (circuit.until_s, (circuit.probe_s or 0.0) + PROBE_TIMEOUT_S)
        ]
        return min((time_s for time_s in times if time_s > now_s), default=float("inf"))

    def counts(self, now_s: float) -> dict[str, int]:
        """Return the number of circuits by state."""
        states = {"closed": 0, "open": 0, "half_open": 0}
        for circuit in self._circuits.values():
            if circuit.reason is None:
                states["closed"] += 1
            else:
                states["open" if now_s < circuit.until_s else "half_open"] += 1
        return states

    def _longest(self, opened: list[tuple[float, bytes]], workers: int) -> list[bytes]:
        if workers == 2:  # only a failing one, which is never busy and would get all requests
            opened = [entry for entry in opened if self._circuits[entry[1]].reason != "slow"]
        limit = 1 if workers == 2 else workers // 3
        return [boot_id for _, boot_id in opened[:limit]]

    def _open(self, circuit: _Circuit, now_s: float, reason: Reason) -> None:
        again = circuit.reason is not None or now_s < circuit.probation_until_s
        circuit.openings = circuit.openings + 1 if again else 1
        open_s = min(OPEN_S * 2 ** min(circuit.openings - 1, MAX_DOUBLINGS), MAX_OPEN_S)
        circuit.reason, circuit.opened_s = reason, now_s
        circuit.until_s = now_s + open_s * self._rng.uniform(1.0, 1.2)
        circuit.probe_s = circuit.slow_since_s = None
        circuit.strikes = 0.0
        self.version += 1
        metrics.CIRCUITS_OPENED.labels(reason).inc()


def median_without(known: Sequence[float], own: float) -> float:
    """Return the median of the sorted values without `own`, if that is one of them; infinity if
    fewer than two are left."""
    count = len(known) - (own > 0)
    if count < 2:
        return float("inf")
    index = bisect_left(known, own) if own > 0 else len(known)
    low, high = (known[at + (at >= index)] for at in ((count - 1) // 2, count // 2))
    return (low + high) / 2
