"""The lowest logit that top-k and top-p keep, inside kernels and without a sort.

A list of logits is a row, or what was collected of one. A token's share of the mass is an integer,
its weight in fixed point, so that a sum is the same in any order and for any number of programs.
Functions for other kernels of this package, which launch nothing. They keep no state.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LOWEST = tl.constexpr(-3.4028234663852886e38)  # of float32
_KEY_OF_MINUS_INFINITY = tl.constexpr(0x007FFFFF)
_LEAST_WEIGHT_LOG = tl.constexpr(-44.5)  # a weight below its exponential has no share


@triton.jit
def _ordered(x):  # type: ignore[no-untyped-def] # Triton infers types
    """Map float32 `x` to unsigned integers in the same order."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits ^ 0x80000000)


@triton.jit
def _from_ordered(key):  # type: ignore[no-untyped-def] # Triton infers types
    bits = tl.where(key >> 31 != 0, key ^ 0x80000000, key ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _below_kth(x, k):  # type: ignore[no-untyped-def] # Triton infers types
    """Return a number little below the `k`-th greatest of `x` float32 [n], n < 2^20, or equal to
    it: its sign, exponent and 7 bits more, found two bits at a time. Minus infinity if n < k."""
    key = _ordered(x) >> 16
    found = tl.zeros((), dtype=tl.uint32)
    step = tl.full((), 1 << 14, dtype=tl.uint32)
    for _ in range(8):
        one, two, three = found + step, found + 2 * step, found + 3 * step
        packed = (key >= one).to(tl.int64) + ((key >= two).to(tl.int64) << 20)
        counts = tl.sum(packed + ((key >= three).to(tl.int64) << 40), axis=0)
        found = tl.where((counts & 0xFFFFF) >= k, one, found)
        found = tl.where(((counts >> 20) & 0xFFFFF) >= k, two, found)
        found = tl.where((counts >> 40) >= k, three, found)
        step = step >> 2
    lowest = tl.full((), _KEY_OF_MINUS_INFINITY, dtype=tl.uint32)
    return _from_ordered(tl.maximum(found << 16, lowest))


@triton.jit
def least_listed(  # type: ignore[no-untyped-def] # Triton infers types
    peaks, best, top_k, top_p, NUCLEUS: tl.constexpr, WIDE_NUCLEUS: tl.constexpr
):
    """Return the lowest logit to list by top-k, or by top-p alone, from `peaks`, the highest of
    each group. For top-p alone it is a guess: WIDE_NUCLEUS where lower peaks have much mass."""
    lowest = _below_kth(peaks, tl.where(top_k > 0, top_k, NUCLEUS))
    if top_k == 0:
        weight = tl.exp(peaks - best)
        rest = tl.sum(tl.where(peaks < lowest, weight, 0.0), axis=0)
        if rest > 0.25 * (1.0 - top_p) * tl.sum(weight, axis=0):
            lowest = _below_kth(peaks, WIDE_NUCLEUS)
    return lowest


@triton.jit
def share(x, best, UNIT: tl.constexpr):  # type: ignore[no-untyped-def] # Triton infers types
    """Return the weight of each of `x` relative to the best, in units of which `UNIT` are 1."""
    return (tl.exp(x - best) * UNIT).to(tl.int64)


@triton.jit
def _mass_goal(top_p, total):  # type: ignore[no-untyped-def] # Triton infers types
    """Return the least mass that a kept set has, at least one unit: so the best tokens are always
    kept. `top_p` is float64."""
    goal = tl.ceil(top_p * total.to(tl.float64)).to(tl.int64)
    return tl.maximum(tl.minimum(goal, total), 1)


@triton.jit
def _lowest_in_nucleus(  # type: ignore[no-untyped-def] # Triton infers types
    best, top_p, total, vocab, UNIT: tl.constexpr
):
    """Return a number that no cut of top-p is below: tokens that each hold less than the excluded
    share of `total` divided by the vocabulary cannot hold that share together."""
    excluded = (1.0 - top_p) * total.to(tl.float64) / (UNIT * vocab.to(tl.float64))
    least = tl.log(tl.maximum(excluded.to(tl.float32), 1e-30)) - 0.01  # for rounding
    return best + tl.maximum(least, _LEAST_WEIGHT_LOG)


@triton.jit
def _mass_of(  # type: ignore[no-untyped-def] # Triton infers types
    value_ptr,
    count,
    inverse,
    best,
    cutoff,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the mass of the logits at `value_ptr`, times `inverse`, of at least `cutoff`."""
    lane = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.int64)
    for first in range(0, count, BLOCK):
        held = first + lane < count
        x = tl.load(value_ptr + first + lane, mask=held, other=-float("inf")) * inverse
        total += tl.where(held & (x >= cutoff), share(x, best, UNIT), 0)
    return tl.sum(total, axis=0)


@triton.jit
def _lowest_kept(  # type: ignore[no-untyped-def] # Triton infers types
    value_ptr,
    count,
    inverse,
    best,
    low,
    goal,
    MASS: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the greatest x for which the logits at `value_ptr`, times `inverse`, of at least x
    reach `goal` in number or in mass; x is at least `low`, and `best` the greatest of them.

    Each pass over the list divides the range that holds x into four. The logits that were in the
    range narrow it too, so few passes find a value that many tokens share.
    """
    lane = tl.arange(0, BLOCK)
    high = best
    while low < high:
        one = tl.minimum(low * 0.75 + high * 0.25, high)
        two = tl.minimum(low * 0.5 + high * 0.5, high)
        three = tl.minimum(low * 0.25 + high * 0.75, high)
        three = tl.where(three > low, three, high)  # the range shrinks, whatever rounding does
        sum_one = tl.zeros((BLOCK,), dtype=tl.int64)
        sum_two = tl.zeros((BLOCK,), dtype=tl.int64)
        sum_three = tl.zeros((BLOCK,), dtype=tl.int64)
        least = tl.full((BLOCK,), float("inf"), dtype=tl.float32)
        most = tl.full((BLOCK,), -float("inf"), dtype=tl.float32)
        for first in range(0, count, BLOCK):
            held = first + lane < count
            x = tl.load(value_ptr + first + lane, mask=held, other=-float("inf")) * inverse
            weight = tl.where(held, share(x, best, UNIT), 0) if MASS else held.to(tl.int64)
            sum_one += tl.where(x >= one, weight, 0)
            sum_two += tl.where(x >= two, weight, 0)
            sum_three += tl.where(x >= three, weight, 0)
            inside = held & (x >= low) & (x <= high)
            least = tl.minimum(least, tl.where(inside, x, float("inf")))
            most = tl.maximum(most, tl.where(inside, x, -float("inf")))
        lowest, highest = tl.min(least, axis=0), tl.max(most, axis=0)
        low = tl.where(lowest <= highest, tl.maximum(low, lowest), low)
        high = tl.minimum(high, highest)
        if low < high:
            total_one = tl.sum(sum_one, axis=0)
            total_two = tl.sum(sum_two, axis=0)
            total_three = tl.sum(sum_three, axis=0)
            low = tl.maximum(low, tl.where(total_one >= goal, one, low))
            low = tl.maximum(low, tl.where(total_two >= goal, two, low))
            low = tl.maximum(low, tl.where(total_three >= goal, three, low))
            high = tl.minimum(high, tl.where(total_three < goal, _before(three), high))
            high = tl.minimum(high, tl.where(total_two < goal, _before(two), high))
            high = tl.minimum(high, tl.where(total_one < goal, _before(one), high))
    return low


@triton.jit
def _before(x):  # type: ignore[no-untyped-def] # Triton infers types
    """Return the greatest float32 below `x`."""
    return _from_ordered(_ordered(x) - 1)


@triton.jit
def cutoff_of(  # type: ignore[no-untyped-def] # Triton infers types
    value_ptr,
    count,
    inverse,
    best,
    top_k,
    top_p,
    total,
    vocab,
    WHOLE: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the lowest logit that top-k (0: off) and then top-p (1: off) keep, and whether the
    list has enough. It is WHOLE, or has at least what top-k keeps, and for top-p alone may have too
    little of the row's mass, `total`."""
    cutoff = tl.full((), _LOWEST, dtype=tl.float32)
    enough = tl.full((), 1, dtype=tl.int1)
    if top_k > 0:
        goal = top_k.to(tl.int64)
        cutoff = _lowest_kept(value_ptr, count, inverse, best, cutoff, goal, False, UNIT, BLOCK)
    if top_p < 1.0:
        if (top_k > 0) | (not WHOLE):
            mass = _mass_of(value_ptr, count, inverse, best, cutoff, UNIT, BLOCK)
            total = tl.where(top_k > 0, mass, total)
            enough = mass >= _mass_goal(top_p, total)
        if enough:
            low = tl.maximum(cutoff, _lowest_in_nucleus(best, top_p, total, vocab, UNIT))
            goal = _mass_goal(top_p, total)
            cutoff = _lowest_kept(value_ptr, count, inverse, best, low, goal, True, UNIT, BLOCK)
    return cutoff, enough


@triton.jit
def cutoff_of_few(  # type: ignore[no-untyped-def] # Triton infers types
    value_ptr, count, inverse, best, top_k, top_p, UNIT: tl.constexpr, FEW: tl.constexpr
):
    """Return the lowest logit that top-k and then top-p keep, of a list of at most `FEW`: each is
    compared with every other. 1 or more is no top-p."""
    lane = tl.arange(0, FEW)
    held = lane < count
    x = tl.load(value_ptr + lane, mask=held, other=-float("inf")) * inverse
    above = x[None, :] > x[:, None]
    kept = held & (tl.sum(above.to(tl.int32), axis=1) < top_k)
    if top_p < 1.0:
        weight = tl.where(kept, share(x, best, UNIT), 0)
        mass_above = tl.sum(tl.where(above, weight[None, :], 0), axis=1)
        kept = kept & (mass_above < _mass_goal(top_p, tl.sum(weight, axis=0)))
    return tl.min(tl.where(kept, x, float("inf")), axis=0)
