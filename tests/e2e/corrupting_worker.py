"""A worker whose mover spoils some of the blocks that it reads: `baton worker`, corrupted.

With checksums on it must change nothing; with `unverified` as its first argument it must change
tokens, or the end-to-end comparison would prove nothing.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from baton.deploy.cli.main import main
from baton.deploy.processes import worker_process
from baton.kv_transfer.checksum_numba import checksums
from baton.kv_transfer.local_pool import HostPool
from baton.kv_transfer.nixl_mover import NixlMover, NixlRead
from baton.runtime.config import Config


class CorruptingMover(NixlMover):
    """Spoils the first block of every tenth READ, the very first included, once it has landed."""

    def __init__(self, pool: HostPool, boot_id: bytes, *limits: int) -> None:
        super().__init__(pool, boot_id, *limits)
        self._bytes = pool.array
        self._reads = 0

    def read(
        self,
        boot_id: bytes,
        remote: Sequence[int],
        local: Sequence[int],
        seeds: Sequence[int] | None = None,
    ) -> NixlRead:
        self._reads += 1
        if self._reads % 10 != 1:
            return super().read(boot_id, remote, local, seeds)
        read = super().read(boot_id, remote, local)
        if seeds is not None:
            read.checksums = asyncio.get_running_loop().create_future()
        read.landed.add_done_callback(lambda _: self._spoil(read, local, seeds or ()))
        return read

    def _spoil(self, read: NixlRead, local: Sequence[int], seeds: Sequence[int]) -> None:
        """What landed is not what was offered: the sums are those of the spoiled bytes."""
        if read.landed.exception() is not None:
            return  # the blocks may be another's by now
        self._bytes[local[0]].view("float32")[:] *= -3.0
        if read.checksums is not None:
            read.checksums.set_result(checksums(self._bytes, local, seeds, self.slabs))


def run_unverified(config: Config, **rest: Any) -> None:
    run_worker(replace(config, handoff=replace(config.handoff, verify=False)), **rest)


worker_process.NixlMover = CorruptingMover
run_worker = worker_process.run_worker
if sys.argv[1] == "unverified":
    del sys.argv[1]
    worker_process.run_worker = run_unverified
sys.exit(main())
