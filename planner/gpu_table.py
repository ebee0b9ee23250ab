"""GPUs and their public data: memory, memory bandwidth, arithmetic in bf16.

`memory_gib` is what a process can address (as torch reports it: less than the data sheet's name,
since firmware and ECC take a part). Bandwidth and arithmetic are those of the vendor's data sheets,
dense and with float32 accumulation. Pure.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from baton.runtime.errors import ConfigError

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as its vendor describes it."""

    name: str
    memory_gib: float
    memory_bytes_per_s: float
    flops_per_s: float  # bf16

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * GIB)


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("b200", 178.3, 8.0e12, 2250e12),
        Gpu("h200", 139.8, 4.8e12, 989e12),
        Gpu("h100", 79.1, 3.35e12, 989e12),  # SXM
        Gpu("h100-nvl", 93.0, 3.9e12, 835e12),
        Gpu("h100-pcie", 79.1, 2.0e12, 756e12),
        Gpu("h20", 95.0, 4.0e12, 148e12),
        Gpu("a100-80gb", 79.2, 2.04e12, 312e12),  # SXM
        Gpu("a100-40gb", 39.4, 1.555e12, 312e12),  # SXM
        Gpu("l40s", 44.4, 0.864e12, 362e12),
        Gpu("l4", 22.0, 0.3e12, 121e12),
        Gpu("a10g", 22.0, 0.6e12, 70e12),
        Gpu("rtx-4090", 23.6, 1.008e12, 165e12),
    )
}


def find_gpu(name: str) -> Gpu:
    """Return the GPU of that name, in any case. Raises ConfigError, which lists the names."""
    gpu = GPUS.get(name.lower())
    if gpu is None:
        near = difflib.get_close_matches(name.lower(), GPUS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"--gpu {name!r} is not known: {hint}known are {', '.join(GPUS)}")
    return gpu
