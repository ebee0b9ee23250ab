"""Parts of `benchmarks.gpu` about moving KV: READs between two processes, and checksums.

The granter is a child process with a pool of its own on the same device. It prints one line,
JSON: its agent's metadata and its pool's address; then it pumps its agent until its input ends.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from statistics import median
from typing import Any

import numpy as np
import torch

from baton.engine.triton.checksum import block_checksums
from benchmarks.figures.report import Figure, at_least, at_most
from benchmarks.gpu_parts.models import seconds_of
from benchmarks.gpu_parts.speed import Given, Skipped

BLOCK_BYTES = 2 << 20  # of an 8B model: 16 tokens of 128 KiB
SLABS = 8
READ_OVER_LINK = 0.8
CHECKSUM_SHARE = 0.02
NETWORK_GB_PER_S = 50.0


def _sizes(dry: bool) -> tuple[int, int]:
    """(blocks of a pool, their bytes)"""
    return (4, 16 << 10) if dry else (512, BLOCK_BYTES)


def _agent(name: str) -> Any:
    nixl: Any
    if find_spec("nixl_cu13") is not None:
        from nixl_cu13 import _api as for_cuda_13

        nixl = for_cuda_13
    else:
        from nixl import _api as for_any

        nixl = for_any
    # No progress thread: it would spin on a core of its own.
    config = nixl.nixl_agent_config(backends=[], enable_prog_thread=False)
    agent = nixl.nixl_agent(name, config)
    agent.create_backend("UCX", {})
    return agent


def nixl_installed() -> bool:
    return find_spec("nixl") is not None or find_spec("nixl_cu13") is not None


def grant(device: str, blocks: int, size: int) -> None:
    """The child process."""
    pool = torch.empty(blocks * size, dtype=torch.uint8, device=device)
    pool.copy_(torch.arange(blocks, device=device).to(torch.uint8).repeat_interleave(size))
    agent = _agent("granter")
    agent.register_memory(pool)
    if device != "cpu":
        torch.cuda.synchronize()
    metadata = base64.b64encode(agent.get_agent_metadata()).decode()
    described = {"metadata": metadata, "address": pool.data_ptr(), "ipc": _exported(pool)}
    print(json.dumps(described), flush=True)
    os.set_blocking(sys.stdin.fileno(), False)
    while sys.stdin.buffer.read(1) != b"":  # None while it is open
        agent.get_new_notifs()
        time.sleep(0.0005)


def handoff(given: Given) -> Iterator[Figure]:
    """READs of all blocks of a pool into another, payload over time from post to done, beside
    what a plain copy makes of the link that is present."""
    if not nixl_installed():
        raise Skipped("nixl is not installed")
    blocks, size = _sizes(given.dry)
    link, rates = read_all(given.device, blocks, size, 3 if given.dry else 12)
    yield Figure("link_gb_per_s", link.gb_per_s, "GB/s", link.name)
    rate = median(rates[1:])  # the first one sets the connection up
    yield Figure("handoff_read_gb_per_s", rate, "GB/s")
    yield at_least("handoff_read_over_link", rate / link.gb_per_s, READ_OVER_LINK)


@dataclass(frozen=True, slots=True)
class Link:
    """How memory of another process on this device is reached, and how fast a copy is."""

    name: str
    gb_per_s: float


def read_all(device: torch.device, blocks: int, size: int, reads: int) -> tuple[Link, list[float]]:
    """The link to a granter on `device`, and the GB/s of each of `reads` READs of its pool. Raises
    RuntimeError where one fails, or brings other bytes."""
    # UCX serves a GET between devices' memory over TCP where it sees no NVLink, unless told.
    os.environ["UCX_CUDA_IPC_ENABLE_GET_ZCOPY"] = "on"
    command = [sys.executable, "-m", "benchmarks.gpu_parts.handoff"]
    command += [device.type, str(blocks), str(size)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        try:
            theirs = json.loads(_line(child))
            pool = torch.zeros(blocks * size, dtype=torch.uint8, device=device)
            rates = _read(pool, blocks, size, reads, theirs)
            return _link(pool, theirs["ipc"]), rates
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
        if line.startswith(b'{"metadata"'):
            return line
    raise RuntimeError("the granter ended without granting")


def _read(
    pool: torch.Tensor, blocks: int, size: int, reads: int, theirs: dict[str, Any]
) -> list[float]:
    memory = "DRAM" if pool.device.type == "cpu" else "VRAM"
    agent = _agent("reader")
    agent.register_memory(pool)
    peer = agent.add_remote_agent(base64.b64decode(theirs["metadata"]))
    places = np.arange(blocks, dtype=np.uint64) * np.uint64(size)

    def rows(base: int) -> Any:
        table = np.zeros((blocks, 3), np.uint64)  # address, length, device
        table[:, 0], table[:, 1] = np.uint64(base) + places, size
        return agent.get_xfer_descs(table, memory)

    transfer = agent.initialize_xfer(
        "READ", rows(pool.data_ptr()), rows(theirs["address"]), peer, b""
    )
    rates = []
    for _ in range(reads):
        begun = time.perf_counter()
        state = agent.transfer(transfer)
        while state == "PROC":
            state = agent.check_xfer_state(transfer)
        if state != "DONE":
            raise RuntimeError(f"the READ ended as {state}")
        rates.append(blocks * size / (time.perf_counter() - begun) / 1e9)
    wanted = torch.arange(blocks, device=pool.device).to(torch.uint8)
    if not bool((pool.view(blocks, size) == wanted[:, None]).all()):
        raise RuntimeError("a READ is done, and its bytes are not those of the granter")
    agent.release_xfer_handle(transfer)
    return rates


def _exported(pool: torch.Tensor) -> list[Any] | None:
    """The handle by which another process opens `pool`; None where CUDA cannot share it."""
    if pool.device.type != "cuda":
        return None
    try:
        parts = pool.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        print(f"CUDA cannot share memory here: {error}", file=sys.stderr)
        return None
    return [
        {"bytes": base64.b64encode(part).decode()} if isinstance(part, bytes) else part
        for part in parts
    ]


def _link(pool: torch.Tensor, exported: list[Any] | None) -> Link:
    """The best that there is between two processes: the peer's memory itself (CUDA IPC), else by
    way of the host, where a byte is copied off the device and on to it again."""
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
    blocks, size = _sizes(given.dry)
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
