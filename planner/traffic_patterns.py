"""Traffic that changes with time, made of a trace's requests: their lengths and blocks stay, their
arrivals are drawn from a rate, and the share of prompt-heavy requests from another curve.

    steady    one rate                        daily    low at night, a broad peak
    sine      a slow wave                     burst    a plateau for part of each period
    shifting  one mix, then the other

Arrivals are a Poisson process with a changing rate, by the thinning of Lewis and Shedler (Naval
Research Logistics Quarterly 26, 1979). Pure; the same seed gives the same requests.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from baton.planner.traces import TraceRequest
from baton.runtime.errors import ConfigError

AGAIN_BIT = 48  # above the trace's own block hashes

Curve = Callable[[float], float]  # of seconds since the beginning


@dataclass(frozen=True, slots=True)
class Pattern:
    """`rate`: requests a second, `most_rate` its bound. `prompt_heavy`: the share, 0 to 1, of
    requests from the quarter of the trace that has the most prompt for each output token; the
    others come from the quarter with the least. None: the trace as it is."""

    name: str
    seconds: float
    rate: Curve
    most_rate: float
    prompt_heavy: Curve | None = None


def arrivals(trace: Sequence[TraceRequest], pattern: Pattern, seed: int = 0) -> list[TraceRequest]:
    """Return the pattern's requests. Each part of the trace is used in its order; if it ends, it
    begins again with other blocks. Raises ConfigError for a trace of fewer than 4 requests."""
    if len(trace) < 4:
        raise ConfigError(f"a pattern needs a trace of 4 requests at least, not {len(trace)}")
    rng = random.Random(seed)
    parts = [list(trace)] if pattern.prompt_heavy is None else _extremes(trace)
    used, found, now_s = [0] * len(parts), [], 0.0
    while (now_s := now_s + rng.expovariate(pattern.most_rate)) < pattern.seconds:
        if rng.random() * pattern.most_rate >= pattern.rate(now_s):
            continue
        heavy = pattern.prompt_heavy
        part = int(heavy is not None and rng.random() >= heavy(now_s))
        again, index = divmod(used[part], len(parts[part]))
        used[part] += 1
        request = parts[part][index]
        blocks = tuple(each | again << AGAIN_BIT for each in request.blocks)
        found.append(replace(request, arrived_s=now_s, blocks=blocks))
    return found


def _extremes(trace: Sequence[TraceRequest]) -> list[list[TraceRequest]]:
    """Return the quarters of a trace with the most and with the least prompt for an output token,
    each in order of arrival."""
    order = sorted(range(len(trace)), key=lambda n: trace[n].prompt_tokens / trace[n].output_tokens)
    quarter = len(trace) // 4
    chosen = (sorted(order[-quarter:]), sorted(order[:quarter]))
    return [[trace[number] for number in part] for part in chosen]


def steady(level: float) -> Curve:
    return lambda now_s: level


def sine(low: float, high: float, period_s: float) -> Curve:
    """Begin in the middle, and rise."""
    middle, reach = (low + high) / 2, (high - low) / 2
    return lambda now_s: middle + reach * math.sin(2 * math.pi * now_s / period_s)


def daily(low: float, high: float, day_s: float) -> Curve:
    """Begin at the lowest; a broad peak after half of the day."""
    return lambda now_s: low + (high - low) * math.sin(math.pi * now_s / day_s) ** 4


def burst(low: float, high: float, period_s: float, burst_s: float) -> Curve:
    """End each period with a burst."""
    return lambda now_s: high if now_s % period_s >= period_s - burst_s else low
