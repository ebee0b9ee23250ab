"""KV in eight bits: the meaning of a code, and the torch reference that encodes and decodes.

The key, or the value, of one token, KV head and layer is a row with a scale of its own. A row thus
never changes after it is written: not when its block fills, is cached or is transferred.

    scale = greatest magnitude / `largest`          number = code * scale

Values are immutable. The compiled kernels produce the same codes, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MIN_MAGNITUDE = 2.0**-100  # smaller rows become 0: 1 / scale overflows
SCALE_BYTES = 4  # float32


@dataclass(frozen=True, slots=True)
class KvQuant:
    """An eight-bit format of numbers; `dtype` is its torch dtype."""

    name: str
    dtype: torch.dtype
    largest: float  # of all codes

    def encode(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Encode `numbers` [..., dim] as codes of the same shape and float32 scales [...]. Codes
        are rounded to nearest, ties to even. The scale of a row with a non-finite number is NaN,
        so that its readers detect it."""
        wide = numbers.to(torch.float32)
        most = wide.abs().amax(dim=-1)
        finite, tiny = most.isfinite(), most < MIN_MAGNITUDE
        kept = torch.where(finite & ~tiny, most, 1.0)
        # torch divides a number by a tensor as number * reciprocal, which rounds twice.
        inverse = torch.tensor(self.largest, device=kept.device) / kept
        scaled = wide * inverse[..., None]
        scaled = torch.where((finite & ~tiny)[..., None], scaled, 0.0)
        if self.dtype == torch.int8:
            scaled = scaled.round()
        scales = torch.where(tiny, 0.0, most / self.largest)
        return scaled.to(self.dtype), torch.where(finite, scales, torch.nan)

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Return float32 numbers: `codes` [..., dim] times `scales` [...]."""
        return codes.to(torch.float32) * scales[..., None]


INT8 = KvQuant("int8", torch.int8, 127.0)
FP8_E4M3 = KvQuant("fp8_e4m3", torch.float8_e4m3fn, 448.0)
KV_QUANTS = {codes.name: codes for codes in (INT8, FP8_E4M3)}
