"""Draws tokens on a GPU without the host, by the rules of `sampling` and the noise of `noise`.

    scan      [rows, slices]   masks; highest logit of each slice, and of each of its groups
    collect   [rows, slices]   the tokens of each slice that can win, into the row's list
    resolve   [rows]           exact cutoffs and noise in that list; a row too long for it is read

Several programs share a row, each a slice of its tokens. Top-k, top-p and min-p are each a lowest
logit to keep, so nothing is sorted. The k-th greatest of 2,048 groups' highest logits is not above
the k-th greatest logit, so few tokens but the k best are collected. With a temperature alone those
are collected whose noise can be enough. Which tokens are collected depends on the number of slices,
the drawn token does not: sums are of integers, and the lowest of equal tokens wins. The noise has
the same integers as on a CPU, so a draw differs from the CPU's only if rounding decides a near tie.
The scan reads the bits of a row's grammar, if it has one, and writes `MASKED_LOGIT` over each
barred token, so that the passes after it read no bits.
`adjust` has penalties, biases and logprobs. The module keeps no state.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.sampling.draw_rules import DrawRules
from baton.engine.sampling.mask_words import MASKED_LOGIT, WORD_BITS, MaskWords
from baton.engine.triton.cutoffs import cutoff_of, cutoff_of_few, least_listed, share
from baton.engine.triton.noise import gumbel, may_reach, noise_bits, stream_key, winner

_GROUPS = 2048  # of a row, and the logits that a program scans at once
_COLLECTED = 1024  # logits that a program collects at once
_RESOLVED = 4096  # logits of a row that a program resolves at once
_PROGRAMS = 512  # that scan a batch
_SHORTEST_SLICE = 4096  # logits
_MOST_SLICES = 32  # of a row
_LONGEST_LIST = 8192  # tokens
_LISTED_BLOCK = 512  # of them that get noise at once
_MOST_BEST = tl.constexpr(1024)  # a greater top-k is found in the row
_NUCLEUS, _WIDE_NUCLEUS = tl.constexpr(1024), tl.constexpr(1900)  # groups, for top-p alone
_MOST_COMPARED = tl.constexpr(64)  # listed tokens that are compared with each other
_LOWEST = tl.constexpr(-3.4028234663852886e38)  # of float32
_BARRED = tl.constexpr(MASKED_LOGIT)
_WORD_BITS = tl.constexpr(WORD_BITS)


def draw_tokens(
    logits: Tensor, rules: DrawRules, tokens: Tensor, finite: Tensor, masks: MaskWords | None = None
) -> None:
    """Write a token per row of `logits` float32 [rows, vocab], contiguous, into `tokens` int64
    [rows], and into `finite` (int, [rows]) whether all logits of the row are finite; if not, the
    token is 0. Rows with a mask are masked in place. The tensors of `rules` may have wider
    dtypes."""
    rows, vocab = logits.shape
    if not rows:
        return
    room = _DrawRoom.on(logits.device, rows, vocab)
    slices, groups = room.best.shape[1], room.peaks.shape[1]
    each = triton.cdiv(triton.cdiv(vocab, slices), groups) * groups  # tokens of a slice
    unit = float(1 << (62 - vocab.bit_length()))  # a row's mass stays within 63 bits
    scan_kernel[(rows, slices)](
        logits,
        rules.inverse_temperature,
        None if masks is None else masks.rows,
        None if masks is None else masks.words,
        0 if masks is None else masks.words.stride(0),
        *(room.best, room.best_tokens, room.peaks, room.counts),
        vocab,
        each,
        MASKS=masks is not None,
        SLICES=slices,
        BLOCK=groups,
        num_warps=max(1, groups // 256),
    )
    shared = {"SLICES": slices, "LONGEST": _LONGEST_LIST, "UNIT": unit}
    block = min(_COLLECTED, groups)
    collect_kernel[(rows, slices)](
        logits,
        *rules.tensors(),
        *(room.best, room.best_tokens, room.peaks, room.masses, room.counts, room.values, room.ids),
        vocab,
        each,
        **shared,
        GROUPS=groups,
        BLOCK=block,
        num_warps=max(1, block // 128),
        enable_fp_fusion=False,  # every kernel gives a token the same weight
    )
    block = min(_RESOLVED, triton.next_power_of_2(vocab))
    resolve_kernel[(rows,)](
        logits,
        *rules.tensors(),
        *(room.best, room.best_tokens, room.masses, room.counts, room.values, room.ids),
        tokens,
        finite,
        vocab,
        **shared,
        LISTED=_LISTED_BLOCK,
        BLOCK=block,
        num_warps=max(1, block // 256),
        enable_fp_fusion=False,
    )


@dataclass(frozen=True, slots=True)
class _DrawRoom:
    """The memory between the kernels of one call."""

    best: Tensor  # float32 [rows, slices]
    best_tokens: Tensor  # int32 [rows, slices]: the token of the best; -1: the slice is not finite
    peaks: Tensor  # float32 [rows, groups]: the best of each, over the temperature
    masses: Tensor  # int64 [rows, slices]
    counts: Tensor  # int32 [rows]: the tokens to list, which may be more than there is room for
    values: Tensor  # float32 [rows, _LONGEST_LIST]: the listed logits, in any order
    ids: Tensor  # int32 [rows, _LONGEST_LIST]: their tokens

    @staticmethod
    def on(device: torch.device, rows: int, vocab: int) -> _DrawRoom:
        slices, groups = _slices(rows, vocab), min(_GROUPS, triton.next_power_of_2(vocab))
        ints = partial(torch.empty, dtype=torch.int32, device=device)
        floats = partial(torch.empty, dtype=torch.float32, device=device)
        return _DrawRoom(
            best=floats((rows, slices)),
            best_tokens=ints((rows, slices)),
            peaks=floats((rows, groups)),
            masses=torch.empty((rows, slices), dtype=torch.int64, device=device),
            counts=ints(rows),
            values=floats((rows, _LONGEST_LIST)),
            ids=ints((rows, _LONGEST_LIST)),
        )


def _slices(rows: int, vocab: int) -> int:
    """Return the number of programs that scan a row, a power of two. It depends on no rule, since
    a captured step does not know its rules."""
    wanted = min(max(_PROGRAMS // rows, 1), max(vocab // _SHORTEST_SLICE, 1))
    return 1 << (min(wanted, _MOST_SLICES).bit_length() - 1)


@triton.jit
def _masked(x, row_ptr, word_ptr, index, held):  # type: ignore[no-untyped-def] # Triton infers types
    """The logits `x` of the tokens `index` by their bits, which are written back where barred."""
    word = tl.load(word_ptr + index // _WORD_BITS, mask=held, other=0)
    barred = held & (((word >> (index % _WORD_BITS)) & 1) == 0)
    tl.store(row_ptr + index, _BARRED, mask=barred)
    return tl.where(barred, _BARRED, x)


@triton.jit
def scan_kernel(  # type: ignore[no-untyped-def] # Triton infers types
    logit_ptr,
    inverse_ptr,
    mask_row_ptr,
    word_ptr,
    words,
    best_ptr,
    best_token_ptr,
    peak_ptr,
    count_ptr,
    vocab,
    each,
    MASKS: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Find the highest logit of one slice, the lowest of equal tokens, and of each of its groups.
    Each lane keeps its own, so that the lanes meet once."""
    row, number = tl.program_id(0), tl.program_id(1)
    row_ptr = logit_ptr + row.to(tl.int64) * vocab
    if MASKS:
        mask = tl.load(mask_row_ptr + row)
        word_ptr += tl.maximum(mask, 0).to(tl.int64) * words
    lane = tl.arange(0, BLOCK)
    highest = tl.full((BLOCK,), -float("inf"), dtype=tl.float32)
    best_token = tl.zeros((BLOCK,), dtype=tl.int32) + vocab
    broken = tl.zeros((BLOCK,), dtype=tl.int32)
    start = number * each
    for first in range(start, tl.minimum(start + each, vocab), BLOCK):
        index = first + lane
        x = tl.load(row_ptr + index, mask=index < vocab, other=_LOWEST)
        broken |= 1 - (tl.abs(x) < float("inf")).to(tl.int32)
        if MASKS:
            x = _masked(x, row_ptr, word_ptr, index, (index < vocab) & (mask >= 0))
        better = (x > highest) & (index < vocab)
        best_token = tl.where(better, index, best_token)
        highest = tl.where(better, x, highest)
    best = tl.max(highest, axis=0)
    at = tl.min(tl.where(highest == best, best_token, vocab), axis=0)
    slot = row * SLICES + number
    tl.store(best_ptr + slot, best)
    tl.store(best_token_ptr + slot, tl.where(tl.max(broken, axis=0) > 0, -1, at))
    if number == 0:
        tl.store(count_ptr + row, 0)
    inverse = tl.load(inverse_ptr + row).to(tl.float32)
    if inverse > 0:
        GROUPS: tl.constexpr = BLOCK // SLICES
        peaks = tl.max(tl.reshape(highest, (GROUPS, SLICES), can_reorder=True), axis=1) * inverse
        tl.store(peak_ptr + row * BLOCK + number * GROUPS + tl.arange(0, GROUPS), peaks)


