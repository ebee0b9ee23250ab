"""Slow start: a worker that has just joined gets a growing share of its role's placements.

    share of the fair share
      1.5 |            ________ ... until it is as loaded as the others
      1.0 |        .-'|
      0.1 |___.--'    |
          joined   6.4 s  10 s

An empty worker costs less than any other, so without this it would get every new request until it
is as full as they are, with cold caches and no measured peers. Each placement in its role adds to
its allowance what its share is then, and each one on it takes one away; below one, it is deferred:
ranked after the workers that have none to wait for. It is a preference alone: what no other worker
can take, a deferred one gets. Only a worker that joins later than the others is limited, so a
fleet or a router that starts is not. Pure: time is given. Owned by the fleet.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.router.fleet.roster import Roster
from baton.router.fleet.worker_view import WorkerView
from baton.runtime import metrics

RAMP_S = 10.0
FIRST_SHARE, LAST_SHARE = 0.1, 1.5  # of the fair share, when it joins and after RAMP_S
TOGETHER_S = 5.0  # workers that join so soon after the first linked one of their role are alike
MAX_ALLOWANCE = 2.0  # not used up: placement does not prefer it any more
CATCH_UP_S = 60.0  # then it has the time of the others, however loaded it is
NONE: frozenset[bytes] = frozenset()


@dataclass(slots=True)
class _Start:
    """One worker that is limited. `allowance` is in placements."""

    role: str
    boot_id: bytes
    joined_s: float
    allowance: float = 1.0

    def share(self, now_s: float) -> float:
        return growing_share(now_s - self.joined_s)

    def over(self, now_s: float) -> bool:
        age_s = now_s - self.joined_s
        return age_s >= CATCH_UP_S or (age_s >= RAMP_S and self.allowance >= MAX_ALLOWANCE)


def growing_share(age_s: float) -> float:
    """Return the share of the fair share that a worker may have so long after it joined."""
    return FIRST_SHARE + (LAST_SHARE - FIRST_SHARE) * min(1.0, max(0.0, age_s) / RAMP_S)


class SlowStart:
    """Keyed by worker id; another boot or another role has another time of joining."""

    def __init__(self) -> None:
        self._joined: dict[str, dict[str, float]] = {}  # by role, then by worker id
        self._starting: dict[str, _Start] = {}

    # -- events ------------------------------------------------------------------------------

    def follow(self, view: WorkerView) -> None:
        """Take the view of a linked worker."""
        name, joined = view.worker_id, self._joined.setdefault(view.role, {})
        if joined.get(name) == view.joined_s:
            return
        self.forget(name)
        joined[name] = view.joined_s
        if view.joined_s - min(joined.values()) > TOGETHER_S:
            self._starting[name] = _Start(view.role, view.boot_id, view.joined_s)

    def forget(self, worker_id: str) -> None:
        """Forget a worker that is not linked any more."""
        self._starting.pop(worker_id, None)
        for joined in self._joined.values():
            joined.pop(worker_id, None)

    def record_placement(self, worker_id: str, role: str, roster: Roster, now_s: float) -> None:
        """Record a placement on a worker of that role: all starting ones may have the more."""
        starts = self._of_role(role)
        if not starts:
            return
        workers = sum(len(group.accepting) for group in roster.groups(role))
        for name, start in starts.items():
            taken = 1.0 if name == worker_id else 0.0
            allowance = start.allowance + start.share(now_s) / max(1, workers) - taken
            start.allowance = min(MAX_ALLOWANCE, max(0.0, allowance))
            if start.over(now_s):
                del self._starting[name]
        if any(start.allowance < 1.0 for start in starts.values()):
            metrics.SLOW_START_PLACEMENTS.labels(role).inc()

    # -- results -----------------------------------------------------------------------------

    def deferred(self, roster: Roster, now_s: float) -> frozenset[bytes]:
        """Return the boot ids of the workers that come after the others of their role now. None of
        a role of which no other worker takes work."""
        if not self._starting:
            return NONE
        return frozenset(
            start.boot_id
            for role in ("prefill", "decode")
            if self._limited(role, roster, now_s)
            for start in self._of_role(role).values()
            if start.allowance < 1.0
        )

    def withheld_room(self, roster: Roster, max_waiting: int, now_s: float) -> int:
        """Return how much of the room in the queues of decode workers the requests that wait in
        the router do not get yet: they go to a starting worker over RAMP_S."""
        if not self._starting or not self._limited("decode", roster, now_s):
            return 0
        withheld = 0
        for name, start in self._of_role("decode").items():
            view = roster.get(name)
            if view is not None and not view.draining:
                ramp = min(1.0, (now_s - start.joined_s) / RAMP_S)
                beyond = max(max(1, int(max_waiting * ramp)), view.queued_requests)
                withheld += max(0, max_waiting - beyond)
        return withheld

    def counts(self, now_s: float) -> dict[str, int]:
        """Return the number of starting workers by role. Without placements none ends by itself:
        those whose time is over do not count."""
        return {
            role: sum(not start.over(now_s) for start in self._of_role(role).values())
            for role in ("prefill", "decode")
        }

    def _of_role(self, role: str) -> dict[str, _Start]:
        return {name: start for name, start in self._starting.items() if start.role == role}

    def _limited(self, role: str, roster: Roster, now_s: float) -> bool:
        """Return whether another worker than the starting ones takes work of the role."""
        for name, start in [*self._starting.items()]:
            if start.joined_s + CATCH_UP_S <= now_s:
                del self._starting[name]
        groups = roster.groups(role)
        return any(name not in self._starting for group in groups for name in group.accepting)
