"""Random draws of a CPU, compiled: cut-offs without a sort, noise without logarithms. Needs numba.

    a row:  best ─▶ top-k ─▶ top-p ─▶ min-p ─▶ the highest sum of logit and noise
                    each a lowest logit to keep, by histograms of the logits' bits

A row costs a few passes over the vocabulary whatever its rules and its distribution are, and
pays for its own rules alone. One thread draws a row, each operation as written, so a draw depends
neither on the batch nor on its slot, nor on the processor's vectors. Keeps no state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numba
import numpy as np
import torch
from numba import prange
from numpy.typing import NDArray
from torch import Tensor

from baton.engine.cpu.compiled import compiled, inner, take_threads
from baton.engine.sampling.draw_plan import Sampler, sample_on_host
from baton.engine.sampling.draw_rules import DrawRules
from baton.engine.sampling.grammar_masks import masks_of
from baton.engine.scheduling.batch import Draw

_BLOCK = 2048  # numbers of one pass that stay in the first cache
_DIGITS = (21, 10, 0)  # shifts of the digits of a key: 11, 11 and 10 bits
_BINS = 2048
_LN2 = np.float32(math.log(2.0))
_SLACK = np.float32(1e-3)  # covers float32's rounding in the bound of the noise


def compiled_draw(logits: Tensor, best: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Same as `sampling.torch_draw`, up to rounding."""
    return draw_and_cut(logits, best, draws)[0]


def draw_and_cut(logits: Tensor, best: Tensor, draws: Sequence[Draw]) -> tuple[Tensor, Tensor]:
    """Tokens int64 [draws], and float32 [draws]: the lowest logit over temperature that each
    draw kept."""
    rules, (rows, vocab) = DrawRules.of(draws), logits.shape
    tokens, cutoffs = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
    take_threads()
    parts = min(rows, numba.get_num_threads())  # of the rows
    keys, weights = np.empty((parts, vocab), np.int32), np.empty((parts, vocab), np.float32)
    _draw_all(
        logits.contiguous().numpy(),
        best.numpy(),
        rules.inverse_temperature.numpy(),
        rules.top_k.numpy(),
        rules.top_p.numpy(),
        rules.log_min_p.numpy(),
        rules.start.numpy().view(np.uint64),
        rules.position.numpy().view(np.uint64),
        keys,
        weights,
        tokens.numpy(),
        cutoffs.numpy(),
    )
    return tokens, cutoffs


def compiled_sampler() -> Sampler:
    """`sample_on_host` with these draws, compiled now, not while the first client waits."""
    compiled_draw(torch.zeros(0, 8), torch.zeros(0, dtype=torch.int64), [])
    none = np.zeros((0, 8), np.float32), np.zeros(0, np.int64), np.zeros((0, 1), np.uint8)
    _mask_all(*none, _BARRED_PLACES)
    return partial(sample_on_host, random_draw=compiled_draw, mask_rows=compiled_masks)


def compiled_masks(logits: Tensor, draws: Sequence[Draw], rows: Sequence[int]) -> None:
    """Same as `grammar_masks.mask_logits`."""
    found = masks_of(draws, rows)
    if not found:
        return
    take_threads()
    masks = np.zeros((len(found), max(len(bits) for _, bits in found)), np.uint8)
    for place, (_, bits) in enumerate(found):
        masks[place, : len(bits)] = np.frombuffer(bits, np.uint8)
    rows_of_masks = np.array([row for row, _ in found], np.int64)
    _mask_all(logits.numpy(), rows_of_masks, masks, _BARRED_PLACES)


@inner
def _scaled(x, inverse, out):  # type: ignore[no-untyped-def]
    """The logits over the temperature; minus zero becomes zero, so that equals have one key."""
    for i in range(len(x)):
        out[i] = x[i] * inverse + np.float32(0.0)


