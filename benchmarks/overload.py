"""Measure a router that gets more requests than its workers can serve, in real processes.

    python -m benchmarks.overload [--seconds 20] [--deadline 2] [--loads 0.5 1 1.5 2 3] --json FILE

Two decode workers of known capacity (hash_workers.py: the product's scheduler on an engine whose
steps take 20 ms) behind one router process. Requests come at random moments, at a fixed rate,
whether those before have been answered or not. Each gives its deadline (`X-Request-Deadline`, or
that of its call): three of four come by HTTP, the fourth by gRPC.

    capacity                 answers a second while clients ask again as soon as they are answered
    goodput_N                answers a second within the deadline, at N times the capacity
    goodput_3_of_peak        that at the highest load, as a share of the highest at any
    refusal_ms_p50, _p99     from the last byte sent to the 503 read, at the highest load
    refusal_grpc_ms_...      from the call to its status UNAVAILABLE, at that load
    ..._late                 the generator's own lateness: what it adds to no figure

The client is this process. It shares the machine with router and workers; connections are kept:
by HTTP one for each request under way, by gRPC one for all.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import grpc.aio
import orjson

from baton.proto import client_pb2, client_pb2_grpc
from benchmarks.figures.report import Figure, at_least, at_most, parser, report
from benchmarks.fleets.routed_workers import MODEL, RoutedWorkers

WORKERS = 2
SEQUENCES = 8
STEP_MS = 20.0
TOKENS = 16
SETTLE_S = 3.0  # between two loads, beside the deadline
CALIBRATE_S = 8.0
WAIT_S = 30.0  # for an answer that does not come: then it counts as none
READY_S = 60.0
POLL_S = 0.005
GRPC_EVERY = 4
STATUSES = {grpc.StatusCode.UNAVAILABLE: 503, grpc.StatusCode.DEADLINE_EXCEEDED: 504}


@dataclass(slots=True)
class LoadResults:
    """The results of one load: how each request was answered, and when."""

    statuses: Counter[int] = field(default_factory=Counter)
    good: int = 0  # answered within the deadline
    refused_ms: list[float] = field(default_factory=list)  # by HTTP
    refused_grpc_ms: list[float] = field(default_factory=list)
    answered_s: list[float] = field(default_factory=list)
    late_ms: list[float] = field(default_factory=list)
    without_retry_after: int = 0

    @property
    def asked(self) -> int:
        return sum(self.statuses.values())

    def answered(self, took_s: float, deadline_s: float) -> None:
        self.statuses[200] += 1
        self.answered_s.append(took_s)
        self.good += took_s <= deadline_s


class Client:
    """HTTP over kept connections: one that is free, else a new one."""

    def __init__(self, address: str, deadline_s: float) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._deadline_s = deadline_s
        self._number = 0

    async def complete(self, seen: LoadResults, deadline: bool = True) -> None:
        """Ask for one completion, of a prompt of its own, and note how it is answered."""
        self._number += 1
        body = orjson.dumps(
            {
                "model": MODEL,
                "prompt": f"request {self._number}",
                "max_tokens": TOKENS,
                "ignore_eos": True,
            }
        )
        head = f"POST /v1/completions HTTP/1.1\r\nhost: [::]\r\ncontent-length: {len(body)}\r\n"
        if deadline:
            head += f"x-request-deadline: {self._deadline_s:g}\r\n"
        began = time.perf_counter()
        try:
            async with asyncio.timeout(WAIT_S):
                status, headers = await self._ask(head.encode() + b"\r\n" + body)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            seen.statuses[0] += 1
            return
        took_s = time.perf_counter() - began
        if status == 200:
            seen.answered(took_s, self._deadline_s)
            return
        seen.statuses[status] += 1
        if status == 503:
            seen.refused_ms.append(took_s * 1000)
            seen.without_retry_after += b"retry-after:" not in headers

    async def ready(self) -> None:
        """Wait until /readyz says so."""
        status = 0
        async with asyncio.timeout(READY_S):
            while status != 200:
                # The router cannot call back: it is asked again.
                await asyncio.sleep(POLL_S)
                status, _ = await self._ask(b"GET /readyz HTTP/1.1\r\nhost: localhost\r\n\r\n")

    async def _ask(self, request: bytes) -> tuple[int, bytes]:
        async with self._connection() as (reader, writer):
            writer.write(request)
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])
            await reader.readexactly(length)
            return int(head.split()[1]), head

    @asynccontextmanager
    async def _connection(
        self,
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        while self._free and self._free[-1][0].at_eof():
            self._free.pop()[1].close()
        found = self._free.pop() if self._free else None
        reader, writer = found or await asyncio.open_connection(self._host, self._port)
        try:
            yield reader, writer
        except BaseException:  # cancelled too: what is left of this answer is on its way
            writer.close()
            raise
        self._free.append((reader, writer))

    def close(self) -> None:
        for _, writer in self._free:
            writer.close()


class GrpcClient:
    """The same by gRPC, over one channel."""

    def __init__(self, address: str, deadline_s: float) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        self._stub = client_pb2_grpc.InferenceStub(self._channel)
        self._deadline_s = deadline_s
        self._number = 0

    async def complete(self, seen: LoadResults) -> None:
        """Same as `Client.complete`."""
        self._number += 1
        prompt = f"call {self._number}"
        request = client_pb2.GenerateRequest(
            model=MODEL, prompt=prompt, max_tokens=TOKENS, ignore_eos=True
        )
        began = time.perf_counter()
        try:
            async for _ in self._stub.Generate(request, timeout=self._deadline_s):
                pass
        except grpc.aio.AioRpcError as error:
            took_ms = (time.perf_counter() - began) * 1000
            trailers = dict(error.trailing_metadata() or ())
            said = "x-request-id" in trailers or error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            status = STATUSES.get(error.code(), 500) if said else 0
            seen.statuses[status] += 1
            if status == 503:
                seen.refused_grpc_ms.append(took_ms)
                seen.without_retry_after += "retry-after" not in trailers
            return
        seen.answered(time.perf_counter() - began, self._deadline_s)

    async def close(self) -> None:
        await self._channel.close()


async def capacity(client: Client) -> float:
    """Answers a second of workers that are never idle."""
    seen = LoadResults()
    until = time.perf_counter() + CALIBRATE_S

    async def ask_on() -> None:
        while time.perf_counter() < until:
            await client.complete(seen, deadline=False)

    began = time.perf_counter()
    await asyncio.gather(*(ask_on() for _ in range(WORKERS * SEQUENCES * 3 // 2)))
    return seen.statuses[200] / (time.perf_counter() - began)


async def offer(
    client: Client, by_grpc: GrpcClient, rate: float, seconds: float, draws: random.Random
) -> LoadResults:
    """Requests at random moments, `rate` a second."""
    seen = LoadResults()
    began = time.perf_counter()
    moment = 0.0
    async with asyncio.TaskGroup() as asking:
        while (moment := moment + draws.expovariate(rate)) < seconds:
            # Requests come at random moments.
            await asyncio.sleep(max(0.0, began + moment - time.perf_counter()))
            seen.late_ms.append((time.perf_counter() - began - moment) * 1000)
            one = by_grpc if len(seen.late_ms) % GRPC_EVERY == 0 else client
            asking.create_task(one.complete(seen))
    return seen


def share(values: Sequence[float], part: float) -> float:
    """A percentile; 0 of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * part))] if ordered else 0.0


