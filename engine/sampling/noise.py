"""Counter-based noise: a number for (seed, choice, position, token), and no state at all.

The same on every device and in every batch slot, so a request that moves to another worker
draws the same tokens. Not cryptographically secure.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

_LOW32 = 0xFFFFFFFF
_LOW64 = 0xFFFFFFFFFFFFFFFF


def stream_key(seed: int, choice: int, position: int) -> tuple[int, int]:
    """Two 32-bit halves that name one draw. Chained SplitMix64 (Steele et al. 2014,
    doi 10.1145/2660193.2660195); any integers are taken modulo 2^64."""
    state = _splitmix64(stream_start(seed, choice) ^ (position & _LOW64))
    return state >> 32, state & _LOW32


@lru_cache(maxsize=4096)
def stream_start(seed: int, choice: int) -> int:
    """64 bits that the keys of all positions of one sequence start from."""
    return _splitmix64(_splitmix64(seed & _LOW64) ^ (choice & _LOW64))


def noise_bits(key: tuple[int, int] | tuple[Tensor, Tensor], tokens: Tensor) -> Tensor:
    """32 uniform bits, as int64, for each of `tokens` int64 [n], under a `stream_key`; or of a key
    for each, whose halves are tensors that `tokens` can be combined with.

    The finalizer is Wellons' lowbias32 (hash-prospector, public domain), applied twice with a
    half of the key before each. Exact in int64, so every device gives the same integers.
    """
    return _lowbias32(_lowbias32(tokens ^ key[0]) ^ key[1])


def gumbel(bits: Tensor) -> Tensor:
    """Standard Gumbel noise, float64, from `noise_bits`."""
    uniform = (bits.to(torch.float64) + 0.5) * 2.0**-32  # in (0, 1), ends excluded
    return -torch.log(-torch.log(uniform))


def gumbel_bound(bits: Tensor) -> Tensor:
    """No less than `gumbel` of the same bits, in float32 and half the logarithms: minus the
    log of 1 - u, as 1 - u is at most -log u. The slack covers float32's rounding."""
    rest = (_LOW32 - bits).to(torch.float32).add_(0.5)
    return rest.mul_(2.0**-32).log_().neg_().add_(1e-3)


def _splitmix64(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) & _LOW64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _LOW64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _LOW64
    return state ^ (state >> 31)


def _lowbias32(x: Tensor) -> Tensor:
    """Hash 32-bit values held in int64, and overwrite them; a product that wraps keeps its low
    32 bits."""
    x.bitwise_xor_(x >> 16).mul_(0x7FEB352D).bitwise_and_(_LOW32)
    x.bitwise_xor_(x >> 15).mul_(0x846CA68B).bitwise_and_(_LOW32)
    return x.bitwise_xor_(x >> 16)
