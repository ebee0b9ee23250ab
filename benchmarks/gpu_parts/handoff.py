"""Parts of `benchmarks.gpu` about moving KV: READs between two processes, and checksums.

Both processes use the mover of a worker, on pools of their own on the same device. The granter is a
child: it prints its pool as one line of JSON, and serves READs until its input ends.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import secrets
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch

from baton.deploy.processes.pool_memory import device_pool
from baton.deploy.serve.device_defaults import on_gpu
from baton.engine.triton.checksum import block_checksums
from baton.kv_transfer.local_pool import DRAM, HostPool
from baton.kv_transfer.mover import PeerPool
from baton.kv_transfer.nixl_mover import READ_THREADS, NixlMover, NixlRead
from baton.kv_transfer.preflight import described
from baton.runtime.config import Config
from benchmarks.figures.report import Figure, at_least, at_most
from benchmarks.gpu_parts.block_churn import BlockChurn, Handed, descriptors
from benchmarks.gpu_parts.models import seconds_of
from benchmarks.gpu_parts.speed import Given, Skipped

BLOCK_BYTES = 2 << 20  # of an 8B model: 16 tokens of 128 KiB
SLABS = 8
READ_OVER_LINK = 0.8
CHECKSUM_SHARE = 0.02
NETWORK_GB_PER_S = 50.0
READ_TIMEOUT_S = 10.0
LINK_BYTES = 1 << 30  # of a plain copy


def checksum_sizes(dry: bool) -> tuple[int, int]:
    """Return how many blocks have their checksums computed, and their bytes."""
    return (4, 16 << 10) if dry else (512, BLOCK_BYTES)


def nixl_installed() -> bool:
    return find_spec("nixl") is not None or find_spec("nixl_cu13") is not None


def _pool(device: torch.device, blocks: int, size: int) -> torch.Tensor:
    """A pool in which all bytes of block i are i + 1 (mod 256)."""
    pool = torch.empty((blocks, size), dtype=torch.uint8, device=device)
    pool.copy_(torch.arange(1, blocks + 1, device=device).to(torch.uint8)[:, None])
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return pool


def _mover(pool: torch.Tensor) -> NixlMover:
    """A worker's mover on this pool."""
    if pool.device.type == "cpu":
        return NixlMover(HostPool(pool.numpy(), SLABS), secrets.token_bytes(16), READ_THREADS)
    where = pool.device if pool.device.index is not None else torch.device("cuda", 0)
    return NixlMover(device_pool(pool.to(where), SLABS), secrets.token_bytes(16), READ_THREADS)


def grant(device: str, blocks: int, size: int) -> None:
    """The child process."""
    asyncio.run(_grant(torch.device(device), blocks, size))


async def _grant(device: torch.device, blocks: int, size: int) -> None:
    pool = _pool(device, blocks, size)
    mover = _mover(pool)
    mover.hold_progress()
    peer = asdict(mover.describe())
    peer |= {"boot_id": peer["boot_id"].hex(), "metadata": peer["metadata"].hex()}
    print(json.dumps({"peer": json.dumps(peer), "ipc": exported_handle(pool)}), flush=True)
    await asyncio.to_thread(sys.stdin.buffer.read)  # ends with the parent
    await mover.close()


@dataclass(frozen=True, slots=True)
class Link:
    """How memory of another process on this device is reached, and how fast a copy is."""

    name: str
    gb_per_s: float


@dataclass(frozen=True, slots=True)
class Reading:
    """READs of some blocks: `gb_per_s` of the median round, and the blocks of a descriptor."""

    gb_per_s: float
    blocks_per_descriptor: float


