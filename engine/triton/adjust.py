"""Penalties, biases and logprobs on a GPU without the host, equal to `sampling` on a CPU.

One program computes one row, and returns at once if the row has no adjustments. The operations and
their order are those of a CPU, so the logits have the same bits. The module keeps no state.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton.engine.sampling.draw_adjustments import Adjustments
from baton.engine.sampling.draw_logprobs import LogprobBuffers

_ENTRIES = 1024  # of a list, loaded at once
_BLOCK = 4096


def adjust_logits(logits: Tensor, adjustments: Adjustments) -> None:
    """Apply penalties and biases in place to `logits` float32 [rows, vocab], contiguous. Tokens
    outside the vocabulary are ignored."""
    rows, vocab = logits.shape
    if rows:
        _adjust[(rows,)](
            logits,
            adjustments.bounds,
            adjustments.penalties,
            adjustments.pending_token,
            adjustments.tokens,
            adjustments.amounts,
            vocab,
            adjustments.bounds.stride(0),
            adjustments.penalties.stride(0),
            BLOCK=_ENTRIES,
            num_warps=8,
            enable_fp_fusion=False,  # round like numpy
        )


def find_logprobs(logits: Tensor, tokens: Tensor, counts: Tensor, room: LogprobBuffers) -> None:
    """Write log-probabilities of `logits` float32 [rows, vocab], contiguous, into `room`: those of
    `tokens` int64 [rows] and of the `counts` int [rows] best; the lowest of equal ids comes first.
    Rows with a negative count are skipped; no count exceeds the vocabulary or `MAX_LOGPROBS`."""
    rows, vocab = logits.shape
    if rows:
        block = min(_BLOCK, triton.next_power_of_2(vocab))
        _logprobs[(rows,)](
            logits,
            tokens,
            counts,
            room.tokens,
            room.values,
            vocab,
            room.values.stride(0),
            BLOCK=block,
            TILES=triton.next_power_of_2(triton.cdiv(vocab, block)),
            num_warps=max(1, min(16, block // 256)),
        )


@triton.jit
def _repeated(x, penalty):  # type: ignore[no-untyped-def] # Triton infers types
    return tl.where(x < 0, x * penalty, tl.math.div_rn(x, penalty))


@triton.jit
def _penalize_seen(  # type: ignore[no-untyped-def] # Triton infers types
    row_ptr, token_ptr, first, end, pending, penalty, vocab, BLOCK: tl.constexpr
):
    """Penalise each token of prompt and output once, and `pending` if it is not among them."""
    missing = pending >= 0
    for start in range(first, end, BLOCK):
        index = start + tl.arange(0, BLOCK)
        token = tl.load(token_ptr + index, mask=index < end, other=-1)
        known = (token >= 0) & (token < vocab)
        x = tl.load(row_ptr + token, mask=known, other=0.0)
        tl.store(row_ptr + token, _repeated(x, penalty), mask=known)
        missing = missing & (tl.max((known & (token == pending)).to(tl.int32), axis=0) == 0)
    if missing:
        tl.store(row_ptr + pending, _repeated(tl.load(row_ptr + pending), penalty))


@triton.jit
def _penalize_counted(  # type: ignore[no-untyped-def] # Triton infers types
    row_ptr,
    token_ptr,
    amount_ptr,
    first,
    end,
    pending,
    frequency,
    presence,
    vocab,
    BLOCK: tl.constexpr,
):
    """Penalise tokens by their counts in the output; `pending` adds one to its count."""
    missing = pending >= 0
    for start in range(first, end, BLOCK):
        index = start + tl.arange(0, BLOCK)
        token = tl.load(token_ptr + index, mask=index < end, other=-1)
        known = (token >= 0) & (token < vocab)
        again = known & (token == pending)
        count = tl.load(amount_ptr + index, mask=known, other=0.0).to(tl.float64)
        count += again.to(tl.float64)
        amount = (frequency * count + presence).to(tl.float32)
        x = tl.load(row_ptr + token, mask=known, other=0.0)
        tl.store(row_ptr + token, x - amount, mask=known)
        missing = missing & (tl.max(again.to(tl.int32), axis=0) == 0)
    if missing:
        tl.store(
            row_ptr + pending, tl.load(row_ptr + pending) - (frequency + presence).to(tl.float32)
        )


@triton.jit
def _adjust(  # type: ignore[no-untyped-def] # Triton infers types
    logit_ptr,
    bound_ptr,
    penalty_ptr,
    pending_ptr,
    token_ptr,
    amount_ptr,
    vocab,
    bound_stride,
    penalty_stride,
    BLOCK: tl.constexpr,
):
    """Adjust one row. Barriers separate its lists, since a token may be in several of them."""
    row = tl.program_id(0)
    row_ptr = logit_ptr + row.to(tl.int64) * vocab
    first = tl.load(bound_ptr + row)
    seen = tl.load(bound_ptr + bound_stride + row)
    counted = tl.load(bound_ptr + 2 * bound_stride + row)
    biased = tl.load(bound_ptr + 3 * bound_stride + row)
    repetition = tl.load(penalty_ptr + row).to(tl.float32)
    frequency = tl.load(penalty_ptr + penalty_stride + row)
    presence = tl.load(penalty_ptr + 2 * penalty_stride + row)
    pending = tl.load(pending_ptr + row)
    if repetition != 1.0:
        _penalize_seen(row_ptr, token_ptr, first, seen, pending, repetition, vocab, BLOCK)
        tl.debug_barrier()
    if (frequency != 0.0) | (presence != 0.0):
        _penalize_counted(
            row_ptr,
            token_ptr,
            amount_ptr,
            seen,
            counted,
            pending,
            frequency,
            presence,
            vocab,
            BLOCK,
        )
        tl.debug_barrier()
    for start in range(counted, biased, BLOCK):
        index = start + tl.arange(0, BLOCK)
        token = tl.load(token_ptr + index, mask=index < biased, other=-1)
        known = (token >= 0) & (token < vocab)
        bias = tl.load(amount_ptr + index, mask=known, other=0.0)
        x = tl.load(row_ptr + token, mask=known, other=0.0)
        tl.store(row_ptr + token, x + bias, mask=known)


@triton.jit
def _logprobs(  # type: ignore[no-untyped-def] # Triton infers types
    logit_ptr,
    token_ptr,
    count_ptr,
    best_ptr,
    value_ptr,
    vocab,
    stride,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
):
    """Find the best tokens of one row. Each lane keeps the best of its column [TILES, BLOCK]; the
    best of all lanes is the next token. Only its lane searches again, so the row is read twice for
    any count."""
    row = tl.program_id(0)
    count = tl.load(count_ptr + row)
    if count >= 0:
        row_ptr = logit_ptr + row.to(tl.int64) * vocab
        lane = tl.arange(0, BLOCK)
        highest = tl.full((BLOCK,), -float("inf"), dtype=tl.float32)
        best_token = tl.full((BLOCK,), 0, dtype=tl.int32) + vocab
        for first in range(0, vocab, BLOCK):
            index = first + lane
            x = tl.load(row_ptr + index, mask=index < vocab, other=-float("inf"))
            better = x > highest
            best_token = tl.where(better, index, best_token)
            highest = tl.where(better, x, highest)
        top = tl.max(highest, axis=0)
        total = tl.zeros((), dtype=tl.float64)
        for first in range(0, vocab, BLOCK):
            index = first + lane
            x = tl.load(row_ptr + index, mask=index < vocab, other=-float("inf"))
            total += tl.sum(tl.exp(x - top), axis=0).to(tl.float64)
        log_total = tl.log(total).to(tl.float32)
        own = tl.load(row_ptr + tl.load(token_ptr + row))
        tl.store(value_ptr + row * stride, own - top - log_total)
        tile = tl.arange(0, TILES)
        for number in range(1, count + 1):
            best = tl.max(highest, axis=0)
            token = tl.min(tl.where(highest == best, best_token, vocab), axis=0)
            tl.store(best_ptr + row * stride + number, token)
            tl.store(value_ptr + row * stride + number, best - top - log_total)
            column = tile * BLOCK + token % BLOCK
            x = tl.load(row_ptr + column, mask=column < vocab, other=-float("inf"))
            left = (column < vocab) & ((x < best) | ((x == best) & (column > token)))
            x = tl.where(left, x, -float("inf"))
            rest = tl.max(x, axis=0)
            at = tl.min(tl.where(left & (x == rest), column, vocab), axis=0)
            mine = lane == token % BLOCK
            highest = tl.where(mine, rest, highest)
            best_token = tl.where(mine, at, best_token)
