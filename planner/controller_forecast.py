"""Predicts the goodput of a ratio of prefill to decode workers from the present load.

    prefill   backlog(t) = max(0, Q + (a - n * rate) * t)           Q tokens wait, a arrive a second
              P(a prompt waits longer than x) = C * exp(-x * n * (1 - load) / (s * V))
              C = load^(sqrt(2 (n + 1)) - 1)                        s: seconds of one prompt
    decode    step = fixed + per_sequence * B + per_context_token * K, K = B * context
              B sequences a worker: as many as arrive in a step's time (Little's law), and no fewer
              than run now; more than its pool holds wait for credit
    goodput   requests a second that a ratio serves, times the share that meets both objectives

C is Sakasegawa's approximation of the wait of n servers (Ann. Inst. Stat. Math. 29, 1977), V the
variability of arrivals and prompts; the tail beyond the mean is taken as exponential. A queue is a
fluid: each prompt waits for what lies before it. Coarse, but its inputs are measured, and a
controller needs the order of ratios, not their exact figures. Pure.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace

from baton.planner.controller_load import FleetLoad, StepSpeed, WorkerRole

HORIZON_S = 60.0
DRAIN_BACKLOG_S = 20.0  # in which a backlog would drain, were prefill fast enough
POINTS = 12  # of the horizon
VARIABILITY = 1.5  # (squared variation of arrivals + that of prompts) / 2
STEP_SPREAD = 0.2  # relative: of the mean gaps of requests around a step's time
POOL_SHARE = 0.9  # of a pool that sequences fill before credit is refused
NEAR = 0.02  # shares, and scores of them, that differ less are equal


@dataclass(frozen=True, slots=True)
class ServiceGoals:
    """The objectives that a request has to meet, in seconds; infinite: none. `max_sequences` is the
    bound of a decode worker's batch where no worker reports its own."""

    ttft_s: float = math.inf
    itl_s: float = math.inf
    max_sequences: int = 256


@dataclass(frozen=True, slots=True)
class Forecast:
    """A ratio and what it would do. Shares are of requests: that meet TTFT and ITL, and that are
    served within the horizon's rates."""

    prefill: int
    decode: int
    ttft_share: float
    itl_share: float
    served_share: float
    goodput_per_s: float
    step_s: float  # mean time between tokens

    @property
    def good_share(self) -> float:
        return self.ttft_share * self.itl_share * self.served_share


def forecast(load: FleetLoad, goals: ServiceGoals, prefill: int, decode: int) -> Forecast:
    """Return the forecast of a ratio; at least one worker of each role."""
    rate = load.prefill_rate or math.inf
    capacity = prefill * rate  # tokens a second
    offered = load.prompt_tokens_per_s
    fed = 1.0 if offered <= capacity else capacity / offered
    credit = _credit(load, goals, decode)
    demand = load.requests_per_s * fed
    granted = 1.0 if demand <= credit else credit / demand
    if load.tokens_per_request:  # decode workers get what the backlog's drain adds, too
        added = load.backlog_tokens / load.tokens_per_request / DRAIN_BACKLOG_S
        demand = min(load.requests_per_s + added, capacity / load.tokens_per_request)
    step_s = _step_s(load, goals, demand, decode)
    itl_share = 1.0
    if step_s > 0 and not math.isinf(goals.itl_s):
        itl_share = _normal(math.log(goals.itl_s / step_s) / STEP_SPREAD)
    ttft_share = _ttft_share(load, goals, prefill, credit)
    served = fed * granted
    good = ttft_share * itl_share * served
    return Forecast(
        prefill, decode, ttft_share, itl_share, served, load.requests_per_s * good, step_s
    )


