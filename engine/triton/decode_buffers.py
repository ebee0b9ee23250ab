"""The buffers of split decode: made once, for every batch that will come.

Knows no pool and no kernel; a captured CUDA graph may hold on to its memory, which stays where
it is. Used by the device thread alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from baton.engine.triton.decode import Partials, Splits, choose_splits, fixed_splits
from baton.runtime.errors import ConfigError

_EMULATED_PROCESSORS = 2  # of triton's interpreter


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """What the buffers are made for. `split_tokens` 0: splits by count, which is fastest; else
    splits of that many tokens, so that a row's result does not depend on its batch."""

    rows: int
    longest: int  # tokens of a sequence
    split_tokens: int = 0


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """What a row's partial results look like, and how many programs a split of it takes."""

    programs: int
    heads: int
    dim: int
    tile_tokens: int


class DecodeBuffers:
    """Says how many splits a batch of rows has, and lends the memory for their results."""

    def __init__(self, limits: DecodeLimits, shape: DecodeShape, device: torch.device) -> None:
        """Raises ConfigError if the device has not so much memory."""
        self.limits = limits
        self._shape = shape
        self._processors = processors(device)
        cells = shape.heads * max(rows * self._capacity(rows) for rows in range(1, limits.rows + 1))
        try:
            self._mixed = torch.empty(cells * shape.dim, dtype=torch.float32, device=device)
            self._weights = torch.empty(cells, dtype=torch.float32, device=device)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"the partial results of {limits.rows} rows of {limits.longest} tokens need "
                f"{4 * cells * (shape.dim + 1)} bytes, which the device does not have; "
                "lower pool.memory_fraction, or the largest batch"
            ) from error

    def of(self, rows: int) -> tuple[Splits, Partials]:
        """For a step of `rows`, at most `limits.rows`. Splits depend on the number of rows alone,
        never on their lengths, which a captured step does not know."""
        shape = (rows, self._shape.heads, self._capacity(rows))
        cells = shape[0] * shape[1] * shape[2]
        mixed = self._mixed[: cells * self._shape.dim].view(*shape, self._shape.dim)
        return self._splits(rows), Partials(mixed, self._weights[:cells].view(shape))

    def _splits(self, rows: int) -> Splits:
        limits = self.limits
        given = (rows, self._shape.programs, limits.longest, self._processors)
        if limits.split_tokens:
            return fixed_splits(*given, limits.split_tokens)
        return choose_splits(*given)

    def _capacity(self, rows: int) -> int:
        """Partial results of a row and head; without splits the row's result is written at once."""
        splits = self._splits(rows)
        if splits.direct:
            return 0
        return splits.capacity(self.limits.longest, self._shape.tile_tokens)


def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    if device.type != "cuda":
        return _EMULATED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