async def measure(
    address: str, grpc_address: str, options: argparse.Namespace
) -> tuple[list[Figure], list[str]]:
    client = Client(address, options.deadline)
    by_grpc = GrpcClient(grpc_address, options.deadline)
    await client.ready()
    most = await capacity(client)
    theory = WORKERS * SEQUENCES / (TOKENS * STEP_MS / 1000)
    figures = [Figure("capacity", most, "1/s", f"{theory:.0f} if each step were full of tokens")]
    notes, goodput = [], {}
    draws = random.Random(1)
    seen = LoadResults()
    for load in sorted(options.loads):
        gc.collect()
        # What the load before left has to end by its deadline.
        await asyncio.sleep(options.deadline + SETTLE_S)
        seen = await offer(client, by_grpc, load * most, options.seconds, draws)
        goodput[load] = seen.good / options.seconds
        figures.append(Figure(f"goodput_{load:g}", goodput[load], "1/s"))
        statuses = ", ".join(f"{count} {status}" for status, count in sorted(seen.statuses.items()))
        notes.append(
            f"{load:g} x: {seen.asked} asked, {statuses}, {seen.good} within the deadline; answers "
            f"in {share(seen.answered_s, 0.5):.2f} s (p99 {share(seen.answered_s, 0.99):.2f}); "
            f"asked late by {share(seen.late_ms, 0.99):.1f} ms (p99)"
        )
    client.close()
    await by_grpc.close()
    highest = max(goodput)
    figures += [
        at_least(f"goodput_{highest:g}_of_peak", goodput[highest] / max(goodput.values()), 0.9),
        at_most("refusal_ms_p50", share(seen.refused_ms, 0.5), 10, "ms"),
        at_most("refusal_ms_p99", share(seen.refused_ms, 0.99), 10, "ms"),
        Figure("refusals_grpc", len(seen.refused_grpc_ms)),
        at_most("refusal_grpc_ms_p50", share(seen.refused_grpc_ms, 0.5), 10, "ms"),
        at_most("refusal_grpc_ms_p99", share(seen.refused_grpc_ms, 0.99), 10, "ms"),
        at_most("refusals_without_retry_after", seen.without_retry_after, 0),
        at_most("no_answer", seen.statuses[0], 0),
        Figure("asked_late_ms_p99", share(seen.late_ms, 0.99), "ms", "the generator's own"),
    ]
    return figures, notes


def main() -> None:
    options_parser = parser(__doc__ or "")
    options_parser.add_argument("--seconds", type=float, default=20.0, help="of each load")
    options_parser.add_argument("--deadline", type=float, default=2.0, help="of a request, in s")
    options_parser.add_argument(
        "--loads", type=float, nargs="+", default=[0.5, 1.0, 1.5, 2.0, 3.0], help="of the capacity"
    )
    options = options_parser.parse_args()
    routed = RoutedWorkers(
        [f"--workers={WORKERS}", f"--sequences={SEQUENCES}", f"--step-ms={STEP_MS}"],
        ["router.grpc_port=0"],
    )
    try:
        routed.wait_workers(WORKERS)
        address = routed.start_router()
        figures, notes = asyncio.run(measure(address, routed.grpc_address, options))
    finally:
        routed.close()
    report(figures, options.json, notes)


if __name__ == "__main__":
    main()
