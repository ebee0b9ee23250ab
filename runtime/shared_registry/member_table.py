"""The members that a reader of a shared registry knows, and when it last learned of each.

    announced ─▶ listed ─┬─(withdrawn)────────────▶ ended ─(lifetime over)─▶ forgotten
                         └─(lifetime over, no rise of its counter)─────────▶ forgotten

An entry counts as a sign of life only if its counter is higher than that of the last one, also of
a boot that was forgotten: a copy of an old entry neither keeps a member listed nor lists it again.
A deletion is not a withdrawal: a member stays listed for
its lifetime. Pure: time is given. Owned by the registry client.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.runtime.registry import WorkerRecord
from baton.runtime.shared_registry.signed_entry import SignedEntry

MAX_MEMBERS = 8192  # ended ones included
MAX_FORGOTTEN = 8192  # boots whose last counter is kept

_Boot = tuple[str, str]  # worker id and boot id


@dataclass(frozen=True, slots=True)
class _Member:
    entry: SignedEntry
    learned_s: float  # on the reader's clock


class MemberTable:
    """`lifetime_s` is how long a member stays listed without a new entry."""

    def __init__(self, lifetime_s: float) -> None:
        self._lifetime_s = lifetime_s
        self._members: dict[_Boot, _Member] = {}
        self._forgotten: dict[_Boot, int] = {}  # their last counters, the oldest first

    def learn(self, entry: SignedEntry, now_s: float) -> bool:
        """Take an entry of valid signature. Return whether it counts: it does not if its counter
        is not higher than the last one, or if MAX_MEMBERS others are known."""
        boot = (entry.record.worker_id, entry.record.boot_id)
        known = self._members.get(boot)
        if known is None and len(self._members) >= MAX_MEMBERS:
            return False
        if known is not None and (known.entry.withdrawn or entry.counter <= known.entry.counter):
            return False
        if entry.counter <= self._forgotten.get(boot, -1):
            return False
        self._forgotten.pop(boot, None)
        self._members[boot] = _Member(entry, now_s)
        return True

    def expire(self, now_s: float) -> None:
        """Forget members of which nothing was learned for their lifetime."""
        for boot, member in list(self._members.items()):
            if now_s - member.learned_s > self._lifetime_s:
                del self._members[boot]
                self._forgotten[boot] = member.entry.counter
        while len(self._forgotten) > MAX_FORGOTTEN:
            del self._forgotten[next(iter(self._forgotten))]

    def resume(self, now_s: float) -> None:
        """Begin every lifetime again: while the registry was not readable, no member could be
        learned of."""
        self._members = {
            boot: _Member(member.entry, now_s) for boot, member in self._members.items()
        }

    def records(self) -> list[WorkerRecord]:
        """Return the listed members; of several boots of one worker the newest comes last."""
        listed = [e.entry for e in self._members.values() if not e.entry.withdrawn]
        listed.sort(key=lambda entry: (entry.record.worker_id, entry.started))
        return [entry.record for entry in listed]
