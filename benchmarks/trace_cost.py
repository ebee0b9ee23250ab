"""Measure what the traces of all requests cost, kept in memory and without a collector.

    python -m benchmarks.trace_cost --rounds 40 --seconds 1 --json FILE

Two fleets run side by side, each a real router process before hash workers, whose steps take no
time, so that the processes' own work is all there is: one as it is, one whose requests keep no
trace (fleets/untraced.py). Rounds alternate between them, and the order within a pair of rounds
does too. A round is a closed loop of `--clients` streams of `--tokens` tokens. Figures are medians
over the pairs: throughput with traces over that without, and the processor time of router and
workers for a request, which says the same with less noise from other processes.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass

import httpx

from benchmarks.figures.report import Figure, at_least, at_most, parser, report
from benchmarks.fleets.routed_workers import MODEL, RoutedWorkers

WORKERS = ("--workers=2", "--sequences=64", "--step-ms=0")
UNTRACED = ("-m", "benchmarks.fleets.untraced")
START_S = 60.0
WARM_UP_S = 2.0
PROMPT = "the quick brown fox jumps over the lazy dog " * 8


@dataclass(frozen=True, slots=True)
class Round:
    requests_per_s: float
    cpu_s: float  # of router and workers, for a request


class LoadedFleet:
    """One fleet under load; `entry` goes between Python and a process's module."""

    def __init__(self, entry: tuple[str, ...], clients: int, tokens: int) -> None:
        self._fleet = RoutedWorkers(WORKERS, entry=entry)
        self._clients, self._tokens = clients, tokens
        self._fleet.wait_workers(2)
        self.url = f"http://{self._fleet.start_router()}"
        until = time.monotonic() + START_S
        while httpx.get(f"{self.url}/readyz").status_code != 200:
            if time.monotonic() > until:
                raise RuntimeError(f"the router has no workers:\n{self._fleet.log('router')}")
            time.sleep(0.05)  # the router cannot call back: it is asked again

    async def run(self, seconds: float) -> Round:
        """Serve a closed loop for so long. Raises httpx.HTTPStatusError for a refused request."""
        until, cpu_s = time.monotonic() + seconds, self._fleet.cpu_s()
        begun = time.monotonic()
        async with httpx.AsyncClient(base_url=self.url, timeout=60) as http:
            served = await asyncio.gather(
                *(self._client(http, until) for _ in range(self._clients))
            )
        count, took_s = sum(served), time.monotonic() - begun
        return Round(count / took_s, (self._fleet.cpu_s() - cpu_s) / count)

    def close(self) -> None:
        self._fleet.close()

    async def _client(self, http: httpx.AsyncClient, until: float) -> int:
        served = 0
        body = {
            "model": MODEL,
            "prompt": PROMPT,
            "max_tokens": self._tokens,
            "stream": True,
            "ignore_eos": True,
        }
        while time.monotonic() < until:
            (await http.post("/v1/completions", json=body)).raise_for_status()
            served += 1
        return served


async def measure(rounds: int, seconds: float, clients: int, tokens: int) -> list[Figure]:
    traced, untraced = [LoadedFleet(entry, clients, tokens) for entry in ((), UNTRACED)]
    pairs: list[tuple[Round, Round]] = []
    try:
        for fleet in (traced, untraced):
            await fleet.run(WARM_UP_S)
        for number in range(rounds):
            order = [traced, untraced] if number % 2 else [untraced, traced]
            results = {fleet: await fleet.run(seconds) for fleet in order}
            pairs.append((results[traced], results[untraced]))
    finally:
        traced.close()
        untraced.close()
    throughput = [on.requests_per_s / off.requests_per_s for on, off in pairs]
    cpu = [on.cpu_s / off.cpu_s for on, off in pairs]
    sides = [*zip(*pairs, strict=True)]
    rates = [statistics.median(each.requests_per_s for each in side) for side in sides]
    costs = [1e6 * statistics.median(each.cpu_s for each in side) for side in sides]
    return [
        at_least("throughput_ratio", statistics.median(throughput), 0.98),
        at_most("cpu_ratio", statistics.median(cpu), 1.02),
        Figure("throughput_ratio_lowest", min(throughput), "", "of all pairs"),
        Figure("throughput_ratio_highest", max(throughput), "", "of all pairs"),
        Figure("requests_per_s", rates[0], "1/s", f"without traces: {rates[1]:.4g}"),
        Figure("cpu_us_per_request", costs[0], "us", f"without traces: {costs[1]:.4g}"),
    ]


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--rounds", type=int, default=40, help="pairs of rounds")
    options.add_argument("--seconds", type=float, default=1.0, help="of one round")
    options.add_argument("--clients", type=int, default=8)
    options.add_argument("--tokens", type=int, default=16, help="of each answer")
    given = options.parse_args()
    figures = asyncio.run(measure(given.rounds, given.seconds, given.clients, given.tokens))
    report(figures, given.json)


if __name__ == "__main__":
    main()
