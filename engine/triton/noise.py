"""The noise of `sampling.noise` inside kernels, from the same integers, and the winner by it.

Functions for other kernels of this package, which launch nothing. They keep no state.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _lowbias32(x):  # type: ignore[no-untyped-def] # Triton infers types
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def stream_key(start, position):  # type: ignore[no-untyped-def] # Triton infers types
    """Return the two halves of `noise.stream_key`: one more round of SplitMix64."""
    state = start.to(tl.uint64, bitcast=True) ^ position.to(tl.uint64, bitcast=True)
    state += 0x9E3779B97F4A7C15
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    state = state ^ (state >> 31)
    return (state >> 32).to(tl.uint32), state.to(tl.uint32)


@triton.jit
def noise_bits(token, high, low):  # type: ignore[no-untyped-def] # Triton infers types
    """Return the 32 uniform bits of each token under the halves of a stream key."""
    return _lowbias32(_lowbias32(token.to(tl.uint32) ^ high) ^ low)


@triton.jit
def gumbel(bits):  # type: ignore[no-untyped-def] # Triton infers types
    return -tl.log(-tl.log((bits.to(tl.float64) + 0.5) * 2.3283064365386963e-10))  # 2**-32


@triton.jit
def may_reach(x, bits, mark):  # type: ignore[no-untyped-def] # Triton infers types
    """Return whether `x` with the noise of `bits` may be as much as `mark` float32. The noise is at
    most minus the log of 1 - u, as 1 - u is at most -log u; the slack covers float32's rounding."""
    rest = ((0xFFFFFFFF - bits).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    slack = 1e-3 + tl.abs(mark) * 2.4e-7
    return rest <= tl.exp(x - (mark - slack))


@triton.jit
def winner(  # type: ignore[no-untyped-def] # Triton infers types
    value_ptr,
    id_ptr,
    count,
    inverse,
    cutoff,
    best,
    best_token,
    high,
    low,
    LISTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the token of the highest sum of logit and noise. As on a CPU, a cheap bound on the
    noise excludes nearly all tokens before the exact noise is computed; `best`, of `best_token`, is
    the first value to exceed. LISTED: the tokens' ids are at `id_ptr`."""
    won = best_token
    mark = best.to(tl.float64) + gumbel(noise_bits(best_token, high, low))
    for first in range(0, count, BLOCK):
        index = first + tl.arange(0, BLOCK)
        held = index < count
        x = tl.load(value_ptr + index, mask=held, other=-float("inf")) * inverse
        token = tl.load(id_ptr + index, mask=held, other=0) if LISTED else index
        bits = noise_bits(token, high, low)
        rival = held & (x >= cutoff) & may_reach(x, bits, mark.to(tl.float32))
        if tl.max(rival.to(tl.int32), axis=0) > 0:
            total = tl.where(rival, x.to(tl.float64) + gumbel(bits), -float("inf"))
            highest = tl.max(total, axis=0)
            at = tl.min(tl.where(total == highest, token, 0x7FFFFFFF), axis=0)
            better = (highest > mark) | ((highest == mark) & (at < won))
            won = tl.where(better, at, won)
            mark = tl.where(better, highest, mark)
    return won
