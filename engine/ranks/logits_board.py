"""The shared memory into which each rank of a CPU worker writes the logits of its tokens.

    [2 rounds, rows, vocabulary] float32 in shared memory; rank r writes columns `tokens` of it

Rounds alternate, so that the leader may read one while the next is written: a rank that has passed
the barrier of round n + 1 knows that the leader has read round n.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from baton.engine.ranks.shared_memory import SharedMemory

_ROUND_BYTES = 32 << 20


class LogitsBoard:
    """One rank's view of the logits of all ranks."""

    def __init__(self, memory: SharedMemory, vocab_size: int, meet: Callable[[], None]) -> None:
        """Map the board. `meet` is a barrier: it returns once every rank has called it."""
        self.rows = rows_at_once(vocab_size)
        numbers = memory.array()[: memory_bytes(vocab_size)].view(np.float32)
        self._rounds = torch.from_numpy(numbers.reshape(2, self.rows, vocab_size))
        self._meet = meet
        self._round = 0

    def put(self, logits: Tensor, tokens: range) -> None:
        """Publish float32 `logits` [rows, tokens], at most `self.rows` of them."""
        self._round += 1
        board = self._rounds[self._round % 2]
        board[: len(logits), tokens.start : tokens.stop] = logits
        self._meet()

    def take(self, rows: int) -> Tensor:
        """Return a copy of all ranks' logits [rows, vocab] of this rank's last round."""
        return self._rounds[self._round % 2, :rows].clone()


def rows_at_once(vocab_size: int) -> int:
    return max(1, _ROUND_BYTES // (4 * vocab_size))


def memory_bytes(vocab_size: int) -> int:
    return 2 * rows_at_once(vocab_size) * vocab_size * 4