@triton.jit
def _row_best(best_ptr, best_token_ptr, row, vocab, SLICES: tl.constexpr):  # type: ignore[no-untyped-def] # Triton infers types
    """Return the highest logit of a row, its lowest token, and whether the row is finite."""
    slot = row * SLICES + tl.arange(0, SLICES)
    best, token = tl.load(best_ptr + slot), tl.load(best_token_ptr + slot)
    highest = tl.max(best, axis=0)
    return highest, tl.min(tl.where(best == highest, token, vocab)), tl.min(token, axis=0) >= 0


@triton.jit
def _list(  # type: ignore[no-untyped-def] # Triton infers types
    chosen,
    row_ptr,
    first,
    end,
    count_ptr,
    value_ptr,
    id_ptr,
    LONGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Append logits and tokens to a row's list, as far as it has room. Bit t of a lane of `chosen`
    int32 [BLOCK] chooses its token of tile t from `first`."""
    each = tl.zeros((BLOCK,), dtype=tl.int32)
    for tile in range(tl.cdiv(end - first, BLOCK)):
        each += (chosen >> tile) & 1
    found = tl.sum(each, axis=0)
    if found > 0:
        index = first + tl.arange(0, BLOCK)
        slot = tl.atomic_add(count_ptr, found) + tl.cumsum(each, axis=0) - each
        for tile in range(tl.cdiv(end - first, BLOCK)):
            here = ((chosen >> tile) & 1) > 0
            room = here & (slot < LONGEST)
            tl.store(value_ptr + slot, tl.load(row_ptr + index, mask=room), mask=room)
            tl.store(id_ptr + slot, index, mask=room)
            slot += here.to(tl.int32)
            index += BLOCK


@triton.jit
def _list_rivals(  # type: ignore[no-untyped-def] # Triton infers types
    row_ptr,
    start,
    end,
    vocab,
    inverse,
    cutoff,
    mark,
    high,
    low,
    count_ptr,
    value_ptr,
    id_ptr,
    LONGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """List what noise can lift to `mark` float32, the best token's sum."""
    lane = tl.arange(0, BLOCK)
    for span in range(start, end, 32 * BLOCK):
        chosen = tl.zeros((BLOCK,), dtype=tl.int32)
        stop = tl.minimum(span + 32 * BLOCK, end)
        for first in range(span, stop, BLOCK):
            index = first + lane
            x = tl.load(row_ptr + index, mask=index < vocab, other=-float("inf")) * inverse
            good = may_reach(x, noise_bits(index, high, low), mark)
            good = good & (x >= cutoff) & (index < vocab)
            chosen |= good.to(tl.int32) << ((first - span) // BLOCK)
        _list(chosen, row_ptr, span, stop, count_ptr, value_ptr, id_ptr, LONGEST, BLOCK)


@triton.jit
def collect_kernel(  # type: ignore[no-untyped-def] # Triton infers types
    logit_ptr,
    inverse_ptr,
    top_k_ptr,
    top_p_ptr,
    log_min_p_ptr,
    start_ptr,
    position_ptr,
    best_ptr,
    best_token_ptr,
    peak_ptr,
    mass_ptr,
    count_ptr,
    value_ptr,
    id_ptr,
    vocab,
    each,
    SLICES: tl.constexpr,
    GROUPS: tl.constexpr,
    LONGEST: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """List what can win of one slice, and sum its mass for top-p alone. Greedy rows need none."""
    row, number = tl.program_id(0), tl.program_id(1)
    highest, best_token, finite = _row_best(best_ptr, best_token_ptr, row, vocab, SLICES)
    inverse = tl.load(inverse_ptr + row).to(tl.float32)
    top_k = tl.load(top_k_ptr + row).to(tl.int32)
    top_k = tl.where(top_k < vocab, top_k, 0)
    if finite & (inverse > 0) & (top_k <= _MOST_BEST):
        row_ptr = logit_ptr + row.to(tl.int64) * vocab
        room = count_ptr + row, value_ptr + row * LONGEST, id_ptr + row * LONGEST
        best = highest * inverse
        start, end = number * each, tl.minimum(number * each + each, vocab)
        top_p = tl.load(top_p_ptr + row)
        if (top_k > 0) | (top_p < 1.0):
            peaks = tl.load(peak_ptr + row * GROUPS + tl.arange(0, GROUPS))
            lowest = least_listed(peaks, best, top_k, top_p, _NUCLEUS, _WIDE_NUCLEUS)
            mass = tl.zeros((BLOCK,), dtype=tl.int64)
            for span in range(start, end, 32 * BLOCK):
                chosen = tl.zeros((BLOCK,), dtype=tl.int32)
                stop = tl.minimum(span + 32 * BLOCK, end)
                for first in range(span, stop, BLOCK):
                    index = first + tl.arange(0, BLOCK)
                    x = tl.load(row_ptr + index, mask=index < vocab, other=-float("inf")) * inverse
                    if top_k == 0:
                        mass += share(x, best, UNIT)
                    good = (x >= lowest) & (index < vocab)
                    chosen |= good.to(tl.int32) << ((first - span) // BLOCK)
                _list(chosen, row_ptr, span, stop, *room, LONGEST, BLOCK)
            tl.store(mass_ptr + row * SLICES + number, tl.sum(mass, axis=0))
        else:
            cutoff = best + tl.load(log_min_p_ptr + row).to(tl.float32)
            high, low = stream_key(tl.load(start_ptr + row), tl.load(position_ptr + row))
            mark = best.to(tl.float64) + gumbel(noise_bits(best_token, high, low))
            mark = mark.to(tl.float32)
            rules = vocab, inverse, cutoff, mark, high, low
            _list_rivals(row_ptr, start, end, *rules, *room, LONGEST, BLOCK)


@triton.jit
def resolve_kernel(  # type: ignore[no-untyped-def] # Triton infers types
    logit_ptr,
    inverse_ptr,
    top_k_ptr,
    top_p_ptr,
    log_min_p_ptr,
    start_ptr,
    position_ptr,
    best_ptr,
    best_token_ptr,
    mass_ptr,
    count_ptr,
    value_ptr,
    id_ptr,
    token_ptr,
    finite_ptr,
    vocab,
    SLICES: tl.constexpr,
    LONGEST: tl.constexpr,
    UNIT: tl.constexpr,
    LISTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Draw one row's token from its list, or from the row where the list has not all of it."""
    row = tl.program_id(0)
    highest, token, finite = _row_best(best_ptr, best_token_ptr, row, vocab, SLICES)
    tl.store(finite_ptr + row, finite.to(finite_ptr.dtype.element_ty))
    inverse = tl.load(inverse_ptr + row).to(tl.float32)
    if finite & (inverse > 0):
        row_ptr = logit_ptr + row.to(tl.int64) * vocab
        value_ptr += row * LONGEST
        id_ptr += row * LONGEST
        best = highest * inverse
        listed = tl.load(count_ptr + row)
        top_k, top_p = tl.load(top_k_ptr + row).to(tl.int32), tl.load(top_p_ptr + row)
        top_k = tl.where(top_k < vocab, top_k, 0)
        complete = (listed <= LONGEST) & (top_k <= _MOST_BEST)
        cutoff = tl.full((), _LOWEST, dtype=tl.float32)
        if (top_k > 0) & complete & (listed <= _MOST_COMPARED):
            cutoff = cutoff_of_few(
                value_ptr, listed, inverse, best, top_k, top_p, UNIT, _MOST_COMPARED
            )
        elif (top_k > 0) | (top_p < 1.0):
            total = tl.sum(tl.load(mass_ptr + row * SLICES + tl.arange(0, SLICES)), axis=0)
            rules = inverse, best, top_k, top_p, total, vocab
            if complete:
                cutoff, complete = cutoff_of(value_ptr, listed, *rules, False, UNIT, BLOCK)
            if not complete:
                cutoff, _ = cutoff_of(row_ptr, vocab, *rules, True, UNIT, BLOCK)
        cutoff = tl.maximum(cutoff, best + tl.load(log_min_p_ptr + row).to(tl.float32))
        high, low = stream_key(tl.load(start_ptr + row), tl.load(position_ptr + row))
        if complete:
            token = winner(
                value_ptr, id_ptr, listed, inverse, cutoff, best, token, high, low, True, LISTED
            )
        else:
            token = winner(
                row_ptr, id_ptr, vocab, inverse, cutoff, best, token, high, low, False, BLOCK
            )
    tl.store(token_ptr + row, tl.where(finite, token, 0).to(tl.int64))
