"""The plan of a worker's memory: weights, then a share of the rest for the KV pool.

The plan keeps the terms of its arithmetic, so that the worker can log them. It knows no tensors;
values are immutable.
"""

from __future__ import annotations

from dataclasses import dataclass

_SEQUENCE_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Sizes in bytes. `fraction` 0: the number of blocks was given."""

    weights_bytes: int  # measured growth of the process
    free_bytes: int  # after loading
    fraction: float
    blocks: int
    block_bytes: int
    block_size: int  # tokens
    max_context: int  # tokens
    kv: str  # see `KvPool.kv_dtype`
    beside_bytes: int = 0  # GPU: buffers, graphs, activations

    @property
    def pool_bytes(self) -> int:
        return self.blocks * self.block_bytes

    @property
    def tokens(self) -> int:
        return self.blocks * self.block_size

    @property
    def sequence_tokens(self) -> int:
        """Return 4096, or the model's context if that is shorter."""
        return min(_SEQUENCE_TOKENS, self.max_context)

    @property
    def sequences(self) -> int:
        """Return how many sequences of `sequence_tokens` the pool holds without shared prefixes."""
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
    """Return a size with three significant digits: "1.75 MiB"."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1000:
            break
        value, unit = value / 1024, larger
    return f"{value:.3g} {unit}"