@inner
def _to_keys(bits):  # type: ignore[no-untyped-def]
    """Signed integers in the order of the float32 whose `bits` they replace; its own inverse."""
    for i in range(len(bits)):
        bits[i] ^= (bits[i] >> np.int32(31)) & np.int32(0x7FFFFFFF)


@inner
def _exponentials(x, best, out, powers):  # type: ignore[no-untyped-def]
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
def _select(keys, weights, count, goal, by_mass, sums):  # type: ignore[no-untyped-def]
    """The greatest key for which the `count` keys of it and more are `goal` in number or, with
    `weights`, in mass; the lowest one if rounding leaves too little. Both arrays are overwritten.
    `sums` float64 [_BINS] is room."""
    above, prefix = 0.0, np.int64(0)
    for level in range(3):
        shift = _DIGITS[level]
        top = (_BINS if shift else _BINS // 2) - 1
        sums[:] = 0.0
        lowest = np.int64(_BINS)
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
def _collect(x, inverse, best, cutoff, by_mass, keys, weights, room, powers):  # type: ignore[no-untyped-def]
    """Keys, and with `by_mass` weights, of the scaled logits of `cutoff` and more; how many."""
    found = 0
    for first in range(0, len(x), _BLOCK):
        part = x[first : first + _BLOCK]
        size = len(part)
        scaled = room[:size]
        _scaled(part, inverse, scaled)
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
def _from_key(key, room):  # type: ignore[no-untyped-def]
    bits = room.view(np.int32)
    bits[0] = key
    _to_keys(bits[:1])
    return room[0]


@inner
def _cutoff(  # type: ignore[no-untyped-def]
    x, inverse, best, top_k, top_p, log_min_p, keys, weights, room, powers, sums
):
    """The lowest scaled logit to keep."""
    cutoff = np.float32(-np.inf)
    if 0 < top_k < len(x):
        count = _collect(x, inverse, best, cutoff, False, keys, weights, room, powers)
        key = _select(keys, weights, count, float(top_k), False, sums)
        cutoff = _from_key(key, room)
    if top_p < 1.0:
        count = _collect(x, inverse, best, cutoff, True, keys, weights, room, powers)
        goal = 0.0
        for i in range(count):
            goal += np.float64(weights[i])
        key = _select(keys, weights, count, goal * top_p, True, sums)
        cutoff = max(cutoff, _from_key(key, room))
    return max(cutoff, best + log_min_p)


@inner
def _mix(state):  # type: ignore[no-untyped-def]
    """SplitMix64, of `noise.stream_key`."""
    state = state + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


@inner
def _hash(x):  # type: ignore[no-untyped-def]
    """`noise._lowbias32` of a uint32."""
    x = np.uint32((x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D))
    x = np.uint32((x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B))
    return np.uint32(x ^ (x >> np.uint32(16)))


@inner
def _gumbel(bits):  # type: ignore[no-untyped-def]
    return -math.log(-math.log((np.float64(bits) + 0.5) * 2.0**-32))


@inner
def _bounds(first, high, low, bits, out):  # type: ignore[no-untyped-def]
    """No less than the noise of tokens from `first` on, whose `bits` uint32 are made: minus the
    log of 1 - u is no less than the noise, and a logarithm to base 2 no less than the exponent
    plus the mantissa's fraction, which are the number's own bits."""
    rest = out.view(np.int32)
    for i in range(len(out)):
        bits[i] = _hash(_hash(np.uint32(first + i) ^ high) ^ low)
        half = np.int32(~bits[i] >> np.uint32(1))
        out[i] = np.float32(half) * np.float32(2.0) + np.float32(0.5)
    for i in range(len(out)):
        out[i] = (np.float32(159.0) - np.float32(rest[i]) * np.float32(2.0**-23)) * _LN2 + _SLACK


@inner
def _winner(x, inverse, best, place, cutoff, start, position, room, bound, bits):  # type: ignore[no-untyped-def]
    """The token of the highest sum of scaled logit and noise, the lowest of equals. The best
    logit, at `place`, makes the first mark to beat."""
    key = _mix(start ^ position)
    high, low = np.uint32(key >> np.uint64(32)), np.uint32(key & np.uint64(0xFFFFFFFF))
    mark = np.float64(best) + _gumbel(_hash(_hash(np.uint32(place) ^ high) ^ low))
    winner = place
    for first in range(0, len(x), _BLOCK):
        part = x[first : first + _BLOCK]
        size = len(part)
        scaled, most, made = room[:size], bound[:size], bits[:size]
        _scaled(part, inverse, scaled)
        _bounds(first, high, low, made, most)
        needed = np.float32(mark - np.float64(best)) - _SLACK
        rivals = np.int32(0)
        for i in range(size):
            rival = (scaled[i] - best + most[i] >= needed) & (scaled[i] >= cutoff)
            rivals += np.int32(1) if rival else np.int32(0)
        if rivals == 0:
            continue
        for i in range(size):
            if scaled[i] - best + most[i] >= needed and scaled[i] >= cutoff:
                total = np.float64(scaled[i]) + _gumbel(made[i])
                if total > mark or (total == mark and first + i < winner):
                    winner, mark = first + i, total
                    needed = np.float32(mark - np.float64(best)) - _SLACK
    return winner


def _draw_rows(  # type: ignore[no-untyped-def]
    logits,
    best_at,
    inverses,
    top_ks,
    top_ps,
    log_min_ps,
    starts,
    positions,
    keys,
    weights,
    tokens,
    cutoffs,
):
    """Rows by turns to the threads, each of which has a row of `keys` and of `weights`."""
    parts = len(keys)
    for part in prange(parts):
        room, bound = np.empty(_BLOCK, np.float32), np.empty(_BLOCK, np.float32)
        powers, bits = np.empty(_BLOCK, np.int32), np.empty(_BLOCK, np.uint32)
        sums = np.empty(_BINS, np.float64)
        for row in range(part, len(logits), parts):
            x, inverse, place = logits[row], inverses[row], best_at[row]
            best = x[place] * inverse + np.float32(0.0)
            cutoffs[row] = _cutoff(
                x,
                inverse,
                best,
                top_ks[row],
                top_ps[row],
                log_min_ps[row],
                keys[part],
                weights[part],
                room,
                powers,
                sums,
            )
            tokens[row] = _winner(
                x,
                inverse,
                best,
                place,
                cutoffs[row],
                starts[row],
                positions[row],
                room,
                bound,
                bits,
            )


def _mask_rows(logits, rows, masks, places):  # type: ignore[no-untyped-def]
    """Write minus infinity where a row's bit is zero, or missing: only barred tokens cost a store.
    `masks` uint8 [rows, bytes]; `places` are `_BARRED_PLACES`."""
    vocab = logits.shape[1]
    for row in prange(len(rows)):
        x, mask = logits[rows[row]], masks[row]
        whole = min(len(mask), vocab // 8)
        for byte in range(whole):
            bits = mask[byte]
            if bits != np.uint8(255):
                first = byte * 8
                for place in range(places[bits, 8]):
                    x[first + places[bits, place]] = np.float32(-np.inf)
        for token in range(whole * 8, vocab):
            bits = mask[token // 8] if token // 8 < len(mask) else np.uint8(0)
            if (bits >> np.uint8(token % 8)) & np.uint8(1) == np.uint8(0):
                x[token] = np.float32(-np.inf)


def _barred_places() -> NDArray[np.int8]:
    """Return for each byte the places of its zero bits, and in column 8 how many there are."""
    places = np.zeros((256, 9), np.int8)
    for byte in range(256):
        barred = [bit for bit in range(8) if not byte >> bit & 1]
        places[byte, : len(barred)] = barred
        places[byte, 8] = len(barred)
    return places


_BARRED_PLACES = _barred_places()
_mask_all: Any = compiled(_mask_rows, parallel=True, strict=True)
_draw_all: Any = compiled(_draw_rows, parallel=True, strict=True)
