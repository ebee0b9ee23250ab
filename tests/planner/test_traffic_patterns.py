"""Patterns of traffic: their rates, their mixes, and what they keep of the trace."""

from __future__ import annotations

import pytest

from baton.planner.traces import TraceRequest
from baton.planner.traffic_patterns import Pattern, arrivals, burst, daily, sine, steady
from baton.runtime.errors import ConfigError

TRACE = [TraceRequest(float(n), 512 * (n % 40 + 1), 10 + n % 7, (n, n + 1)) for n in range(400)]


def test_the_rate_is_that_of_the_curve() -> None:
    pattern = Pattern("burst", 1000.0, burst(2.0, 20.0, 100.0, 25.0), 20.0)
    found = arrivals(TRACE, pattern)
    calm = [each for each in found if each.arrived_s % 100 < 75]
    assert len(calm) == pytest.approx(2 * 750, rel=0.1)
    assert len(found) - len(calm) == pytest.approx(20 * 250, rel=0.05)
    times = [each.arrived_s for each in found]
    assert times == sorted(times) and times[-1] < 1000


def test_the_same_seed_gives_the_same_requests() -> None:
    pattern = Pattern("steady", 50.0, steady(5.0), 5.0)
    assert arrivals(TRACE, pattern, 3) == arrivals(TRACE, pattern, 3)
    assert arrivals(TRACE, pattern, 3) != arrivals(TRACE, pattern, 4)


def test_a_mix_takes_the_quarters_at_both_ends() -> None:
    for share, heavy in ((1.0, True), (0.0, False)):
        pattern = Pattern("mix", 10.0, steady(8.0), 8.0, steady(share))
        ratios = sorted(each.prompt_tokens / each.output_tokens for each in TRACE)
        for each in arrivals(TRACE, pattern):
            ratio = each.prompt_tokens / each.output_tokens
            assert ratio >= ratios[300] if heavy else ratio <= ratios[100]


def test_a_trace_that_begins_again_shares_no_block_with_itself() -> None:
    pattern = Pattern("long", 200.0, steady(10.0), 10.0)
    found = arrivals(TRACE[:100], pattern)
    first, again = found[0], found[100]
    assert first.prompt_tokens == again.prompt_tokens
    assert not set(first.blocks) & set(again.blocks)


def test_curves_have_their_bounds() -> None:
    day, wave = daily(1.0, 9.0, 100.0), sine(2.0, 6.0, 100.0)
    assert (day(0.0), day(50.0)) == (pytest.approx(1.0), pytest.approx(9.0))
    assert (wave(0.0), wave(25.0), wave(75.0)) == pytest.approx((4.0, 6.0, 2.0))


def test_a_trace_too_short_is_refused() -> None:
    with pytest.raises(ConfigError, match="4 requests at least, not 3"):
        arrivals(TRACE[:3], Pattern("steady", 1.0, steady(1.0), 1.0))
