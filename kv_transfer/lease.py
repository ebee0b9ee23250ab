"""Both ends of a handoff's lease (invariant I2); the caller passes the time.

The reader sends renewal n at its time t; the granter pins until receipt + L; once renewal n is
acknowledged, the reader trusts until t + 0.9 L. Receipt is never before t, so the reader stops
first with any delay and without a shared clock, if the rates of both clocks differ by less than a
tenth. `now` is the caller's monotonic time in seconds.

    reader   t ├──────────── 0.9 L ───────────┤ trusts
    granter     receipt ├──────────── L ───────────┤ pins
"""

from __future__ import annotations

TRUSTED_SHARE = 0.9


class GranterLease:
    """The granter's end, which limits the pins. The opening counts as the first renewal."""

    def __init__(self, lease_s: float, now: float) -> None:
        self._lease_s = lease_s
        self._until = now + lease_s

    def renewed(self, n: int, now: float) -> bool:
        """Record a renewal. Returns whether to acknowledge it; False: the lease has ended, and
        stays so. A repeated or late `n` prolongs it too, since longer pinning is harmless."""
        if n < 0 or self.expired(now):
            return False
        self._until = max(self._until, now + self._lease_s)
        return True

    def expired(self, now: float) -> bool:
        return now >= self._until

    def remaining(self, now: float) -> float:
        """Return the seconds until the end; 0 if it has passed."""
        return max(0.0, self._until - now)


class ReaderLease:
    """The reader's end, which limits its trust. Without an acknowledgement there is none."""

    def __init__(self, lease_s: float, renewals_per_lease: int = 4) -> None:
        if renewals_per_lease < 2:
            raise ValueError(
                f"{renewals_per_lease} renewals per lease are too few; give at least 2"
            )
        self._trusted_s = TRUSTED_SHARE * lease_s
        self._interval_s = lease_s / renewals_per_lease
        self._sent: dict[int, float] = {}  # renewals in flight: n to time of sending
        self._next = 0
        self._due = 0.0
        self._trusted_until: float | None = None

    def renewal(self, now: float) -> int:
        """Return the number of the renewal to send; `now` is a time before it is sent."""
        n = self._next
        self._next += 1
        useful = now - self._trusted_s
        self._sent = {k: at for k, at in self._sent.items() if at > useful}
        self._sent[n] = now
        self._due = now + self._interval_s
        return n

    def acknowledged(self, n: int) -> bool:
        """Record the acknowledgement of renewal `n`. Returns False if it changes nothing: unknown,
        acknowledged already, or older than an acknowledged one."""
        at = self._sent.get(n)
        if at is None:
            return False
        self._sent = {k: sent for k, sent in self._sent.items() if k > n}
        until = at + self._trusted_s
        self._trusted_until = max(self._trusted_until or until, until)
        return True

    def shorten(self, lease_s: float) -> None:
        """Use the granter's shorter lease; the number of renewals per lease stays, so the next one
        falls due earlier."""
        share = min(1.0, TRUSTED_SHARE * lease_s / self._trusted_s)
        self._due -= (1.0 - share) * self._interval_s
        self._trusted_s *= share
        self._interval_s *= share

    def trusted(self, now: float) -> bool:
        return self._trusted_until is not None and now < self._trusted_until

    @property
    def trusted_until(self) -> float | None:
        """Return the end of trust; None before the first acknowledgement."""
        return self._trusted_until

    def due(self, now: float) -> bool:
        """Return whether the next renewal should be sent."""
        return now >= self._due

    @property
    def due_at(self) -> float:
        return self._due
