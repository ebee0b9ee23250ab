"""Measure what the traces of all requests cost, kept in memory or sent to a collector.

    python -m benchmarks.trace_cost --rounds 40 --seconds 1 --json FILE

Two fleets run side by side: one as it is, one whose requests keep no trace (fleets/untraced.py).
Rounds alternate between them, and the order within a pair of rounds does too. A round is a closed
loop of `--clients` streams of `--tokens` tokens. Figures are medians over the pairs: throughput
with traces over that without, and the processor time of router and workers for a request, which
says the same with less noise from other processes. Every prompt goes to the prefill worker: without
traces a router learns no times of handoffs, so `auto` would place others there.

served_...   a prefill and a decode worker compute baton-tiny: what a user of these cores pays
exported_... the same with a collector that gets all spans of all requests (telemetry.trace_ratio
             1.0). It runs in this process and reads no span, so that its cost is that of receiving
router_...   hash workers, whose steps take no time, so that the processes' own work is all there
             is: the worst case. No fleet that computes a model comes near it.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
import httpx

from benchmarks.figures.report import Figure, at_least, at_most, parser, report
from benchmarks.fleets.routed_workers import MODEL, RoutedModelWorkers, RoutedWorkers

WORKERS = ("--workers=2", "--sequences=64", "--step-ms=0")
COLLECTOR = "opentelemetry.proto.collector.trace.v1.TraceService"
PLACED = "router.placement=disaggregated"
UNTRACED = ("-m", "benchmarks.fleets.untraced")
START_S = 60.0
WARM_UP_S = 2.0
PROMPT = "the quick brown fox jumps over the lazy dog " * 8


class SpanSink:
    """A collector that counts the exports it gets, and reads none."""

    def __init__(self) -> None:
        self.exports = 0
        self._server = grpc.server(ThreadPoolExecutor(1))
        method: Any = grpc.unary_unary_rpc_method_handler(self._export)
        handlers = grpc.method_handlers_generic_handler(COLLECTOR, {"Export": method})
        self._server.add_generic_rpc_handlers((handlers,))
        self.endpoint = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def _export(self, _: bytes, __: grpc.ServicerContext) -> bytes:
        self.exports += 1
        return b""  # a response without fields

    def close(self) -> None:
        self._server.stop(None).wait(5)


@dataclass(frozen=True, slots=True)
class Round:
    requests_per_s: float
    cpu_s: float  # of router and workers, for a request


Pair = tuple[Round, Round]  # with traces and without


class LoadedFleet:
    """One fleet under load."""

    def __init__(self, fleet: RoutedWorkers, clients: int, tokens: int) -> None:
        self._fleet, self._clients, self._tokens = fleet, clients, tokens
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


@dataclass(frozen=True, slots=True)
class Load:
    rounds: int
    seconds: float
    clients: int
    tokens: int


async def measure(fleets: tuple[RoutedWorkers, RoutedWorkers], load: Load) -> list[Pair]:
    """Measure a traced and an untraced fleet in turn, and close both."""
    pairs: list[Pair] = []
    try:
        traced, untraced = [LoadedFleet(each, load.clients, load.tokens) for each in fleets]
        for fleet in (traced, untraced):
            await fleet.run(WARM_UP_S)
        for number in range(load.rounds):
            order = [traced, untraced] if number % 2 else [untraced, traced]
            results = {fleet: await fleet.run(load.seconds) for fleet in order}
            pairs.append((results[traced], results[untraced]))
    finally:
        for each in fleets:
            each.close()
    return pairs


def measure_exported(load: Load) -> list[Pair]:
    """Measure a fleet that sends all spans to a collector beside one without traces. Raises
    RuntimeError if no span came."""
    sink = SpanSink()
    try:
        exporting = RoutedModelWorkers(
            settings=[PLACED, f"telemetry.otlp_endpoint={sink.endpoint}"]
        )
        untraced = RoutedModelWorkers(UNTRACED, [PLACED])
        pairs = asyncio.run(measure((exporting, untraced), load))
        if not sink.exports:
            raise RuntimeError("the fleet with a collector exported no span")
    finally:
        sink.close()
    return pairs


def figures(kind: str, pairs: list[Pair], *, limited: bool) -> list[Figure]:
    """Return the figures of the module's head."""
    throughput = [on.requests_per_s / off.requests_per_s for on, off in pairs]
    cpu = [on.cpu_s / off.cpu_s for on, off in pairs]
    sides = [*zip(*pairs, strict=True)]
    rates = [statistics.median(each.requests_per_s for each in side) for side in sides]
    costs = [1e6 * statistics.median(each.cpu_s for each in side) for side in sides]
    ratios = [statistics.median(throughput), statistics.median(cpu)]
    names = f"{kind}_throughput_ratio", f"{kind}_cpu_ratio"
    return [
        at_least(names[0], ratios[0], 0.98) if limited else Figure(names[0], ratios[0]),
        at_most(names[1], ratios[1], 1.02) if limited else Figure(names[1], ratios[1]),
        Figure(f"{names[0]}_lowest", min(throughput), "", "of all pairs"),
        Figure(f"{names[0]}_highest", max(throughput), "", "of all pairs"),
        Figure(f"{kind}_requests_per_s", rates[0], "1/s", f"without traces: {rates[1]:.4g}"),
        Figure(f"{kind}_cpu_us_per_request", costs[0], "us", f"without traces: {costs[1]:.4g}"),
    ]


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--rounds", type=int, default=40, help="pairs of rounds")
    options.add_argument("--seconds", type=float, default=1.0, help="of one round")
    options.add_argument("--clients", type=int, default=8)
    options.add_argument("--tokens", type=int, default=16, help="of each answer")
    given = options.parse_args()
    load = Load(given.rounds, given.seconds, given.clients, given.tokens)
    served = RoutedModelWorkers(settings=[PLACED]), RoutedModelWorkers(UNTRACED, [PLACED])
    found = figures("served", asyncio.run(measure(served, load)), limited=True)
    found += figures("exported", measure_exported(load), limited=True)
    hashed = RoutedWorkers(WORKERS, [PLACED]), RoutedWorkers(WORKERS, [PLACED], UNTRACED)
    found += figures("router", asyncio.run(measure(hashed, load)), limited=False)
    report(found, given.json)


if __name__ == "__main__":
    main()
