"""How often the audit behind `/audit` checks the pool, on a clock of the test's own."""

from __future__ import annotations

from itertools import pairwise

import pytest

from baton.deploy.processes.admin import CHECK_INTERVAL_S, CHECK_SHARE, AuditLimiter
from tests.support.json_values import JsonObject


class PoolAudit:
    """An audit whose checks take `check_s`, and fail while `balanced` is false."""

    def __init__(self, check_s: float = 0.0) -> None:
        self.now_s = 100.0
        self.check_s = check_s
        self.calls = 0
        self.checks_s: list[float] = []  # when each began
        self.balanced = True

    def clock(self) -> float:
        return self.now_s

    def __call__(self, check: bool) -> JsonObject:
        self.calls += 1
        if check:
            self.checks_s.append(self.now_s)
            self.now_s += self.check_s
            if not self.balanced:
                raise RuntimeError("the counts differ")
        return {"calls": self.calls}


def test_a_second_call_within_the_interval_does_not_check() -> None:
    audit = PoolAudit()
    limiter = AuditLimiter(audit, audit.clock)
    assert [limiter.report() for _ in range(2)] == [{"calls": 1}, {"calls": 2}]
    audit.now_s += CHECK_INTERVAL_S
    limiter.report()
    assert audit.checks_s == [100.0, 100.0 + CHECK_INTERVAL_S]


def test_long_checks_take_no_more_than_their_share() -> None:
    audit = PoolAudit(check_s=2.0)
    limiter = AuditLimiter(audit, audit.clock)
    while len(audit.checks_s) < 4:
        limiter.report()
        audit.now_s += 0.5
    for before_s, after_s in pairwise(audit.checks_s):
        assert audit.check_s <= CHECK_SHARE * (after_s - before_s)


def test_a_failed_check_is_reported_until_the_next_check() -> None:
    audit = PoolAudit()
    audit.balanced = False
    limiter = AuditLimiter(audit, audit.clock)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="differ"):
            limiter.report()
    assert audit.calls == 1
    audit.balanced = True
    audit.now_s += CHECK_INTERVAL_S
    limiter.report()
    assert len(audit.checks_s) == 2
