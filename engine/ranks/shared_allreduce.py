"""The sum of tensors over the ranks of a CPU worker, with the same bits on every rank.

    SharedMemory   flags, a cache line for each rank | two rounds of one buffer for each rank

A tensor longer than a buffer is summed in several rounds. All ranks must make the same calls in the
same order. `engine/cpu/allreduce_numba.py` describes a round.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from baton.engine.cpu.allreduce_numba import TILE, exchange_bfloat16, exchange_float32
from baton.engine.cpu.decode_pass import RankRounds
from baton.engine.ranks.shared_memory import SharedMemory
from baton.runtime.errors import DeviceLost

BUFFER_BYTES = 1 << 20  # of one rank's buffer
START_S = 300.0  # while ranks compile their kernels
_FLAG_BYTES = 64
_LONGEST_CALL_S = 0.1  # of one wait in compiled code
_ITEM_BYTES = {torch.float32: 4, torch.bfloat16: 2}


def _no_check() -> None:
    return None


class SharedAllReduce:
    """The sum as one rank takes part in it. One thread at a time may call it."""

    def __init__(
        self,
        memory: SharedMemory,
        ranks: int,
        rank: int,
        *,
        timeout_s: float = START_S,
    ) -> None:
        """Map the buffers. `memory` has at least `memory_bytes(ranks)`. A call fails after waiting
        `timeout_s` for another rank."""
        self._ranks, self._rank = ranks, rank
        self._check: Callable[[], None] = _no_check
        self.timeout_s = timeout_s
        content = memory.array()
        flags, buffers = ranks * _FLAG_BYTES, 2 * ranks * BUFFER_BYTES
        self._flags = content[:flags].view(np.int64)
        room = content[flags : flags + buffers].reshape(2, ranks, BUFFER_BYTES)
        self._float32 = room.view(np.float32)
        self._bfloat16 = room.view(np.uint16)
        self._scratch = np.empty((2, TILE), dtype=np.float32)
        self.rounds = RankRounds(self._flags, self._bfloat16, rank, self._scratch)
        self._nothing = torch.zeros(0)
        self._sequence = 0
        self._lost = ""

    @staticmethod
    def memory_bytes(ranks: int) -> int:
        return ranks * (_FLAG_BYTES + 2 * BUFFER_BYTES)

    def __call__(self, x: Tensor) -> Tensor:
        """Replace `x`, contiguous float32 or bfloat16 of any shape, by its sum over all ranks, in
        the order of the ranks, and return it. Sums of bfloat16 are rounded once.

        Raises DeviceLost if another rank does not take part in time; the group is then unusable.
        """
        room = BUFFER_BYTES // _ITEM_BYTES[x.dtype]
        flat = x.view(-1)
        if flat.shape[0] <= room:
            self._round(flat)
            return x
        for start in range(0, flat.shape[0], room):
            self._round(flat[start : start + room])
        return x

    def watch(self, check: Callable[[], None]) -> None:
        """Call `check`, which may raise, repeatedly during a long wait."""
        self._check = check

    def meet(self) -> None:
        """Return once every rank has called this. Raises DeviceLost like a sum."""
        self._round(self._nothing)

    def take_rounds(self, count: int, run: Callable[[int], tuple[int, int]]) -> None:
        """Same as `RankSums.take_rounds`."""
        if self._lost:  # other layers would each wait as long
            raise DeviceLost(self._lost)
        first = self._sequence + 1
        self._sequence += count
        waited_s, before, before_s = 0.0, -1, 0.0
        while True:
            missing, done = run(first)
            if not missing:
                return
            now_s = time.monotonic()
            if done != before:
                waited_s, before = 0.0, done
            else:  # time in which this process was stopped does not count as waiting
                waited_s += min(now_s - before_s, _LONGEST_CALL_S)
            before_s = now_s
            self._check()
            if waited_s > self.timeout_s:
                self._lost = (
                    f"rank {missing - 1} did not take part in a sum over {self._ranks} ranks "
                    f"within {self.timeout_s:g} s"
                )
                raise DeviceLost(self._lost)

    def _round(self, part: Tensor) -> None:
        posted = False

        def run(sequence: int) -> tuple[int, int]:
            nonlocal posted
            missing, posted = self._exchange(part, sequence, posted), True
            return missing, 0

        self.take_rounds(1, run)

    def _exchange(self, part: Tensor, sequence: int, posted: bool) -> int:
        """Run one round. Returns 1 + the number of a missing rank; 0: `part` has the sum."""
        round_ = (self._rank, sequence, posted)
        if part.dtype == torch.float32:
            return int(exchange_float32(part.numpy(), self._flags, self._float32, *round_))
        bits = part.view(torch.uint16).numpy()
        return int(exchange_bfloat16(bits, self._flags, self._bfloat16, *round_, self._scratch))
