"""The draws of a CPU, compiled: cut-offs without a sort, noise without logarithms. Needs numba.

    a row:  best ─▶ lowest kept ─▶ the highest sum of logit and noise
            greedy: that is all

A row costs a few passes over the vocabulary whatever its rules and its distribution are, and
pays for its own rules alone. Each pass reads the bits of the row's grammar, if it has one. One
thread draws a row, each operation as written, so a draw depends neither on the batch nor on its
slot, nor on the processor's vectors. Keeps no state.
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
from baton.engine.cpu_draws.admitted_numba import BLOCK, admits, best_index, scale_part
from baton.engine.cpu_draws.cutoffs_numba import BINS, lowest_kept
from baton.engine.sampling.draw_plan import Sampler, sample_on_host
from baton.engine.sampling.draw_rules import DrawRules
from baton.engine.sampling.grammar_masks import masks_of
from baton.engine.sampling.sampling import DrawGroups, group_draws
from baton.engine.scheduling.batch import Draw
from baton.runtime.sampling import SamplingParams

_LN2 = np.float32(math.log(2.0))
_SLACK = np.float32(1e-3)  # covers float32's rounding in the bound of the noise
_SMALL = 1 << 17  # logits of plain greedy draws that torch reads faster than a call here starts


def compiled_draw(
    logits: Tensor, draws: Sequence[Draw], groups: DrawGroups | None = None
) -> Tensor:
    """Same as `sampling.torch_draw`, up to rounding."""
    return draw_and_cut(logits, draws, groups)[0]


def draw_and_cut(
    logits: Tensor, draws: Sequence[Draw], groups: DrawGroups | None = None
) -> tuple[Tensor, Tensor]:
    """Tokens int64 [draws], and float32 [draws]: the lowest logit over temperature that each
    draw kept, minus infinity where it kept all."""
    groups = groups or group_draws(draws)
    rows, vocab = logits.shape
    cutoffs = torch.full((rows,), -torch.inf)
    if not groups.random and not groups.masked and rows * vocab <= _SMALL:
        return logits.argmax(dim=-1), cutoffs
    masks, mask_rows = _masks(draws, groups.masked, vocab)
    rules, tokens = DrawRules.of(draws), torch.empty(rows, dtype=torch.int64)
    take_threads()
    parts = min(rows, numba.get_num_threads())  # of the rows
    room = parts, vocab if groups.random else 0
    numbers = logits.contiguous().numpy()
    _draw_all(
        numbers,
        masks,
        mask_rows,
        rules.inverse_temperature.numpy(),
        rules.top_k.numpy(),
        rules.top_p.numpy(),
        rules.log_min_p.numpy(),
        rules.start.numpy().view(np.uint64),
        rules.position.numpy().view(np.uint64),
        np.empty(room, np.int32),
        np.empty(room, np.float32),
        tokens.numpy(),
        cutoffs.numpy(),
    )
    for row in set(groups.masked).intersection(groups.with_logprobs):
        if mask_rows[row] >= 0:
            _bar(numbers[row], masks[mask_rows[row]])
    return tokens, cutoffs


def _masks(
    draws: Sequence[Draw], rows: Sequence[int], vocab: int
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Wait for the masks of `rows`. Return them [masks, bytes], with zeros up to the vocabulary's
    end, and for each draw its mask, -1 for none."""
    found = masks_of(draws, rows)
    size = -(-vocab // 8)
    whole = bytearray().join(bits[:size].ljust(size, b"\0") for _, bits in found)
    mask_rows = np.full(len(draws), -1, np.int64)
    mask_rows[[row for row, _ in found]] = range(len(found))
    return np.frombuffer(whole, np.uint8).reshape(len(found), size), mask_rows


def compiled_sampler() -> Sampler:
    """`sample_on_host` with these draws, compiled now, not while the first client waits."""
    random = Draw(0, 0, SamplingParams(temperature=1.0))
    compiled_draw(torch.zeros(1, 8), [random])
    _bar(np.zeros(8, np.float32), np.zeros(1, np.uint8))
    return partial(sample_on_host, draw_tokens=compiled_draw)


@inner
def _mix(state):  # type: ignore[no-untyped-def] # numba infers types
    """SplitMix64, of `noise.stream_key`."""
    state = state + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


@inner
def _hash(x):  # type: ignore[no-untyped-def] # numba infers types
    """`noise._lowbias32` of a uint32."""
    x = np.uint32((x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D))
    x = np.uint32((x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B))
    return np.uint32(x ^ (x >> np.uint32(16)))


@inner
def _gumbel(bits):  # type: ignore[no-untyped-def] # numba infers types
    return -math.log(-math.log((np.float64(bits) + 0.5) * 2.0**-32))


@inner
def _bounds(first, high, low, bits, out):  # type: ignore[no-untyped-def] # numba infers types
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
def _winner(  # type: ignore[no-untyped-def] # numba infers types
    x, mask, inverse, best, index, cutoff, start, position, room, bound, bits
):
    """The token of the highest sum of scaled logit and noise, the lowest of equals. The best
    logit, at `index`, makes the first mark to beat."""
    key = _mix(start ^ position)
    high, low = np.uint32(key >> np.uint64(32)), np.uint32(key & np.uint64(0xFFFFFFFF))
    mark = np.float64(best) + _gumbel(_hash(_hash(np.uint32(index) ^ high) ^ low))
    winner = index
    for first in range(0, len(x), BLOCK):
        part = x[first : first + BLOCK]
        size = len(part)
        scaled, most, made = room[:size], bound[:size], bits[:size]
        scale_part(part, mask, first, inverse, scaled)
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


def _draw_rows(  # type: ignore[no-untyped-def] # numba infers types
    logits,
    masks,
    mask_rows,
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
    """Rows by turns to the threads, each of which has a row of `keys` and of `weights`. A row whose
    inverse temperature is 0 is greedy."""
    parts = len(keys)
    for part in prange(parts):
        room, bound = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
        powers, bits = np.empty(BLOCK, np.int32), np.empty(BLOCK, np.uint32)
        sums = np.empty(BINS, np.float64)
        for row in range(part, len(logits), parts):
            x, inverse = logits[row], inverses[row]
            at = mask_rows[row]
            mask = masks[at] if at >= 0 else bits.view(np.uint8)[:0]
            index = best_index(x, mask)
            tokens[row] = index
            if inverse == np.float32(0.0):
                continue
            best = x[index] * inverse + np.float32(0.0)
            cutoffs[row] = lowest_kept(
                x,
                mask,
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
                mask,
                inverse,
                best,
                index,
                cutoffs[row],
                starts[row],
                positions[row],
                room,
                bound,
                bits,
            )


def _bar_row(x, mask):  # type: ignore[no-untyped-def] # numba infers types
    """Write minus infinity over the logits that are not admitted."""
    for token in range(len(x)):
        if not admits(mask, token):
            x[token] = np.float32(-np.inf)


_draw_all: Any = compiled(_draw_rows, parallel=True, strict=True)
_bar: Any = compiled(_bar_row, strict=True)
