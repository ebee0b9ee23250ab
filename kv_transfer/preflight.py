"""The preflight: measures the speed of READs from a peer, and finds their transport.

`measure` times READs through a connected mover into free blocks of the caller. `loopback` measures
this host with two processes of this module, one that serves a pool and one that reads it. UCX then
logs the chosen protocol, which names the transport. NIXL does not report it, so elsewhere the name
only states what is known: what UCX_TLS permits, and whether the bytes came over TCP.

    python -m baton.kv_transfer.preflight          prints one line
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import secrets
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from baton.kv_transfer import tcp_bytes
from baton.kv_transfer.block_sizes import BlockRatio
from baton.kv_transfer.local_pool import DRAM, HostPool, RankPool, memory_name
from baton.kv_transfer.mover import Mover, PeerPool
from baton.kv_transfer.nixl_mover import NixlMover
from baton.runtime import waits
from baton.runtime.errors import BatonError, ReadFailed

ROUNDS = 5
READ_TIMEOUT_S = 10.0
LOOPBACK_TIMEOUT_S = 60.0
LOOPBACK_BLOCKS = 16
LOOPBACK_BLOCK_BYTES = 1 << 20

HINT = "UCX_PROTO_INFO=y shows it"  # in UCX's log on the process's output
_RDMA_DEVICES = "/sys/class/infiniband"

_SHARED_MEMORY = {"cma", "shm", "sm", "sysv", "posix", "mm", "xpmem", "knem"}
_NETWORKS = {"ib", "rc", "rc_x", "rc_v", "ud", "ud_x", "ud_v", "dc", "dc_x", "srd", "all"}
_CHOSEN = re.compile(r"\|\s*[\d.K]+\.\.inf\s*\|[^|]*\|\s*(?P<transport>\S[^|]*?)\s*\|")


@dataclass(frozen=True, slots=True)
class PreflightReport:
    """The result of a measurement. `gb_per_s` (10**9 bytes) is that of the median round, `first_ms`
    the time of the first READ with its connection setup. `degraded`: slower than the configured
    floor. `memory` names both ends."""

    transport: str
    gb_per_s: float
    first_ms: float
    read_bytes: int
    degraded: bool
    memory: str = "DRAM to DRAM"

    @property
    def line(self) -> str:
        state = "  DEGRADED: below the configured floor" if self.degraded else ""
        return (
            f"READ {self.gb_per_s:.2f} GB/s over {self.transport}, {self.memory}, "
            f"first contact {self.first_ms:.1f} ms{state}"
        )


def possible_transport(ucx_tls: str) -> str:
    """Return the transport that UCX_TLS permits; an empty value leaves the choice to UCX."""
    named = {part.strip().split("/")[0] for part in ucx_tls.split(",") if part.strip()}
    if not named or ucx_tls.startswith("^"):
        return "a transport of UCX's choice"
    if named & _SHARED_MEMORY or named & _NETWORKS:
        return f"UCX_TLS={ucx_tls}"
    return "tcp" if "tcp" in named else f"UCX_TLS={ucx_tls}"


def known_transport(ucx_tls: str, over_tcp: bool | None, here: bool) -> str:
    """Return what is known about UCX's transport. `over_tcp`: whether the bytes arrived over TCP,
    if known; `here`: whether shared memory is the only alternative to TCP."""
    if over_tcp:
        return "tcp"
    possible = possible_transport(ucx_tls)
    if over_tcp is None or possible == "tcp":
        return possible if possible == "tcp" else f"{possible} ({HINT})"
    return f"{'shared memory' if here else 'not tcp'}, {possible} ({HINT})"


def chosen_transport(ucx_log: str) -> str | None:
    """Return the transport of large READs from the log of UCX_PROTO_INFO=y; None: not logged."""
    tables = ucx_log.split("remote memory read by ucp_get")[1:]
    for table in reversed(tables):
        found = _CHOSEN.search(table)
        if found:
            return found["transport"]
    return None


async def measure(
    mover: Mover,
    boot_id: bytes,
    remote: Sequence[int],
    own: Sequence[int],
    floor_gb_per_s: float,
    transport: str | None = None,
    *,
    rounds: int = ROUNDS,
) -> PreflightReport:
    """Read the peer's blocks `remote` into the own blocks `own` (see `Mover.read`), once and then
    `rounds` times.

    Raises ReadFailed. The own blocks of an unfinished READ remain its destination until the
    exception's `settled` completes.
    """
    peer, mine = mover.peer(boot_id), mover.describe()
    shape = mover.shape(boot_id)
    size = shape.unit_bytes * (len(own) // shape.reader_parts)
    loop = asyncio.get_running_loop()
    seconds: list[float] = []
    over_tcp: set[bool | None] = set()
    over_sockets = mover.kind == NixlMover.kind  # only NIXL has transports
    for _ in range(rounds + 1):
        before, begun = tcp_bytes.received() if over_sockets else None, loop.time()
        read = mover.read(boot_id, remote, own)
        if not await waits.done_within(read.landed, READ_TIMEOUT_S):
            read.abandon()
            late = f"a preflight READ did not end in {READ_TIMEOUT_S:g} s"
            raise PreflightFailed(late, read.settled)
        read.landed.result()
        seconds.append(loop.time() - begun)
        arrived = tcp_bytes.since(before) if over_sockets else None
        if arrived is None or size / 2 <= arrived < size:
            over_tcp.add(None)
        else:
            over_tcp.add(arrived >= size)
    gb_per_s = size / statistics.median(seconds[1:]) / 1e9
    name = transport or transport_name(mover, peer, over_tcp.pop() if len(over_tcp) == 1 else None)
    names = (memory_name(pool.memory, pool.device_id) for pool in (peer, mine))
    memory = " to ".join(names)
    return PreflightReport(
        name, gb_per_s, seconds[0] * 1e3, size, gb_per_s < floor_gb_per_s, memory
    )


def transport_name(mover: Mover, peer: PeerPool, over_tcp: bool | None) -> str:
    """Return what is known about the transport of a peer's READs, `over_tcp` as for
    `known_transport`."""
    if mover.kind != NixlMover.kind:
        return f"the {mover.kind} mover"
    here = {peer.memory, mover.describe().memory} == {DRAM} and not os.path.exists(_RDMA_DEVICES)
    return known_transport(os.environ.get("UCX_TLS", ""), over_tcp, here)


class PreflightFailed(ReadFailed):
    """A READ that did not end in time. Its own blocks are not free until `settled` completes."""

    def __init__(self, message: str, settled: asyncio.Future[None] | None = None) -> None:
        super().__init__(message)
        self.settled = settled


MakeMover = Callable[[int, int], NixlMover]  # blocks, block bytes


@dataclass(frozen=True, slots=True)
class Processes:
    """The two ends of a loopback: the Python arguments that start one, and the function that
    creates each end's mover with its own pool."""

    arguments: tuple[str, ...]
    make: MakeMover


