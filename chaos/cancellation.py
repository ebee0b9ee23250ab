"""How soon what a client was served with is free once it has gone away, on real processes.

    python -m chaos.cancellation [--leaves 300] [--at-once 3] [--fleet 1,2,2] --json FILE

Routers, prefill and decode workers as `baton serve` starts them, with baton-tiny. A few clients
at once send long prompts, and close their connections at one moment, drawn evenly over the time
that a request takes: while it is tokenized, queued, prefilled, fetched and decoded. From then on
every worker's books (`/audit`) are read without pause.

    stopped_ms   until no worker has, computes or hands over any of these requests
    free_ms      until every block is free or cached too
    step_ms      the mean device time of the slower role's steps

The time to read the books is part of both. Chunks are small, so that prompts take many steps.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.figures.report import Figure, at_most, parser, report
from chaos.asks import Ask, long_asks
from chaos.cluster import Cluster, at_rest, end_cleanly

SETTINGS = (
    "router.placement=disaggregated",
    "step.chunk_tokens=64",
    "step.prefill_tokens=128",
)
SEED = 7
WHOLE = 9  # requests that no client leaves, for the time that one takes; the first third warms up
STOP_MS, FREE_MS = 100.0, 1000.0
LIMIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Left:
    """One moment at which clients left: how many of them had a token, and what came after."""

    begun: int
    stopped_ms: float
    free_ms: float


def idle(audit: Mapping[str, Any]) -> bool:
    """Whether a worker has nothing to do for any request; it may still hold blocks."""
    return not any(audit.get(of) for of in ("requests", "running", "waiting", "open_handoffs"))


class Leaving:
    """Clients of one router, and the books of its workers. `audits`: the workers' URLs."""

    def __init__(self, url: str, audits: Sequence[str], asks: Sequence[Ask]) -> None:
        self._url = url
        self._audits = audits
        self._asks = asks
        self._turn = 0

    async def __aenter__(self) -> Leaving:
        none_kept = httpx.Limits(max_keepalive_connections=0)  # a client that leaves closes its own
        self._clients = httpx.AsyncClient(base_url=self._url, limits=none_kept, timeout=60)
        self._books = httpx.AsyncClient(timeout=10)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._clients.aclose()
        await self._books.aclose()

    async def whole_s(self) -> float:
        """The median time of a request that is taken to its end, alone."""
        clock, took = asyncio.get_running_loop().time, []
        for _ in range(WHOLE):
            began = clock()
            await self._ask([])
            took.append(clock() - began)
        return statistics.median(took[WHOLE // 3 :])

    async def leave(self, at_once: int, after_s: float) -> Left:
        """Let that many clients ask, and go away at one moment. Raises RuntimeError if what they
        had is not free within LIMIT_S."""
        clock = asyncio.get_running_loop().time
        seen: list[list[str]] = [[] for _ in range(at_once)]
        asking = [asyncio.create_task(self._ask(events)) for events in seen]
        # The clients leave at this moment, which is drawn.
        await asyncio.sleep(after_s)
        begun = sum(bool(events) for events in seen)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        left_s, stopped_ms = clock(), 0.0
        while True:
            audits = await self._audited()
            now_ms = 1000 * (clock() - left_s)
            if not stopped_ms and all(idle(audit) for audit in audits):
                stopped_ms = now_ms
            if stopped_ms and all(at_rest(audit) for audit in audits):
                return Left(begun, stopped_ms, now_ms)
            if now_ms > 1000 * LIMIT_S:
                raise RuntimeError(f"{LIMIT_S:g} s after the clients left: {audits}")

    async def _audited(self) -> list[dict[str, Any]]:
        answers = await asyncio.gather(*(self._books.get(url) for url in self._audits))
        return [answer.raise_for_status().json() for answer in answers]

    async def _ask(self, events: list[str]) -> None:
        ask = self._asks[self._turn % len(self._asks)]
        self._turn += 1
        body = ask.body() | {"prompt": f"{self._turn} {ask.prompt}"}  # no prefix is known
        async with self._clients.stream("POST", "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    events.append(line)


async def leaves(leaving: Leaving, count: int, at_once: int) -> tuple[float, list[Left]]:
    """The time of a whole request in seconds, and each moment at which clients left."""
    dice = random.Random(SEED)
    async with leaving:
        whole_s = await leaving.whole_s()
        moments = -(-count // at_once)
        found = [
            await leaving.leave(at_once, dice.uniform(0, whole_s * at_once)) for _ in range(moments)
        ]
        return whole_s, found


def step_ms(cluster: Cluster) -> float:
    """The mean device time of a step, of the role where it is longer."""
    means = []
    for role in ("prefill", "decode"):
        names = [name for name in cluster.workers() if name.startswith(role)]
        took, steps = (
            sum(cluster.metric(name, f"baton_step_seconds_{part}", role=role) for name in names)
            for part in ("sum", "count")
        )
        means.append(1000 * took / max(1.0, steps))
    return max(means)


def p99(values: Sequence[float]) -> float:
    return sorted(values)[-(-99 * len(values) // 100) - 1]


def figures(found: Sequence[Left], at_once: int, whole_s: float, step: float) -> list[Figure]:
    stopped, free = [left.stopped_ms for left in found], [left.free_ms for left in found]
    begun = sum(left.begun for left in found)
    return [
        Figure("leaves", len(found) * at_once, "", f"{begun} of them had a token"),
        Figure("whole_request_ms", 1000 * whole_s, "ms", "alone, to its end"),
        Figure("step_ms", step, "ms"),
        Figure("stopped_ms_p50", statistics.median(stopped), "ms"),
        at_most("stopped_ms_p99", p99(stopped), step + STOP_MS, "ms"),
        Figure("free_ms_p50", statistics.median(free), "ms"),
        at_most("free_ms_p99", p99(free), FREE_MS, "ms"),
        Figure("free_ms_most", max(free), "ms"),
    ]


def measure(options: argparse.Namespace) -> list[Figure]:
    routers, prefill, decode = (int(count) for count in options.fleet.split(","))
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(Path(folder), SETTINGS)
        try:
            cluster.start(prefill, decode, routers)
            records = cluster.records().values()
            audits = [f"http://{record.admin_address}/audit" for record in records]
            leaving = Leaving(cluster.url, audits, long_asks(16, SEED, 0))
            whole_s, found = asyncio.run(leaves(leaving, options.leaves, options.at_once))
            return figures(found, options.at_once, whole_s, step_ms(cluster))
        finally:
            cluster.close()


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--leaves", type=int, default=300)
    made.add_argument("--at-once", type=int, default=3)
    made.add_argument("--fleet", default="1,2,2", help="routers, prefill and decode workers")
    options = made.parse_args()
    end_cleanly()
    report(measure(options), options.json)


if __name__ == "__main__":
    main()