@contextmanager
def _granter(device: torch.device, blocks: int, size: int) -> Iterator[dict[str, Any]]:
    command = [sys.executable, "-m", "benchmarks.gpu_parts.handoff"]
    command += [device.type, str(blocks), str(size)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        try:
            yield json.loads(_line(child))
        finally:
            assert child.stdin is not None
            child.stdin.close()
            try:
                child.wait(5)
            except subprocess.TimeoutExpired:
                child.kill()


def _line(child: subprocess.Popen[bytes]) -> bytes:
    """The granter's line; what a library prints before it is passed over."""
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith(b'{"peer"'):
            return line
    raise RuntimeError("the granter ended without granting")


def handoff(given: Given) -> Iterator[Figure]:
    """READs as a handoff makes them, payload over time, beside what a plain copy makes of the link
    that is present. Pools are as long use leaves them; beside them are the best and the worst
    order of blocks, a peer whose blocks have half the size, and READs with their checksums."""
    if not nixl_installed():
        raise Skipped("nixl is not installed")
    blocks, size = (128, 16 << 10) if given.dry else (4096, BLOCK_BYTES)
    link, found = read_layouts(given.device, blocks, size, 3 if given.dry else 9)
    yield Figure("link_gb_per_s", link.gb_per_s, "GB/s", link.name)
    for name in ("consecutive", "scattered", "unlike"):
        yield Figure(f"handoff_read_gb_per_s_{name}", found[name].gb_per_s, "GB/s")
    used = found["used"]
    yield Figure("handoff_verified_gb_per_s", found["verified"].gb_per_s, "GB/s")
    yield Figure("handoff_blocks_per_descriptor", used.blocks_per_descriptor)
    yield Figure("handoff_read_gb_per_s", used.gb_per_s, "GB/s")
    yield at_least("handoff_read_over_link", used.gb_per_s / link.gb_per_s, READ_OVER_LINK)


def _layouts(blocks: int, most: int) -> dict[str, list[Handed]]:
    """Prompts of about `most` blocks together, by the order of their blocks in pools."""
    dice = random.Random(2)
    each = range(min(most, blocks))
    scattered = tuple(dice.sample(range(blocks), len(each)) for _ in range(2))
    churn = BlockChurn(blocks)
    for _ in range(max(40, blocks // 8)):
        churn.hand_over()
    used: list[Handed] = []
    taken: set[int] = set()
    while len(taken) < most // 2:
        remote, local = churn.hand_over()
        if taken.isdisjoint(local):  # else one READ would overwrite what another brought
            used.append((remote, local))
            taken.update(local)
    return {
        "consecutive": [(list(each), list(each))],
        "scattered": [(scattered[0], scattered[1])],
        "used": used,
    }


def read_all(device: torch.device, blocks: int, size: int) -> None:
    """Read all blocks of a granter on `device`, once. Raises RuntimeError if that fails, or brings
    other bytes."""

    async def read() -> None:
        await mover.connect(peer)
        await _read(mover, peer.boot_id, [(list(range(blocks)), list(range(blocks)))], size)
        await mover.close()

    with _granter(device, blocks, size) as theirs:
        pool = torch.zeros((blocks, size), dtype=torch.uint8, device=device)
        mover, peer = _mover(pool), described(theirs["peer"])
        asyncio.run(read())
        check_landed(pool, torch.arange(1, blocks + 1, device=device).to(torch.uint8))


def read_layouts(
    device: torch.device, blocks: int, size: int, rounds: int
) -> tuple[Link, dict[str, Reading]]:
    """Return the link to a granter on `device`, and READs of its pool by their layout. Raises
    RuntimeError if one fails, or brings other bytes."""
    with _granter(device, blocks, size) as theirs:
        pool = torch.zeros((blocks, size), dtype=torch.uint8, device=device)
        mover = _mover(pool)
        peer = described(theirs["peer"])
        found = asyncio.run(_read_layouts(mover, pool, peer, rounds))
        return peer_link(pool.view(-1)[:LINK_BYTES], theirs["ipc"]), found


async def _read_layouts(
    mover: NixlMover, pool: torch.Tensor, peer: PeerPool, rounds: int
) -> dict[str, Reading]:
    blocks, size = pool.shape
    found = {}
    await mover.connect(peer)
    for name, prompts in _layouts(blocks, min(blocks, 1024)).items():
        _clear(pool)
        rates = [await _read(mover, peer.boot_id, prompts, size) for _ in range(rounds)]
        for remote, local in prompts:
            wanted = (torch.tensor(remote, device=pool.device) + 1).to(torch.uint8)
            check_landed(pool[torch.tensor(local, device=pool.device)], wanted)
        moved = sum(len(ours) for _, ours in prompts)
        runs = sum(descriptors(*each) for each in prompts)
        found[name] = Reading(settled(rates), moved / runs)
    rates = [await _read(mover, peer.boot_id, prompts, size, summed=True) for _ in range(rounds)]
    found["verified"] = replace(found[name], gb_per_s=settled(rates))
    mover.forget(peer.boot_id)
    found["unlike"] = await _read_halves(mover, pool, peer, rounds)
    await mover.close()
    return found


async def _read_halves(
    mover: NixlMover, pool: torch.Tensor, peer: PeerPool, rounds: int
) -> Reading:
    """Read the peer's memory as blocks of half the size: each own block lies in two of them."""
    blocks, size = pool.shape
    halves = replace(peer, block_bytes=size // 2, num_blocks=2 * blocks, unit_bytes=size)
    await mover.connect(halves)
    own = list(range(min(blocks, 512)))
    _clear(pool)
    prompt = [part for block in own for part in (2 * block, 2 * block + 1)]
    rates = [await _read(mover, peer.boot_id, [(prompt, own)], size) for _ in range(rounds)]
    check_landed(
        pool[: len(own)], torch.arange(1, len(own) + 1, device=pool.device).to(torch.uint8)
    )
    return Reading(settled(rates), 0.5)


def settled(rates: Sequence[float]) -> float:
    """The median without the first, which sets the connection up."""
    return median(rates[1:])


async def _read(
    mover: NixlMover, boot_id: bytes, prompts: Sequence[Handed], size: int, summed: bool = False
) -> float:
    """Return GB/s of READs of all prompts, of the size and with the window of a handoff. `summed`:
    until their checksums are known."""
    on_host = mover.describe().memory == DRAM
    config = (Config() if on_host else on_gpu(Config(), ())).handoff
    each = mover.shape(boot_id).granter_parts
    most = max(1, config.read_bytes // size)
    window = min(config.window_reads, max(1, config.window_bytes // (most * size)))
    pieces: deque[Handed] = deque()
    for theirs, ours in prompts:
        step = -(-len(ours) // -(-len(ours) // most))  # equal sizes, as a reader's
        for first in range(0, len(ours), step):
            end = first + step
            pieces.append((theirs[first * each : end * each], ours[first:end]))
    moved, under_way = sum(len(ours) for _, ours in prompts) * size, deque[NixlRead]()
    begun = time.perf_counter()
    while pieces or under_way:
        while pieces and len(under_way) < window:
            theirs, ours = pieces.popleft()
            seeds = range(len(ours)) if summed else None
            under_way.append(mover.read(boot_id, theirs, ours, seeds))
        read = under_way.popleft()
        async with asyncio.timeout(READ_TIMEOUT_S):
            await (read.checksums or read.landed)
    return moved / (time.perf_counter() - begun) / 1e9


def _clear(pool: torch.Tensor) -> None:
    pool.zero_()
    if pool.device.type == "cuda":
        torch.cuda.synchronize(pool.device)


def check_landed(landed: torch.Tensor, wanted: torch.Tensor) -> None:
    """Raise RuntimeError unless all bytes of each block, [blocks, bytes], are as `wanted`."""
    if not bool((landed == wanted[:, None]).all()):
        raise RuntimeError("a READ is done, and its bytes are not those of the granter")


def exported_handle(pool: torch.Tensor) -> list[Any] | None:
    """Return the handle by which another process opens `pool`; None where CUDA cannot share it."""
    if pool.device.type != "cuda":
        return None
    try:
        parts = pool.untyped_storage()._share_cuda_()
    except RuntimeError as error:
        print(f"CUDA cannot share memory here: {error}", file=sys.stderr)
        return None
    return [
        {"bytes": base64.b64encode(part).decode()} if isinstance(part, bytes) else part
        for part in parts
    ]


def peer_link(pool: torch.Tensor, exported: list[Any] | None) -> Link:
    """Return the best link that there is between two processes: the peer's memory itself (CUDA
    IPC), else by way of the host, where a byte is copied off the device and on to it again."""
    if exported is not None:
        parts = [base64.b64decode(e["bytes"]) if isinstance(e, dict) else e for e in exported]
        try:
            storage = torch.UntypedStorage._new_shared_cuda(*parts)
            theirs = torch.empty(0, dtype=torch.uint8, device=pool.device)
            theirs.set_(storage)
            seconds = seconds_of(lambda: pool.copy_(theirs[: len(pool)]), pool.device)
            return Link("a copy by CUDA IPC", len(pool) / seconds / 1e9)
        except RuntimeError as error:
            print(f"no CUDA IPC here: {error}", file=sys.stderr)
    on_gpu = pool.device.type == "cuda"
    host = torch.empty(len(pool), dtype=torch.uint8, pin_memory=on_gpu)

    def through_host() -> None:
        host.copy_(pool, non_blocking=True)
        pool.copy_(host, non_blocking=True)

    seconds = seconds_of(through_host, pool.device)
    return Link("two copies through host memory", len(pool) / seconds / 1e9)


def checksum(given: Given) -> Iterator[Figure]:
    """The cost of checksums of all blocks, against their transfer by the link that is present. A
    sum reads each byte once: where the link is nearly as fast as the memory, that is its bound."""
    blocks, size = checksum_sizes(given.dry)
    pool = torch.empty((blocks, size), dtype=torch.uint8, device=given.device).random_(0, 256)
    index = torch.arange(blocks, device=given.device)
    seeds = torch.randint(-(1 << 62), 1 << 62, (blocks,), device=given.device)
    seconds = seconds_of(lambda: block_checksums(pool, index, seeds, SLABS), given.device)
    rate = blocks * size / seconds / 1e9
    yield Figure("checksum_gb_per_s", rate, "GB/s")
    yield at_most("checksum_share_at_400_gbit_s", NETWORK_GB_PER_S / rate, CHECKSUM_SHARE)
    link = given.ceiling("link_gb_per_s")
    bound = link / given.ceiling("copy_gb_per_s")  # of a sum at the rate of the memory
    yield at_most("checksum_share_of_link", link / rate, max(CHECKSUM_SHARE, 1.25 * bound))


if __name__ == "__main__":
    grant(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
