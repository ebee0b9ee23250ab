"""Measure what TLS adds to a token's latency: a message to another process and a step's outputs
back, on one gRPC stream over loopback, with TLS and in plain text.

    python -m benchmarks.tls_stream --rounds 20 --json FILE

The worker's end is a process of its own that serves both ports. Rounds alternate: `--count` round
trips on the one stream, then on the other, one at a time, for a step of 1 and of 64 sequences.
Figures are medians over all round trips; `added` is TLS less plain, and the handshake is from a
new channel to the first answer on it. `cpu` is this process's own time for a round trip.
"""

from __future__ import annotations

from baton.runtime import tls_version  # noqa: F401  before anything imports grpc

# isort: split
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from baton.deploy.host.authority import Authority, files_of
from baton.proto import worker_pb2
from baton.runtime.grpc_links import (
    ClientLink,
    ServerLink,
    credentials,
    open_channel,
    open_port,
    open_server,
)
from baton.runtime.links import LinkClosed
from baton.runtime.settings.loading import load
from baton.runtime.tls import Tls
from benchmarks.figures.report import Figure, parser, report

TOKEN = "a benchmark's own"
HOST = "127.0.0.1"
SEQUENCES = (1, 64)
HANDSHAKES = 20
END_S = 20.0
ROOT = Path(__file__).resolve().parent.parent

Link = ClientLink[bytes, bytes]


@dataclass(slots=True)
class RoundTripTimes:
    """Seconds: of each round trip, and of this process's processor for each round's mean."""

    trips: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def outputs(sequences: int) -> bytes:
    """A step's outputs, as a decode worker sends them."""
    step = worker_pb2.StepOutputs(
        outputs=[
            worker_pb2.Output(request_id=f"{number:032x}", attempt=1, index=100, token=7000)
            for number in range(sequences)
        ]
    )
    return worker_pb2.WorkerMessage(outputs=step).SerializeToString()


def tls_of_files(folder: Path, name: str) -> Tls:
    return Tls(load(None, {}, files_of(folder, name).settings()).security)


async def serve(folder: Path) -> None:
    """The worker's end: answers each message with the outputs of so many sequences as it says.
    Prints both ports, TLS's first, and serves until standard input ends."""

    async def answer(_: Any, context: Any) -> None:
        link: ServerLink[bytes, bytes] = ServerLink(context)
        answers = {str(count).encode(): outputs(count) for count in SEQUENCES}
        try:
            while True:
                await link.send(answers[await link.receive()])
        except LinkClosed:
            await link.close()

    methods: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        "Answer": grpc.stream_stream_rpc_method_handler(answer)
    }
    servers = []
    for tls in (tls_of_files(folder, "worker"), None):
        server = open_server(TOKEN)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("b", methods),))
        print(open_port(server, f"{HOST}:0", tls), flush=True)
        await server.start()
        servers.append(server)
    await asyncio.to_thread(sys.stdin.read)
    for server in servers:
        await server.stop(None)


def link_on(channel: grpc.aio.Channel) -> Link:
    return ClientLink(channel.stream_stream("/b/Answer")(metadata=credentials(TOKEN)))


async def round_of(link: Link, sequences: int, count: int, times: RoundTripTimes) -> None:
    asked = str(sequences).encode()
    began = time.process_time()
    for _ in range(count):
        sent = time.perf_counter()
        await link.send(asked)
        await link.receive()
        times.trips.append(time.perf_counter() - sent)
    times.cpu.append((time.process_time() - began) / count)


async def handshake(address: str, tls: Tls | None) -> float:
    began = time.perf_counter()
    async with open_channel(address, tls) as channel:
        link = link_on(channel)
        await link.send(b"1")
        await link.receive()
        took = time.perf_counter() - began
        await link.close()
    return took


async def measure(ports: list[int], tls: Tls, rounds: int, count: int) -> list[Figure]:
    ways: dict[str, tuple[str, Tls | None]] = {
        "tls": (f"{HOST}:{ports[0]}", tls),
        "plain": (f"{HOST}:{ports[1]}", None),
    }
    channels = {way: open_channel(*given) for way, given in ways.items()}
    links = {way: link_on(channel) for way, channel in channels.items()}
    figures = []
    for sequences in SEQUENCES:
        times = {way: RoundTripTimes() for way in ways}
        for way in ways:
            await round_of(links[way], sequences, count, RoundTripTimes())  # not counted
        for number in range(rounds):
            for way in sorted(ways, reverse=bool(number % 2)):
                await round_of(links[way], sequences, count, times[way])
        figures += _figures(sequences, times)
    for way in ways:
        await links[way].close()
        await channels[way].close()
    opened: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(HANDSHAKES):
        for way, given in ways.items():
            opened[way].append(await handshake(*given))
    for way, taken in opened.items():
        figures.append(Figure(f"first_answer_{way}_ms", 1e3 * statistics.median(taken), "ms"))
    return figures


def _figures(sequences: int, times: dict[str, RoundTripTimes]) -> list[Figure]:
    trips = {way: 1e6 * statistics.median(each.trips) for way, each in times.items()}
    cpu = {way: 1e6 * statistics.median(each.cpu) for way, each in times.items()}
    size = f"{len(outputs(sequences))} bytes"
    return [
        Figure(f"trip_us_{sequences}_tls", trips["tls"], "us", size),
        Figure(f"trip_us_{sequences}_plain", trips["plain"], "us", size),
        Figure(f"trip_us_{sequences}_added", trips["tls"] - trips["plain"], "us"),
        Figure(f"cpu_us_{sequences}_tls", cpu["tls"], "us"),
        Figure(f"cpu_us_{sequences}_added", cpu["tls"] - cpu["plain"], "us"),
    ]


def main() -> None:
    made = parser("What TLS adds to a token's way between two processes.")
    made.add_argument("--rounds", type=int, default=20)
    made.add_argument("--count", type=int, default=200, help="round trips in a round")
    made.add_argument("--serve", type=Path, metavar="FOLDER", help="be the worker's end")
    options = made.parse_args()
    if options.serve is not None:
        asyncio.run(serve(options.serve))
        return
    report(figures_of(options.rounds, options.count), options.json)


def figures_of(rounds: int, count: int) -> list[Figure]:
    """Start the worker's end, measure, and end it."""
    with tempfile.TemporaryDirectory(prefix="baton-benchmark-") as folder:
        certificates = Path(folder, "tls")
        authority = Authority(certificates)
        authority.issue("worker", HOST)
        authority.issue("router", host=None)
        command = [sys.executable, "-m", "benchmarks.tls_stream", "--serve", str(certificates)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        ) as worker:
            assert worker.stdout is not None
            try:
                ports = [int(worker.stdout.readline()) for _ in range(2)]
                tls = tls_of_files(certificates, "router")
                return asyncio.run(measure(ports, tls, rounds, count))
            finally:
                worker.communicate(timeout=END_S)  # ends its standard input


if __name__ == "__main__":
    main()
