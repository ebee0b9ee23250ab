"""One worker as placement sees it: what it is, how loaded it is, and what that costs a request.

The costs here do not depend on the request, so workers can be kept in their order (roster.py).
They are whole tenths of a prompt token's computation: equal costs are equal.
"""

from __future__ import annotations

from dataclasses import dataclass

SEQUENCE_COST = 80  # one sequence more in the batch slows every step
ROOM_COST = 40  # a token without room waits for another request's end

# Model fingerprint and kind of KV: what workers have in common that compute the same tokens.
Numbers = tuple[str, str]
Shape = tuple[str, str, int]  # those, and the tokens in a block


@dataclass(frozen=True, slots=True)
class Size:
    """What a decode worker can take at most, in tokens of a block, blocks, and tokens. The
    defaults are those of one that has never said: anything."""

    block_size: int = 1
    total_blocks: int = 1 << 31
    max_context: int = 1 << 24


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker, as the router sees it now. `shape` is what two pools must share for a
    handoff: fingerprint, dtype, block size. `placed_tokens` were sent there since its last
    load report, `placed_requests` likewise. `line`: the requests that wait there (see Pace).
    `bit` is the worker's in the radix index, 0 where that knows nothing of it."""

    worker_id: str
    boot_id: bytes
    role: str
    address: str
    shape: Shape
    max_context: int = 1 << 24  # tokens of prompt and output
    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    promised_blocks: int = 0
    queued_tokens: int = 0
    placed_tokens: int = 0
    placed_requests: int = 0
    draining: bool = False  # takes nothing new, for whatever reason
    line: tuple[float, float] | None = None
    bit: int = 0
    degraded: frozenset[bytes] = (
        frozenset()
    )  # boot ids of peers that this decode worker reads slowly

    @property
    def block_size(self) -> int:
        return self.shape[2]

    @property
    def numbers(self) -> Numbers:
        return self.shape[:2]

    @property
    def size(self) -> Size:
        return Size(self.block_size, self.total_blocks, self.max_context)

    @property
    def queued_requests(self) -> int:
        return self.waiting + self.placed_requests

    @property
    def room_tokens(self) -> int:
        """Room for tokens of KV; negative where more is promised than there is."""
        return (self.free_blocks - self.promised_blocks) * self.block_size - self.placed_tokens

    @property
    def batch_cost(self) -> int:
        """Of a request on this decode worker, where it has room."""
        return (self.running + self.queued_requests) * SEQUENCE_COST

    @property
    def full_cost(self) -> int:
        """Of a request on this decode worker, where it has none, less `ROOM_COST` for each of the
        request's tokens."""
        return self.batch_cost - self.room_tokens * ROOM_COST

    @property
    def queue_tokens(self) -> int:
        """That are computed before a new prompt on this prefill worker."""
        return self.queued_tokens + self.placed_tokens
