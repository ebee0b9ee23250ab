"""Measure the ceilings of this machine: its matrix rate and the speed of reading memory.

Measured beside what is judged by them, with as many threads as it has. Knows no engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as functional

from baton.engine.memory.huge_pages import zeros

_READ_BYTES = 512 << 20  # many times the last cache
NO_UNIT = "no bf16 instruction: in float32"
_SHAPES = ((1024, 4096, 1024), (2048, 2048, 2048))  # rows, outputs, inputs


class Ceilings:
    """Holds the operands, so that a measurement allocates nothing but a product."""

    def __init__(self) -> None:
        self.words = zeros((_READ_BYTES // 8,), torch.int64).fill_(1)
        # torch multiplies bf16 numbers one by one where the processor has nothing for them:
        # what it can do there is what it does in float32
        kind = torch.bfloat16 if matrix_unit() != NO_UNIT else torch.float32
        self.operands = [
            (_random(rows, inputs, kind), _random(outputs, inputs, kind))
            for rows, outputs, inputs in _SHAPES
        ]

    def linear_flops(self) -> float:
        """Operations a second of torch's linear, the faster of two shapes: in bf16, or in float32
        where no instruction is for bf16."""
        return max(self._linear(x, weight) for x, weight in self.operands)

    def read_bytes_s(self) -> float:
        """Bytes a second of summing a buffer in huge pages that is in no cache."""
        return self.words.nbytes / seconds(lambda: self.words.sum())

    def _linear(self, x: torch.Tensor, weight: torch.Tensor) -> float:
        return 2.0 * x.shape[0] * weight.numel() / seconds(lambda: functional.linear(x, weight))


def seconds(call: Callable[[], object]) -> float:
    """The faster of two calls: a ceiling is not to be lowered by a neighbour's moment."""
    times = []
    for _ in range(2):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def matrix_unit() -> str:
    """Name the instructions that multiply bf16 on this CPU."""
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return "unknown"  # not Linux
    if "amx_bf16" in flags:
        return "AMX"
    return "AVX-512 bf16, no AMX" if "avx512_bf16" in flags else NO_UNIT


def _random(rows: int, columns: int, kind: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, columns).to(kind)
