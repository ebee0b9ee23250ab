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
from importlib.util import find_spec
from statistics import median
from typing import Any

import numpy as np
import torch

from baton.engine.triton_checksum import block_checksums
from benchmarks.gpu_models import seconds_of
from benchmarks.gpu_speed import Given, Skipped
from benchmarks.report import Figure, at_least, at_most

BLOCK_BYTES = 2 << 20  # of an 8B model: 16 tokens of 128 KiB
SLABS = 8
TARGET_GBPS = 1500.0


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


def grant(device: str, dry: bool) -> None:
    """The child process."""
    blocks, size = _sizes(dry)
    pool = torch.empty(blocks * size, dtype=torch.uint8, device=device)
    pool.copy_(torch.arange(blocks, device=device).to(torch.uint8).repeat_interleave(size))
    agent = _agent("granter")
    agent.register_memory(pool)
    if device != "cpu":
        torch.cuda.synchronize()
    metadata = base64.b64encode(agent.get_agent_metadata()).decode()
    print(json.dumps({"metadata": metadata, "address": pool.data_ptr()}), flush=True)
    os.set_blocking(sys.stdin.fileno(), False)
    while sys.stdin.buffer.read(1) != b"":  # None while it is open
        agent.get_new_notifs()
        time.sleep(0.0005)


def handoff(given: Given) -> list[Figure]:
    """READs of all blocks of a pool into another, payload over time from post to done."""
    if find_spec("nixl") is None and find_spec("nixl_cu13") is None:
        raise Skipped("nixl is not installed")
    # UCX serves a GET between devices' memory over TCP where it sees no NVLink, unless told.
    environment = os.environ | {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on"}
    os.environ["UCX_CUDA_IPC_ENABLE_GET_ZCOPY"] = "on"
    command = [sys.executable, "-m", "benchmarks.gpu_handoff", given.device.type]
    command += ["dry"] if given.dry else []
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as child:
        try:
            return _read(given, json.loads(_line(child)))
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


def _read(given: Given, theirs: dict[str, Any]) -> list[Figure]:
    blocks, size = _sizes(given.dry)
    memory = "DRAM" if given.device.type == "cpu" else "VRAM"
    pool = torch.zeros(blocks * size, dtype=torch.uint8, device=given.device)
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
    times = []
    for _ in range(3 if given.dry else 12):
        begun = time.perf_counter()
        state = agent.transfer(transfer)
        while state == "PROC":
            state = agent.check_xfer_state(transfer)
        if state != "DONE":
            raise RuntimeError(f"the READ ended as {state}")
        times.append(time.perf_counter() - begun)
    wanted = torch.arange(blocks, device=given.device).to(torch.uint8)
    if not bool((pool.view(blocks, size) == wanted[:, None]).all()):
        raise RuntimeError("a READ is done, and its bytes are not those of the granter")
    agent.release_xfer_handle(transfer)
    rate = blocks * size / median(times[1:]) / 1e9  # the first one sets the connection up
    return [at_least("handoff_read_gbps", rate, TARGET_GBPS, "GB/s")]


def checksum(given: Given) -> list[Figure]:
    """What sums of all blocks cost, against their transfer: as measured, else at its target."""
    blocks, size = _sizes(given.dry)
    pool = torch.empty((blocks, size), dtype=torch.uint8, device=given.device).random_(0, 256)
    index = torch.arange(blocks, device=given.device)
    seeds = torch.randint(-(1 << 62), 1 << 62, (blocks,), device=given.device)
    seconds = seconds_of(lambda: block_checksums(pool, index, seeds, SLABS), given.device)
    rate = given.ceilings.get("handoff_read_gbps", TARGET_GBPS)
    share = seconds / (blocks * size / rate / 1e9)
    return [
        Figure("checksum_gbps", blocks * size / seconds / 1e9, "GB/s"),
        at_most("checksum_share_of_transfer", share, 0.02),
    ]


if __name__ == "__main__":
    grant(sys.argv[1], "dry" in sys.argv)