def _ttft_share(load: FleetLoad, goals: ServiceGoals, prefill: int, credit: float) -> float:
    """Return the share of the horizon's prompts that wait less than the objective allows."""
    if math.isinf(goals.ttft_s):
        return 1.0
    rate = load.prefill_rate
    own_s = load.tokens_per_request / rate if rate else 0.0
    capacity = prefill * rate if rate else math.inf
    use = load.prompt_tokens_per_s / capacity
    delayed = min(1.0, use) ** (math.sqrt(2 * (prefill + 1)) - 1)
    decline = prefill * max(0.02, 1 - use) / (own_s * VARIABILITY) if own_s else math.inf
    total = 0.0
    for point in range(POINTS):
        at_s = HORIZON_S * (point + 0.5) / POINTS
        backlog = max(0.0, load.backlog_tokens + (load.prompt_tokens_per_s - capacity) * at_s)
        waiting = max(0.0, load.waiting + (load.requests_per_s - credit) * at_s)
        wait_s = max(backlog / capacity, waiting / credit if credit else math.inf)
        slack_s = goals.ttft_s - own_s - wait_s
        if slack_s > 0:
            total += 1 - delayed * math.exp(-slack_s * decline)
    return total / POINTS


def _credit(load: FleetLoad, goals: ServiceGoals, decode: int) -> float:
    """Return the requests a second to which full decode workers could grant credit."""
    if load.step is None or not load.output_per_request:
        return math.inf
    batch = _most_sequences(load, goals)
    return decode * batch / _seconds(load.step, batch, load) / load.output_per_request


def _step_s(load: FleetLoad, goals: ServiceGoals, demand: float, decode: int) -> float:
    """Return the mean time of a decode step at this many requests a second; 0: not known."""
    step = load.step
    if step is None:
        return 0.0
    most = _most_sequences(load, goals)
    tokens_per_s = demand * load.output_per_request / decode
    slope = step.per_sequence_s + step.per_context_token_s * load.context_tokens
    room = 1 - slope * tokens_per_s
    steady = step.fixed_s * tokens_per_s / room if room > 0 else most
    batch = min(most, max(steady, load.running / decode))
    return _seconds(step, batch, load)


def _seconds(step: StepSpeed, batch: float, load: FleetLoad) -> float:
    per_sequence_s = step.per_sequence_s + step.per_context_token_s * load.context_tokens
    return max(1e-9, step.fixed_s + per_sequence_s * batch)


def _most_sequences(load: FleetLoad, goals: ServiceGoals) -> float:
    most = float(load.max_sequences or goals.max_sequences)
    if not load.context_tokens or not load.kv_tokens:
        return most
    room = POOL_SHARE * load.kv_tokens / load.context_tokens
    return max(1.0, min(most, room))


def _normal(x: float) -> float:
    """Return the standard normal distribution's share below x."""
    return 0.5 * math.erfc(-x / math.sqrt(2))


def needed_workers(load: FleetLoad, goals: ServiceGoals, share: float, most: int) -> dict[str, int]:
    """Return for each role the fewest workers, `most` at most, with which this share of requests
    would meet the role's objective, were the other role large enough. Where no number of them is
    enough (`unmet_objectives`): the fewest with which nearly as many requests meet it, and are
    served, as with `most`."""
    unmet = unmet_objectives(load, goals, share, most)
    best = forecast(load, goals, most, most)

    def is_enough(role: WorkerRole, found: Forecast) -> bool:
        if role not in unmet:
            return _role_share(role, found) >= share
        served = found.served_share >= (1 - NEAR) * best.served_share
        return served and _role_share(role, found) >= _role_share(role, best) - NEAR

    return {
        "prefill": _fewest(lambda n: is_enough("prefill", forecast(load, goals, n, most)), most),
        "decode": _fewest(lambda m: is_enough("decode", forecast(load, goals, most, m)), most),
    }


def unmet_objectives(
    load: FleetLoad, goals: ServiceGoals, share: float, most: int
) -> tuple[WorkerRole, ...]:
    """Return the roles whose objective this share of requests would not meet with `most` workers of
    each, even without what waits now."""
    roles: tuple[WorkerRole, ...] = ("prefill", "decode")
    lasting = replace(load, backlog_tokens=0.0, waiting=0, running=0)
    best = forecast(lasting, goals, most, most)
    return tuple(role for role in roles if _role_share(role, best) < share)


def _role_share(role: WorkerRole, found: Forecast) -> float:
    """Return the share of requests that meet the objective which workers of a role decide."""
    return found.ttft_share if role == "prefill" else found.itl_share * found.served_share


def _fewest(is_enough: Callable[[int], bool], most: int) -> int:
    """Return the least number from which on it is enough; `most` if there is none below."""
    return 1 + bisect_left(range(1, most), True, key=is_enough)
