"""Measure the cost of a request in a router with very many workers and streams: its placement, its
end. The same fleet with ten workers, in the same run, is what it is measured against.

    python -m benchmarks.router_scale [--workers 1000] [--streams 40000] [--json FILE]

The real fleet, dispatcher and index; the workers are stand-ins behind the Dialer seam, which take
what they are sent and answer nothing, but for a report of their load now and then. All prompts
begin with the same blocks, which half of the workers hold. Starts are in processor time: other
processes would else decide the slowest ones. Knows no network.
"""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections.abc import AsyncIterator
from dataclasses import replace

from opentelemetry.context import Context

from baton.proto import worker_pb2
from baton.router.dispatch.active_request import ActiveRequest
from baton.router.dispatch.dispatcher import Dispatcher
from baton.router.fleet.dialer import Connection, RouterLink
from baton.router.fleet.fleet import Fleet
from baton.router.requests.prompt_limits import ContextLimits
from baton.router.requests.validated_request import ValidatedRequest
from baton.runtime import process_memory
from baton.runtime.config import RouterConfig, StepConfig
from baton.runtime.identity import chain, root
from baton.runtime.links import LINK_PROTOCOL_VERSION, LinkClosed
from baton.runtime.registry import MemoryRegistry, Role, WorkerRecord
from baton.runtime.registry_client import InlineRegistry
from benchmarks.figures.report import Figure, at_most, parser, report

KEY = b"benchmark"
VOCABULARY = 1000
SYSTEM_TOKENS = 512  # that all prompts begin with
PROMPT_TOKENS = 576
REPORT_S = 1.0
FEW_WORKERS, FEW_STREAMS = 10, 5000
START_RATIO = 2.0  # of a start among many workers to one among few
CONFIG = RouterConfig(
    link_heartbeat_s=20.0, link_silence_s=300.0, max_waiting=1 << 20, link_queue=1 << 20
)


class StandIn:
    """One worker, its connection and its link."""

    def __init__(self, number: int, role: str, stored: bytes) -> None:
        self._report_s = REPORT_S * (1 + number % 100 / 100)
        self._hello = worker_pb2.WorkerHello(
            protocol_version=LINK_PROTOCOL_VERSION,
            worker_id=f"{role}-{number}",
            boot_id=number.to_bytes(16, "big"),
            role=role,
            model_fingerprint="model",
            kv_dtype="float32",
            vocab_size=VOCABULARY,
            block_size=16,
            total_blocks=1 << 20,
            max_context=1 << 16,
        )
        self._stored = stored
        self._messages = 0

    def link(self) -> RouterLink:
        return self

    async def send(self, message: worker_pb2.RouterMessage) -> None:
        pass

    async def receive(self) -> worker_pb2.WorkerMessage:
        self._messages += 1
        if self._messages == 1:
            return worker_pb2.WorkerMessage(hello=self._hello)
        # A worker reports its load at this period.
        await asyncio.sleep(self._report_s)
        load = worker_pb2.Load(
            running=3, free_blocks=1 << 19, total_blocks=1 << 20, step_ms=20.0, completed_requests=1
        )
        return worker_pb2.WorkerMessage(load=load)

    async def watch_blocks(self) -> AsyncIterator[worker_pb2.BlockEvents]:
        yield worker_pb2.BlockEvents(
            boot_id=self._hello.boot_id, snapshot=True, snapshot_end=True, stored=self._stored
        )
        # A worker's stream stays open without further events.
        await asyncio.sleep(1e6)
        raise LinkClosed("over")

    async def close(self) -> None:
        pass


class StandIns:
    """Implements `Dialer`; addresses are names."""

    def __init__(self) -> None:
        self.workers: dict[str, StandIn] = {}

    def connect(self, address: str) -> Connection:
        return self.workers[address]


def request(draws: random.Random) -> ValidatedRequest:
    own = [draws.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS - SYSTEM_TOKENS)]
    prompt = (*range(SYSTEM_TOKENS), *own)
    return ValidatedRequest(prompt, worker_pb2.Sampling(seed=1), max_tokens=64)


