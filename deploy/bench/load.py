"""When requests are sent: at their own times, or each after an answer.

    open loop     at the trace's times or as a Poisson process, whether earlier requests have been
                  answered or not
    closed loop   each of so many clients sends its next request once it has its answer

In the open loop a latency counts from the time at which the request should have been sent. A
server that stalls delays requests behind it; a generator that waited for it, or counted from the
actual sending, would leave these out ("coordinated omission", Gil Tene). In the closed loop there
is no such time: a slow server gets fewer requests. Knows no sockets.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from baton.planner.traces import TraceRequest

# Sends a request, with its number and the time at which it should be sent; returns the seconds that
# its client should wait before its next one.
Send = Callable[[int, TraceRequest, float], Coroutine[Any, Any, float]]


@dataclass(frozen=True, slots=True)
class Load:
    """`clients`: of a closed loop; 0: an open loop at the times of the requests. `duration_s`: no
    request is sent later. `repeat`: the first request follows the last."""

    requests: Sequence[TraceRequest]
    clients: int = 0
    duration_s: float = math.inf
    repeat: bool = False

    def numbered(self) -> Iterator[tuple[int, TraceRequest]]:
        source = itertools.cycle(self.requests) if self.repeat else self.requests
        return enumerate(source)


async def run_load(load: Load, send: Send, clock: Callable[[], float]) -> None:
    """Send all requests, and return once each has been answered. If the caller is cancelled, so
    are all requests."""
    if load.clients:
        await _closed_loop(load, send, clock)
    else:
        await _open_loop(load, send, clock)


def poisson(requests: Sequence[TraceRequest], rate_per_s: float, seed: int) -> list[TraceRequest]:
    """Return the requests with arrivals of a Poisson process, the first at 0."""
    rng = random.Random(seed)
    moved, now_s = [], 0.0
    for each in requests:
        moved.append(replace(each, arrived_s=now_s))
        now_s += rng.expovariate(rate_per_s)
    return moved


def scaled(requests: Sequence[TraceRequest], factor: float) -> list[TraceRequest]:
    """Return the requests with prompts and outputs that are `factor` times as long."""
    return [
        replace(
            each,
            prompt_tokens=max(1, round(each.prompt_tokens * factor)),
            output_tokens=max(1, round(each.output_tokens * factor)),
        )
        for each in requests
    ]


async def _open_loop(load: Load, send: Send, clock: Callable[[], float]) -> None:
    start_s = clock()
    async with asyncio.TaskGroup() as group:
        for number, asked in load.numbered():
            if asked.arrived_s > load.duration_s:
                return
            intended_s = start_s + asked.arrived_s
            # The trace or the drawn rate sets when this request is sent.
            await asyncio.sleep(max(0.0, intended_s - clock()))
            group.create_task(send(number, asked, intended_s))


async def _closed_loop(load: Load, send: Send, clock: Callable[[], float]) -> None:
    end_s = clock() + load.duration_s
    requests = load.numbered()

    async def client() -> None:
        for number, asked in requests:
            if (now_s := clock()) > end_s:
                return
            # A client thinks between two turns, for as long as `send` returns.
            await asyncio.sleep(await send(number, asked, now_s))

    async with asyncio.TaskGroup() as group:
        for _ in range(load.clients):
            group.create_task(client())
