"""KV in eight bits: what a code means, and the plain torch that makes and reads codes.

One token's key, or value, of one KV head in one layer is a row of numbers with a scale of its
own, so that a row never changes once it is written: not when its block fills, is cached or moves.

    scale = greatest magnitude / `largest`          number = code * scale

Immutable; knows no pool. The compiled kernels give the same codes, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LEAST = 2.0**-100  # a row without a greater magnitude is taken for zeros: its inverse overflows
SCALE_BYTES = 4  # float32


@dataclass(frozen=True, slots=True)
class KvCodes:
    """One way to write numbers in a byte; `dtype` is torch's name for it."""

    name: str
    dtype: torch.dtype
    largest: float  # of all codes

    def encode(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """`numbers` [..., dim] to codes of the same shape and scales float32 [...]. Codes are
        the nearest ones, ties to even. A row with a number that is not finite gets NaN for its
        scale, so that whoever reads it sees that."""
        wide = numbers.to(torch.float32)
        most = wide.abs().amax(dim=-1)
        finite, tiny = most.isfinite(), most < LEAST
        kept = torch.where(finite & ~tiny, most, 1.0)
        # A number over a tensor would be its reciprocal times the number: rounded twice.
        inverse = torch.tensor(self.largest, device=kept.device) / kept
        scaled = wide * inverse[..., None]
        scaled = torch.where((finite & ~tiny)[..., None], scaled, 0.0)
        if self.dtype == torch.int8:
            scaled = scaled.round()
        scales = torch.where(tiny, 0.0, most / self.largest)
        return scaled.to(self.dtype), torch.where(finite, scales, torch.nan)

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Float32 numbers: `codes` [..., dim] times `scales` [...]."""
        return codes.to(torch.float32) * scales[..., None]


INT8 = KvCodes("int8", torch.int8, 127.0)
FP8_E4M3 = KvCodes("fp8_e4m3", torch.float8_e4m3fn, 448.0)
CODES = {codes.name: codes for codes in (INT8, FP8_E4M3)}
