"""Draws tokens on a GPU without the host, by the rules of `sampling` and the noise of `noise`.

One program draws one row. Top-k, top-p and min-p are each a lowest logit to keep; the first two
are found bit by bit from counts and masses, so nothing is sorted. The noise has the same integers
as on a CPU, so a draw differs from the CPU's only if rounding decides a near tie. The first pass
over a row reads the bits of its grammar, if it has one, and writes `MASKED_LOGIT` over each barred
token, so that the passes after it read no bits. `adjust` has penalties, biases and logprobs. The
module keeps no state.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton.engine.sampling.draw_rules import DrawRules
from baton.engine.sampling.mask_words import MASKED_LOGIT, WORD_BITS, MaskWords

_BLOCK = 4096
_BARRED = tl.constexpr(MASKED_LOGIT)
_WORD_BITS = tl.constexpr(WORD_BITS)


def draw_tokens(
    logits: Tensor, rules: DrawRules, tokens: Tensor, finite: Tensor, masks: MaskWords | None = None
) -> None:
    """Write a token per row of `logits` float32 [rows, vocab], contiguous, into `tokens` int64
    [rows], and into `finite` (int, [rows]) whether the row's sum is finite; if it is not, the
    token is 0. Rows with a mask are masked in place. The tensors of `rules` may have wider
    dtypes."""
    rows, vocab = logits.shape
    if rows:
        block = min(_BLOCK, triton.next_power_of_2(vocab))
        _draw[(rows,)](
            logits,
            *rules.tensors(),
            tokens,
            finite,
            None if masks is None else masks.rows,
            None if masks is None else masks.words,
            0 if masks is None else masks.words.stride(0),
            vocab,
            MASKS=masks is not None,
            BLOCK=block,
            num_warps=max(1, min(16, block // 256)),
        )


@triton.jit
def _lowbias32(x):  # type: ignore[no-untyped-def] # Triton infers types
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _gumbel(bits):  # type: ignore[no-untyped-def] # Triton infers types
    return -tl.log(-tl.log((bits.to(tl.float64) + 0.5) * 2.3283064365386963e-10))  # 2**-32


@triton.jit
def _stream_key(start, position):  # type: ignore[no-untyped-def] # Triton infers types
    """Return the two halves of `noise.stream_key`: one more round of SplitMix64."""
    state = start.to(tl.uint64, bitcast=True) ^ position.to(tl.uint64, bitcast=True)
    state += 0x9E3779B97F4A7C15
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    state = state ^ (state >> 31)
    return (state >> 32).to(tl.uint32), state.to(tl.uint32)


@triton.jit
def _ordered(x):  # type: ignore[no-untyped-def] # Triton infers types
    """Map float32 `x` to unsigned integers in the same order."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits ^ 0x80000000)