async def loopback(floor_gb_per_s: float, ends: Processes | None = None) -> PreflightReport:
    """Measure READs between two processes of this host. `ends` None: with pools in host memory.
    Raises ReadFailed."""
    ends = ends or on_host()
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, *ends.arguments, "--read"),
        env=os.environ | {"UCX_PROTO_INFO": "y"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(LOOPBACK_TIMEOUT_S):
            out, err = await child.communicate()
    except TimeoutError:
        raise ReadFailed(f"the preflight did not end within {LOOPBACK_TIMEOUT_S:g} s") from None
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    found = [line for line in out.decode().splitlines() if line.startswith("{")]
    if child.returncode or not found:
        raise ReadFailed(f"the preflight failed: {err.decode().strip()[-500:]}")
    report = PreflightReport(**json.loads(found[-1]))
    transport = chosen_transport(out.decode() + err.decode()) or report.transport
    return replace(report, transport=transport, degraded=report.gb_per_s < floor_gb_per_s)


def host_mover(blocks: int, block_bytes: int) -> NixlMover:
    """Create a mover with its own pool, whose block i is filled with bytes i + 1 (mod 256)."""
    pool = np.zeros((blocks, block_bytes), dtype=np.uint8)
    pool += (np.arange(blocks) + 1).astype(np.uint8)[:, None]
    return NixlMover(HostPool(pool, slabs=1), secrets.token_bytes(16))


def on_host() -> Processes:
    return Processes(("-m", "baton.kv_transfer.preflight"), host_mover)


async def serve(blocks: int, block_bytes: int, make: MakeMover) -> None:
    """Print this process's pool as a line of JSON and serve READs until stdin ends."""
    mover = make(blocks, block_bytes)
    mover.hold_progress()
    pool = asdict(mover.describe())
    pool |= {"boot_id": pool["boot_id"].hex(), "metadata": pool["metadata"].hex()}
    print(json.dumps(pool), flush=True)
    await asyncio.to_thread(sys.stdin.buffer.read)  # ends with the parent
    await mover.close()


def described(line: str) -> PeerPool:
    """Parse the pool that a `serve` process has printed."""
    fields = json.loads(line)
    fields |= {key: bytes.fromhex(fields[key]) for key in ("boot_id", "metadata")}
    ranks = tuple(RankPool(**each) for each in fields["rank_pools"])
    return PeerPool(**fields | {"ratio": BlockRatio(**fields["ratio"]), "rank_pools": ranks})


async def read_from_child(blocks: int, block_bytes: int, ends: Processes) -> PreflightReport:
    """Start a `serve` in a child process and measure READs from it. Raises ReadFailed, also if the
    bytes differ from those of the child."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, *ends.arguments, "--serve"),
        *("--blocks", str(blocks), "--block-bytes", str(block_bytes)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(LOOPBACK_TIMEOUT_S):
            pool = described(await first_json(child))
            mover = ends.make(blocks, block_bytes)
            await mover.connect(pool)
            # Backwards, so that the content of every block changes, except a middle one.
            own = range(blocks - 1, -1, -1)
            before = await mover.checksums(range(blocks), [0] * blocks)
            report = await measure(mover, pool.boot_id, range(blocks), own, 0.0)
            landed = await mover.checksums(own, [0] * blocks)
            await mover.close()
            if not np.array_equal(landed, before):
                raise ReadFailed(f"the READs ended ({report.memory}) with wrong bytes")
            return report
    finally:
        if child.returncode is None:  # `kill` raises for an ended process
            child.kill()
        await child.wait()


async def first_json(child: asyncio.subprocess.Process) -> str:
    """Return the first line of a child's output that is JSON; libraries may log before it. Raises
    ReadFailed if there is none."""
    assert child.stdout is not None
    while line := await child.stdout.readline():
        if line.startswith(b"{"):
            return line.decode()
    raise ReadFailed("the serving process ended before it printed its pool")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure READs between processes of this host")
    add_arguments(parser)
    run(parser.parse_args(), on_host())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--serve", action="store_true", help="serve a pool until stdin ends")
    parser.add_argument("--read", action="store_true", help="measure, and print JSON")
    parser.add_argument("--blocks", type=int, default=LOOPBACK_BLOCKS)
    parser.add_argument("--block-bytes", type=int, default=LOOPBACK_BLOCK_BYTES)
    parser.add_argument("--floor-gb-per-s", type=float, default=0.0, help="GB/s")


def run(args: argparse.Namespace, ends: Processes) -> None:
    """Run one of the ends, or measure between both. Raises SystemExit on failure."""
    try:
        if args.serve:
            asyncio.run(serve(args.blocks, args.block_bytes, ends.make))
        elif args.read:
            report = asyncio.run(read_from_child(args.blocks, args.block_bytes, ends))
            print(json.dumps(asdict(report)), flush=True)
        else:
            print(asyncio.run(loopback(args.floor_gb_per_s, ends)).line)
    except BatonError as error:
        sys.exit(f"{error.code}: {error}")


if __name__ == "__main__":
    main()
