"""Both ends of a handoff's lease (invariant I2), as plain clocks without a clock.

The reader sends renewal n at its time t; the granter pins until receipt + L; once renewal n is
acknowledged, the reader trusts until t + 0.9 L. Receipt is never before t, so the reader always
stops first, with no shared clock, whatever the delays, while the clocks' rates differ by less
than a tenth. `now` is any monotonic time in seconds of the caller's own.

    reader   t ├──────────── 0.9 L ───────────┤ trusts
    granter     receipt ├──────────── L ───────────┤ pins
"""

from __future__ import annotations

TRUSTED_SHARE = 0.9


class GranterLease:
    """Until when the granter pins. Opening the handoff counts as the first renewal."""

    def __init__(self, lease_s: float, now: float) -> None:
        self._lease_s = lease_s
        self._until = now + lease_s

    def renewed(self, n: int, now: float) -> bool:
        """Take a renewal. True: acknowledge it. False: the lease had run out already, and stays
        so. A repeated or late `n` prolongs too: longer pinning does no harm."""
        if n < 0 or self.expired(now):
            return False
        self._until = max(self._until, now + self._lease_s)
        return True

    def expired(self, now: float) -> bool:
        return now >= self._until

    def remaining(self, now: float) -> float:
        """Seconds until the end; 0 when it has passed."""
        return max(0.0, self._until - now)


class ReaderLease:
    """Until when the reader trusts. Nothing is trusted before a first acknowledgement."""

    def __init__(self, lease_s: float, renewals_per_lease: int = 4) -> None:
        if renewals_per_lease < 2:
            raise ValueError("a lease needs at least 2 renewals in its time")
        self._trusted_s = TRUSTED_SHARE * lease_s
        self._interval_s = lease_s / renewals_per_lease
        self._sent: dict[int, float] = {}  # renewals in flight: n to time of sending
        self._next = 0
        self._due = 0.0
        self._trusted_until: float | None = None

    def renewal(self, now: float) -> int:
        """The number of the renewal to be sent; `now` is read before it is sent."""
        n = self._next
        self._next += 1
        useful = now - self._trusted_s
        self._sent = {k: at for k, at in self._sent.items() if at > useful}
        self._sent[n] = now
        self._due = now + self._interval_s
        return n

    def acknowledged(self, n: int) -> bool:
        """Take the acknowledgement of renewal `n`. Returns False for one that changes nothing:
        unknown, acknowledged before, or older than one that was."""
        at = self._sent.get(n)
        if at is None:
            return False
        self._sent = {k: sent for k, sent in self._sent.items() if k > n}
        until = at + self._trusted_s
        self._trusted_until = max(self._trusted_until or until, until)
        return True

    def shorten(self, lease_s: float) -> None:
        """Use the shorter lease that the granter grants; renewals keep their share of it."""
        share = min(1.0, TRUSTED_SHARE * lease_s / self._trusted_s)
        self._trusted_s *= share
        self._interval_s *= share

    def trusted(self, now: float) -> bool:
        return self._trusted_until is not None and now < self._trusted_until

    @property
    def trusted_until(self) -> float | None:
        """None before the first acknowledgement."""
        return self._trusted_until

    def due(self, now: float) -> bool:
        """Whether the next renewal is to be sent."""
        return now >= self._due

    @property
    def due_at(self) -> float:
        return self._due
