"""What a worker's memory goes to: weights, then a share of what is left for the KV pool.

The arithmetic is kept, so that it can be shown to whoever wonders where memory went. Knows no
tensors; values are immutable.
"""

from __future__ import annotations

from dataclasses import dataclass

_SEQUENCE_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Sizes in bytes. `fraction` 0: the number of blocks was given."""

    weights_bytes: int  # measured: how much the process grew by loading them
    free_bytes: int  # after loading
    fraction: float
    blocks: int
    block_bytes: int
    block_size: int  # tokens
    max_context: int  # tokens
    kv: str  # what a block holds: see `KvPool.kind`
    beside_bytes: int = 0  # of a GPU: decode buffers, graphs, a step's numbers; not in the pool

    @property
    def pool_bytes(self) -> int:
        return self.blocks * self.block_bytes

    @property
    def tokens(self) -> int:
        return self.blocks * self.block_size

    @property
    def sequence_tokens(self) -> int:
        """4096, or what the model has of context, if less."""
        return min(_SEQUENCE_TOKENS, self.max_context)

    @property
    def sequences(self) -> int:
        """Of `sequence_tokens` each, that the pool holds at once without a shared prefix."""
        return self.blocks // -(-self.sequence_tokens // self.block_size)

    def line(self) -> str:
        share = f" x {self.fraction:g}" if self.fraction else ", blocks as set"
        free = _size(self.free_bytes)
        if self.beside_bytes:
            free = f"({free} - {_size(self.beside_bytes)} of buffers, graphs and a step)"
        return (
            f"weights {_size(self.weights_bytes)}; free {free}{share}: "
            f"pool {_size(self.pool_bytes)} ({self.kv}) = {self.blocks:,} blocks of "
            f"{_size(self.block_bytes)} = {self.tokens:,} tokens = {self.sequences:,} sequences "
            f"of {self.sequence_tokens:,}"
        )


def _size(count: int) -> str:
    """With three digits that matter: "1.75 MiB"."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1000:
            break
        value, unit = value / 1024, larger
    return f"{value:.3g} {unit}"
