"""The leader's control of ranks on devices of their own.

Its commands may be ahead of the ranks, whose devices work on their own. So a rank counts what it
has read, and `send` waits before it writes over a command that some rank has not read.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from enum import IntEnum
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baton.engine.device_ranks.collectives import Collectives
from baton.engine.device_ranks.device_command import DeviceCommand
from baton.engine.ranks.rank_group import LOAD_S, RankGroup
from baton.engine.ranks.rank_message import SLOTS
from baton.engine.ranks.rank_options import RankOptions
from baton.engine.ranks.shared_memory import SharedMemory
from baton.runtime.errors import DeviceLost

COUNTER_BYTES = 4096
_READ_S = 60.0  # a rank reads a command after those before; each queues work and returns
_PAUSE_S = 0.0001


class DeviceRankGroup(RankGroup):
    """Ranks 1 and up of a worker on devices. One thread at a time may call it."""

    module = "baton.engine.device_ranks.device_rank_process"

    def __init__(
        self,
        options: RankOptions,
        memories: Sequence[SharedMemory],
        meeting: TemporaryDirectory[str],
    ) -> None:
        """Start the processes. `memories`: for the counters, and for commands. `meeting` has the
        file by which the ranks find each other, which NCCL's threads read as long as they run."""
        self._meeting = meeting
        self._sent = 0
        self.joined: Collectives | None = None  # the leader's end of the ranks' group
        self.closed = threading.Event()
        self._reads = counters(memories[0], options.ranks)
        self._compiling = compiling_flags(memories[0], options.ranks)
        super().__init__(options, memories)

    def send(self, command: IntEnum, arrays: Sequence[NDArray[Any]] = ()) -> None:
        """Same as `RankGroup.send`. Raises DeviceLost if a rank does not read its commands."""
        deadline_s = time.monotonic() + _READ_S
        while self._sent - int(self._reads[1:].min()) >= SLOTS:
            self.check()
            if time.monotonic() > deadline_s:
                raise DeviceLost(f"a rank has read no command for {_READ_S:g} s")
            time.sleep(_PAUSE_S)  # a rank counts in shared memory, which wakes no thread
        super().send(command, arrays)
        self._sent += 1

    def behind(self) -> dict[int, int]:
        """Return how many commands each rank has read that has others to read and compiles no
        kernel: its first use of one may take longer than the leader's."""
        return ranks_behind(self._reads, self._compiling, self._sent)

    def give_pools(
        self, options: RankOptions, handles: Sequence[tuple[str, Sequence[int]]]
    ) -> None:
        """Send each rank from 1 on the memory of its pool (see `SharedTensor.handle`), after the
        command that announces it, and wait until all ranks have built upon it. Raises like
        `wait_loaded`."""
        for rank, (link, (text, descriptors)) in enumerate(
            zip(self._links, handles, strict=True), start=1
        ):
            link.send(replace(options, rank=rank).text().encode())
            socket.send_fds(link, [text.encode()], list(descriptors))
        self._answers(LOAD_S)

    def release(self) -> None:
        """Have all ranks free their pools, and what they have built upon them."""
        self.send(DeviceCommand.RELEASE)
        self._answers(LOAD_S)

    def close(self) -> None:
        """Same as `RankGroup.close`; the leader leaves the group too."""
        self.closed.set()
        super().close()
        if self.joined is not None:
            self.joined.close()
            self.joined = None
        self._meeting.cleanup()


def counters(memory: SharedMemory, ranks: int) -> NDArray[np.int64]:
    """Return, for each rank, how many commands it has read. A rank writes its own number alone."""
    return memory.array()[: 8 * ranks].view(np.int64)


def compiling_flags(memory: SharedMemory, ranks: int) -> NDArray[np.int64]:
    """Return, for each rank, whether it compiles a kernel. A rank writes its own flag alone."""
    return memory.array()[8 * ranks : 16 * ranks].view(np.int64)


def ranks_behind(
    reads: NDArray[np.int64], compiling: NDArray[np.int64], sent: int
) -> dict[int, int]:
    """Return how many of the `sent` commands each rank from 1 on has read, if not all, and if it
    compiles no kernel."""
    found = zip(reads[1:].tolist(), compiling[1:].tolist(), strict=True)
    return {
        rank: read for rank, (read, busy) in enumerate(found, start=1) if read < sent and not busy
    }