async def start_fleet(workers: int) -> tuple[Fleet, Dispatcher, asyncio.Task[None]]:
    """A third of the workers prefill; half of each role hold the common beginning."""
    registry, dialer = MemoryRegistry(), StandIns()
    parent = root(KEY, "model", "float32")
    common = b"".join(chain(KEY, parent, range(SYSTEM_TOKENS), 16))
    for number in range(workers):
        role: Role = "decode" if number % 3 else "prefill"
        stored = common if number % 2 else b""
        worker_id = f"{role}-{number}"
        dialer.workers[worker_id] = StandIn(number, role, stored)
        boot_id = number.to_bytes(16, "big").hex()
        record = WorkerRecord(worker_id, boot_id, role, worker_id, "", "model", 1)
        registry.announce(record)
    fleet = Fleet(InlineRegistry(registry), dialer, CONFIG, KEY, ContextLimits(1 << 16, VOCABULARY))
    dispatcher = Dispatcher(fleet, CONFIG, StepConfig())
    following = asyncio.create_task(fleet.run(dispatcher))
    async with asyncio.timeout(60):
        while True:
            if sum(fleet.linked_counts().values()) == workers and fleet.rebuilt():
                return fleet, dispatcher, following
            # A fleet has no event for the last link: it is read again.
            await asyncio.sleep(0.1)


async def longest_pause_s(for_s: float) -> float:
    """The longest time that the event loop was away."""
    longest_s, last_s = 0.0, time.perf_counter()
    until_s = last_s + for_s
    while last_s < until_s:
        # The loop is late with this when something held it up.
        await asyncio.sleep(0.001)
        now_s = time.perf_counter()
        longest_s, last_s = max(longest_s, now_s - last_s), now_s
    return longest_s


async def measure(workers: int, streams: int) -> dict[str, float]:
    """All figures, times in the unit of their names."""
    _, dispatcher, following = await start_fleet(workers)
    draws, loop = random.Random(1), asyncio.get_running_loop()
    process_memory.freeze_startup_objects()  # as a router does before it serves
    active_requests: list[ActiveRequest] = []
    starts_s: list[float] = []
    for number in range(streams):
        asked = replace(request(draws), cache_salt=b"")
        began_s = time.thread_time()
        active_requests.append(
            await dispatcher.start(asked, f"req-{number}", Context(), loop.time() + 3600)
        )
        starts_s.append(time.thread_time() - began_s)
        if not number % 64:
            await asyncio.sleep(0)
    pause_s = await longest_pause_s(2.0)
    draws.shuffle(active_requests)
    gc.collect()
    began_s = time.perf_counter()
    for active_request in active_requests:
        dispatcher.cancel(active_request)
    cancel_s = time.perf_counter() - began_s
    assert not len(dispatcher)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    starts_s.sort()
    return {
        "start_us_p50": starts_s[len(starts_s) // 2] * 1e6,
        "start_us_p99": starts_s[len(starts_s) * 99 // 100] * 1e6,
        "cancel_all_s": cancel_s,
        "cancel_us": cancel_s / streams * 1e6,
        "idle_pause_ms_max": pause_s * 1e3,
    }


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--workers", type=int, default=1000)
    made.add_argument("--streams", type=int, default=40_000)
    made.add_argument("--quick", action="store_true", help="60 workers and 200 streams")
    options = made.parse_args()
    if options.quick:
        options.workers, options.streams = 60, 200
    few = asyncio.run(measure(FEW_WORKERS, min(options.streams, FEW_STREAMS)))
    many = asyncio.run(measure(options.workers, options.streams))
    of_few = few["start_us_p50"]
    ratio = many["start_us_p50"] / of_few
    figures = [Figure(name, value) for name, value in many.items()]
    figures.append(Figure(f"start_us_p50_of_{FEW_WORKERS}_workers", of_few))
    figures.append(at_most("start_ratio", ratio, START_RATIO))
    report(figures, options.json, [f"{options.workers} workers, {options.streams} streams"])


if __name__ == "__main__":
    main()
