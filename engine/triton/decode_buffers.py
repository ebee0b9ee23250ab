"""The buffers of split decode, allocated once for all batches.

The memory never moves, so that captured CUDA graphs may refer to it. The module knows no pool and
no kernel; only the device thread uses it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from baton.engine.triton.decode import Partials, Splits, choose_splits, fixed_splits
from baton.runtime.errors import ConfigError

_EMULATED_PROCESSORS = 2  # of triton's interpreter


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """The limits that the buffers are allocated for. `split_tokens` 0: the number of splits is
    chosen for speed; else splits of that many tokens, so that a row's result does not depend on
    its batch."""

    rows: int
    longest: int  # tokens of a sequence
    split_tokens: int = 0


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """The shape of a row's partial results, and the number of programs per split."""

    programs: int
    heads: int
    dim: int
    tile_tokens: int


class DecodeBuffers:
    """The splits of a batch of rows, and the memory for their partial results."""

    def __init__(self, limits: DecodeLimits, shape: DecodeShape, device: torch.device) -> None:
        """Allocate the buffers. Raises ConfigError if the device lacks the memory."""
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
                "lower pool.memory_fraction or step.max_sequences"
            ) from error

    def of(self, rows: int) -> tuple[Splits, Partials]:
        """Return splits and buffers for a step of at most `limits.rows`. They depend only on the
        number of rows, since a captured step does not know the lengths."""
        shape = (rows, self._shape.heads, self._capacity(rows))
        cells = shape[0] * shape[1] * shape[2]
        mixed = self._mixed[: cells * self._shape.dim].view(*shape, self._shape.dim)
        return self._splits(rows), Partials(mixed, self._weights[:cells].view(shape))

    def fill(self, rows: int) -> bool:
        """Return whether programs for one split of each row fill the device. With splits of a
        fixed length it is always True, because tiles that follow from it change a row's bits."""
        programs = rows * self._shape.programs
        return bool(self.limits.split_tokens) or programs >= self._processors

    def _splits(self, rows: int) -> Splits:
        limits = self.limits
        given = (rows, self._shape.programs, limits.longest, self._processors)
        if limits.split_tokens:
            return fixed_splits(*given, limits.split_tokens)
        return choose_splits(*given)

    def _capacity(self, rows: int) -> int:
        """Return the partial results per row and head; 0: the result is written directly."""
        splits = self._splits(rows)
        if splits.direct:
            return 0
        return splits.capacity(self.limits.longest, self._shape.tile_tokens)


def processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU."""
    if device.type != "cuda":
        return _EMULATED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