@triton.jit
def _lowest_kept(  # type: ignore[no-untyped-def] # Triton infers types
    row_ptr, vocab, inverse, best, cutoff, goal, MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """Return the largest x for which the logits of at least x, and at least `cutoff`, reach `goal`
    in number or in mass. Each pass finds two bits of x, from the highest."""
    found = tl.zeros((), dtype=tl.uint32)
    step = tl.full((), 1 << 30, dtype=tl.uint32)
    for _ in range(16):
        one, two, three = found + step, found + 2 * step, found + 3 * step
        sum_one = tl.zeros((), dtype=tl.float64)
        sum_two = tl.zeros((), dtype=tl.float64)
        sum_three = tl.zeros((), dtype=tl.float64)
        for first in range(0, vocab, BLOCK):
            index = first + tl.arange(0, BLOCK)
            x = tl.load(row_ptr + index, mask=index < vocab, other=-float("inf")) * inverse
            key = _ordered(x)
            kept = (x >= cutoff) & (index < vocab)
            if MASS:
                weight = tl.where(kept, tl.exp(x - best), 0.0).to(tl.float64)
            else:
                weight = kept.to(tl.float64)
            sum_one += tl.sum(tl.where(key >= one, weight, 0.0), axis=0)
            sum_two += tl.sum(tl.where(key >= two, weight, 0.0), axis=0)
            sum_three += tl.sum(tl.where(key >= three, weight, 0.0), axis=0)
        found = tl.where(sum_one >= goal, one, found)
        found = tl.where(sum_two >= goal, two, found)
        found = tl.where(sum_three >= goal, three, found)
        step = step >> 2
    bits = tl.where(found >> 31 != 0, found ^ 0x80000000, found ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _mass(row_ptr, vocab, inverse, best, cutoff, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # Triton infers types
    total = tl.zeros((), dtype=tl.float64)
    for first in range(0, vocab, BLOCK):
        index = first + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + index, mask=index < vocab, other=-float("inf")) * inverse
        total += tl.sum(tl.where(x >= cutoff, tl.exp(x - best), 0.0).to(tl.float64), axis=0)
    return total


@triton.jit
def _winner(  # type: ignore[no-untyped-def] # Triton infers types
    row_ptr, vocab, inverse, cutoff, best, place, high, low, BLOCK: tl.constexpr
):
    """Return the index of the highest sum of logit and noise. As on a CPU, a cheap bound on the
    noise (minus the log of 1 - u, which is at most -log u) excludes nearly all tiles before the
    exact noise is computed; `best` at `place` is the first value to exceed."""
    winner = place
    mark = best.to(tl.float64) + _gumbel(_lowbias32(_lowbias32(place.to(tl.uint32) ^ high) ^ low))
    for first in range(0, vocab, BLOCK):
        index = first + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + index, mask=index < vocab, other=-float("inf")) * inverse
        bits = _lowbias32(_lowbias32(index.to(tl.uint32) ^ high) ^ low)
        rest = ((0xFFFFFFFF - bits).to(tl.float32) + 0.5) * 2.3283064365386963e-10
        rival = (x >= cutoff) & (x - tl.log(rest) + 1e-3 >= mark.to(tl.float32))
        rival = rival & (index < vocab)
        if tl.max(rival.to(tl.int32), axis=0) > 0:
            total = tl.where(rival, x.to(tl.float64) + _gumbel(bits), -float("inf"))
            highest = tl.max(total, axis=0)
            at = tl.min(tl.where(total == highest, index, vocab), axis=0)
            better = (highest > mark) | ((highest == mark) & (at < winner))
            winner = tl.where(better, at, winner)
            mark = tl.where(better, highest, mark)
    return winner


@triton.jit
def _masked(x, row_ptr, word_ptr, index, held):  # type: ignore[no-untyped-def] # Triton infers types
    """The logits `x` of the tokens `index` by their bits, which are written back where barred."""
    word = tl.load(word_ptr + index // _WORD_BITS, mask=held, other=0)
    barred = held & (((word >> (index % _WORD_BITS)) & 1) == 0)
    tl.store(row_ptr + index, _BARRED, mask=barred)
    return tl.where(barred, _BARRED, x)


@triton.jit
def _draw(  # type: ignore[no-untyped-def] # Triton infers types
    logit_ptr,
    inverse_ptr,
    top_k_ptr,
    top_p_ptr,
    log_min_p_ptr,
    start_ptr,
    position_ptr,
    token_ptr,
    finite_ptr,
    mask_row_ptr,
    word_ptr,
    words,
    vocab,
    MASKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    row_ptr = logit_ptr + row.to(tl.int64) * vocab
    if MASKS:
        mask = tl.load(mask_row_ptr + row)
        word_ptr += tl.maximum(mask, 0).to(tl.int64) * words
    total = tl.zeros((), dtype=tl.float32)
    highest = tl.full((), -float("inf"), dtype=tl.float32)
    place = tl.zeros((), dtype=tl.int32)
    for first in range(0, vocab, BLOCK):
        index = first + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + index, mask=index < vocab, other=0.0)
        total += tl.sum(x, axis=0)
        if MASKS:
            x = _masked(x, row_ptr, word_ptr, index, (index < vocab) & (mask >= 0))
        x = tl.where(index < vocab, x, -float("inf"))
        found = tl.max(x, axis=0)
        at = tl.min(tl.where(x == found, index, vocab), axis=0)
        place = tl.where(found > highest, at, place)
        highest = tl.where(found > highest, found, highest)
    if MASKS:
        tl.debug_barrier()  # the passes that follow read what was written
    finite = tl.abs(total) < float("inf")
    tl.store(finite_ptr + row, finite.to(finite_ptr.dtype.element_ty))
    inverse = tl.load(inverse_ptr + row).to(tl.float32)
    if finite & (inverse > 0):
        best = highest * inverse
        cutoff = tl.full((), -float("inf"), dtype=tl.float32)
        top_k = tl.load(top_k_ptr + row).to(tl.int32)
        if (top_k > 0) & (top_k < vocab):
            goal = top_k.to(tl.float64)
            cutoff = _lowest_kept(row_ptr, vocab, inverse, best, cutoff, goal, False, BLOCK)
        top_p = tl.load(top_p_ptr + row)
        if top_p < 1.0:
            goal = top_p * _mass(row_ptr, vocab, inverse, best, cutoff, BLOCK)
            lowest = _lowest_kept(row_ptr, vocab, inverse, best, cutoff, goal, True, BLOCK)
            # Every value, even NaN, reaches a share of 0, so the best tokens are always kept.
            cutoff = tl.maximum(cutoff, tl.where(goal > 0, tl.minimum(lowest, best), best))
        cutoff = tl.maximum(cutoff, best + tl.load(log_min_p_ptr + row).to(tl.float32))
        high, low = _stream_key(tl.load(start_ptr + row), tl.load(position_ptr + row))
        place = _winner(row_ptr, vocab, inverse, cutoff, best, place, high, low, BLOCK)
    tl.store(token_ptr + row, tl.where(finite, place, 0).to(tl.int64))
