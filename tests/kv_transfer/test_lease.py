"""Invariant I2: the reader stops trusting before the granter stops pinning."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.kv_transfer.lease import GranterLease, ReaderLease


def test_the_granter_pins_from_receipt_for_the_whole_lease() -> None:
    lease = GranterLease(2.0, now=10.0)
    assert not lease.expired(11.999) and lease.expired(12.0)
    assert lease.renewed(1, now=11.5)
    assert lease.remaining(12.5) == pytest.approx(1.0)
    assert lease.expired(13.5) and lease.remaining(14.0) == 0.0


def test_an_expired_lease_cannot_be_renewed() -> None:
    lease = GranterLease(2.0, now=0.0)
    assert not lease.renewed(1, now=2.0)
    assert lease.expired(2.0)


def test_a_renewal_pins_longer_and_a_negative_one_is_refused() -> None:
    lease = GranterLease(2.0, now=0.0)
    assert lease.renewed(3, now=1.0) and lease.renewed(3, now=1.5) and lease.renewed(1, now=1.6)
    assert not lease.expired(3.5)
    assert not lease.renewed(-1, now=1.7)


def test_the_reader_trusts_nothing_before_an_acknowledgement() -> None:
    lease = ReaderLease(2.0)
    n = lease.renewal(100.0)
    assert not lease.trusted(100.0) and lease.trusted_until is None
    assert lease.acknowledged(n)
    assert lease.trusted(101.79) and not lease.trusted(101.8)


def test_trust_counts_from_sending_not_from_the_acknowledgement() -> None:
    lease = ReaderLease(1.0)
    first = lease.renewal(0.0)
    lease.renewal(0.5)
    assert lease.acknowledged(first)
    assert lease.trusted(0.89) and not lease.trusted(0.9)


def test_acknowledgements_out_of_order_unknown_and_repeated() -> None:
    lease = ReaderLease(1.0)
    first, second = lease.renewal(0.0), lease.renewal(0.25)
    assert not lease.acknowledged(7)
    assert lease.acknowledged(second)
    assert not lease.acknowledged(first) and not lease.acknowledged(second)
    assert lease.trusted_until == pytest.approx(1.15)


def test_renewals_fall_due_in_equal_parts_of_the_lease() -> None:
    lease = ReaderLease(2.0, renewals_per_lease=4)
    assert lease.due(0.0)
    lease.renewal(0.0)
    assert not lease.due(0.49) and lease.due(0.5) and lease.due_at == pytest.approx(0.5)


def test_a_shorter_grant_shortens_trust_and_a_longer_adds_none() -> None:
    lease = ReaderLease(2.0, renewals_per_lease=4)
    n = lease.renewal(0.0)
    lease.shorten(1.0)
    lease.acknowledged(n)
    assert lease.trusted_until == pytest.approx(0.9)
    lease.renewal(1.0)
    assert lease.due_at == pytest.approx(1.25)
    lease.shorten(60.0)
    assert lease.acknowledged(1) and lease.trusted_until == pytest.approx(1.9)


def test_a_shorter_grant_makes_the_next_renewal_due_earlier() -> None:
    lease = ReaderLease(10.0, renewals_per_lease=4)
    lease.renewal(3.0)
    lease.shorten(1.0)
    assert lease.due_at == pytest.approx(3.25) and lease.due(3.3)
    lease.shorten(60.0)
    assert lease.due_at == pytest.approx(3.25)


def test_unacknowledged_renewals_do_not_pile_up() -> None:
    lease = ReaderLease(1.0)
    for i in range(10_000):
        lease.renewal(i * 0.25)
    # an acknowledgement forgets only those before it, and here the first come first
    known = [n for n in range(10_000) if lease.acknowledged(n)]
    assert known == list(range(9_996, 10_000))


def test_a_lease_that_cannot_be_renewed_in_time_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        ReaderLease(1.0, renewals_per_lease=1)


@dataclass(frozen=True)
class Clock:
    """A monotonic clock: another origin and, within 5 %, another rate than true time."""

    offset: float
    rate: float

    def at(self, true: float) -> float:
        return self.offset + self.rate * true


clocks = st.builds(Clock, st.floats(-1e4, 1e4), st.floats(0.95, 1.05))
delays = st.floats(0.0, 10.0)
renewals = st.lists(
    st.tuples(st.floats(0.01, 3.0), delays, delays, st.booleans(), st.booleans()), max_size=20
)


@given(clocks, clocks, delays, delays, renewals, st.floats(0.1, 10.0))
def test_the_reader_never_trusts_after_the_granters_expiry(
    reader_clock: Clock,
    granter_clock: Clock,
    opening_delay: float,
    opened_delay: float,
    sent: list[tuple[float, float, float, bool, bool]],
    lease_s: float,
) -> None:
    """Messages are delayed at will and lost at will; streams keep their order."""
    reader = ReaderLease(lease_s)
    granter: GranterLease | None = None
    events: list[tuple[float, int, str, int]] = []  # true time, order, kind, n
    true = arrived = heard = 0.0
    for i, (pause, there, back, lost, ack_lost) in enumerate(
        [(0.0, opening_delay, opened_delay, False, False), *sent]
    ):
        true += pause
        n = reader.renewal(reader_clock.at(true))
        if lost:
            continue
        arrived = max(arrived, true + there)
        events.append((arrived, 2 * i, "receipt", n))
        if not ack_lost:
            heard = max(heard, arrived + back)
            events.append((heard, 2 * i + 1, "acknowledged", n))
    received: set[int] = set()
    checks: list[float] = []
    for when, _, kind, n in sorted(events):
        if kind == "receipt":
            now = granter_clock.at(when)
            if granter is None:
                granter = GranterLease(lease_s, now)
                received.add(n)
            elif granter.renewed(n, now):
                received.add(n)
        elif n in received:
            reader.acknowledged(n)
        checks.append(when)
        if reader.trusted_until is not None:
            last = (reader.trusted_until - reader_clock.offset) / reader_clock.rate
            checks.append(last - 1e-6)
        assert granter is not None
        for moment in (m for m in checks if m >= when):
            if reader.trusted(reader_clock.at(moment)):
                assert not granter.expired(granter_clock.at(moment))
        checks = [when]


def test_the_margin_of_a_tenth_is_needed() -> None:
    """Without it, the property above would fail for clocks that the design allows."""
    slow, fast = Clock(0.0, 0.95), Clock(0.0, 1.05)
    granter = GranterLease(1.0, fast.at(0.0))
    moment = 1.0  # true time
    assert granter.expired(fast.at(moment)) and slow.at(moment) < 1.0
    assert not slow.at(moment) < 0.9
