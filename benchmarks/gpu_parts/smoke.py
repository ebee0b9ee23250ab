"""The first part of `benchmarks.gpu`: a launch, a capture and a READ, each once and in seconds.

Where one of them fails, this says which, before minutes are spent on the others.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from baton.engine.execution.graph_device import CudaDevice, HostDevice
from baton.engine.triton.checksum import block_checksums
from baton.kv_transfer.checksum import reference
from benchmarks.figures.report import Figure
from benchmarks.gpu_parts.speed import Given

BLOCKS, BLOCK_BYTES, SLABS = 4, 1 << 14, 2


def smoke(given: Given) -> Iterator[Figure]:
    """Seconds of each, its compilation and connection included. Raises RuntimeError where a
    result is wrong."""
    begun = time.perf_counter()
    pool = torch.randint(0, 256, (BLOCKS, BLOCK_BYTES), dtype=torch.uint8)
    there = pool.to(given.device)
    index = torch.arange(BLOCKS, device=given.device)
    sums = block_checksums(there, index, index, SLABS)
    wanted = torch.from_numpy(
        reference(pool.numpy(), range(BLOCKS), range(BLOCKS), SLABS).view("i8")
    )
    if not torch.equal(sums.cpu().view(torch.int64), wanted):
        raise RuntimeError("a kernel was launched, and its sums are wrong")
    yield Figure("smoke_launch_s", time.perf_counter() - begun, "s")
    begun = time.perf_counter()
    _capture(given.device)
    yield Figure("smoke_capture_s", time.perf_counter() - begun, "s")
    try:
        from benchmarks.gpu_parts.handoff import nixl_installed, read_all
    except ModuleNotFoundError as error:
        print(f"no READ: {error.name} is not installed")
        return
    if not nixl_installed():
        print("no READ: nixl is not installed")
        return
    begun = time.perf_counter()
    read_all(given.device, BLOCKS, BLOCK_BYTES)
    yield Figure("smoke_read_s", time.perf_counter() - begun, "s")


def _capture(device: torch.device) -> None:
    graphs = CudaDevice(device) if device.type == "cuda" else HostDevice()
    counter = torch.zeros(1, device=device)

    def count() -> None:
        counter.add_(1.0)

    replay = graphs.capture(count)
    counted = float(counter)
    for _ in range(3):
        replay()
    if float(counter) != counted + 3:
        raise RuntimeError(f"a graph was replayed three times and counted {float(counter)}")
