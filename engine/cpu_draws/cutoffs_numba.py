"""The lowest logit that top-k, top-p and min-p keep, compiled: without a sort. Needs numba.

    a row:  best ─▶ top-k ─▶ top-p ─▶ min-p
                    each a lowest logit to keep, by histograms of the logits' bits

Called by compiled functions alone. Keeps no state.
"""

from __future__ import annotations

import numpy as np

from baton.engine.cpu.compiled import inner
from baton.engine.cpu_draws.admitted_numba import BLOCK, scale_part

_DIGITS = (21, 10, 0)  # shifts of the digits of a key: 11, 11 and 10 bits
BINS = 2048  # of one histogram


@inner
def _to_keys(bits):  # type: ignore[no-untyped-def] # numba infers types
    """Signed integers in the order of the float32 whose `bits` they replace; its own inverse."""
    for i in range(len(bits)):
        bits[i] ^= (bits[i] >> np.int32(31)) & np.int32(0x7FFFFFFF)


@inner
def _exponentials(x, best, out, powers):  # type: ignore[no-untyped-def] # numba infers types
    """exp(x - best) in float32, x at most `best`; Cephes' polynomial. `powers` int32 is room."""
    for i in range(len(x)):
        t = x[i] - best
        low = t < np.float32(-87.0)
        t = np.float32(0.0) if low else t
        n = np.int32(t * np.float32(1.44269504) - np.float32(0.5))  # truncates: t is at most 0
        f = np.float32(n)
        r = t - f * np.float32(0.693359375)
        r = r - f * np.float32(-2.12194440e-4)
        p = np.float32(1.9875691500e-4)
        p = p * r + np.float32(1.3981999507e-3)
        p = p * r + np.float32(8.3334519073e-3)
        p = p * r + np.float32(4.1665795894e-2)
        p = p * r + np.float32(1.6666665459e-1)
        p = p * r + np.float32(5.0000001201e-1)
        p = p * (r * r) + r + np.float32(1.0)
        out[i] = np.float32(0.0) if low else p
        powers[i] = (n + np.int32(127)) << np.int32(23)
    factors = powers.view(np.float32)
    for i in range(len(x)):
        out[i] *= factors[i]


@inner
def _select(keys, weights, count, goal, by_mass, sums):  # type: ignore[no-untyped-def] # numba infers types
    """The greatest key for which the `count` keys of it and more are `goal` in number or, with
    `weights`, in mass; the lowest one if rounding leaves too little. Both arrays are overwritten.
    `sums` float64 [BINS] is room."""
    above, prefix = 0.0, np.int64(0)
    for level in range(3):
        shift = _DIGITS[level]
        top = (BINS if shift else BINS // 2) - 1
        sums[:] = 0.0
        lowest = np.int64(BINS)
        for i in range(count):
            digit = ((np.int64(keys[i]) + 2147483648) >> shift) & top
            sums[digit] += np.float64(weights[i]) if by_mass else 1.0
            lowest = min(lowest, digit)
        at = top
        while at > lowest and (sums[at] == 0.0 or above + sums[at] < goal):
            above += sums[at]
            at -= 1
        prefix |= np.int64(at) << shift
        if shift == 0:
            break
        found = 0
        for i in range(count):
            digit = ((np.int64(keys[i]) + 2147483648) >> shift) & top
            if digit == at:
                keys[found] = keys[i]
                if by_mass:
                    weights[found] = weights[i]
                found += 1
        count = found
    return np.int32(prefix - 2147483648)


@inner
def _collect(x, mask, inverse, best, cutoff, by_mass, keys, weights, room, powers):  # type: ignore[no-untyped-def] # numba infers types
    """Keys, and with `by_mass` weights, of the scaled logits of `cutoff` and more; how many."""
    found = 0
    for first in range(0, len(x), BLOCK):
        part = x[first : first + BLOCK]
        size = len(part)
        scaled = room[:size]
        scale_part(part, mask, first, inverse, scaled)
        dense = weights[found : found + size]
        if by_mass:
            _exponentials(scaled, best, dense, powers[:size])
        key = scaled.view(np.int32)
        if cutoff == -np.inf:
            to = keys[found : found + size]
            for i in range(size):
                to[i] = key[i]
            found += size
        else:
            for i in range(size):
                if scaled[i] >= cutoff:
                    keys[found] = key[i]
                    if by_mass:
                        weights[found] = dense[i]
                    found += 1
    _to_keys(keys[:found])
    return found


@inner
def _from_key(key, room):  # type: ignore[no-untyped-def] # numba infers types
    bits = room.view(np.int32)
    bits[0] = key
    _to_keys(bits[:1])
    return room[0]


@inner
def lowest_kept(  # type: ignore[no-untyped-def] # numba infers types
    x, mask, inverse, best, top_k, top_p, log_min_p, keys, weights, room, powers, sums
):
    """The lowest scaled logit to keep. The last five are room: keys int32 and weights float32
    [vocab], the others of `BLOCK` and of `BINS` numbers."""
    cutoff = np.float32(-np.inf)
    if 0 < top_k < len(x):
        count = _collect(x, mask, inverse, best, cutoff, False, keys, weights, room, powers)
        key = _select(keys, weights, count, float(top_k), False, sums)
        cutoff = _from_key(key, room)
    if top_p < 1.0:
        count = _collect(x, mask, inverse, best, cutoff, True, keys, weights, room, powers)
        goal = 0.0
        for i in range(count):
            goal += np.float64(weights[i])
        key = _select(keys, weights, count, goal * top_p, True, sums)
        cutoff = max(cutoff, _from_key(key, room))
    return max(cutoff, best + log_min_p)
