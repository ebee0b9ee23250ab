"""Turns logits into tokens: penalties, bias, temperature, truncation and the draw.

A draw is Gumbel-max (Gumbel 1954; Maddison et al. 2014, arXiv:1411.0030) with noise that
depends on (seed, choice, absolute position, token) alone, so neither the batch slot nor the
batch changes it, and rounding in the logits changes it only where two candidates tie.
Works on all draws of a step at once, in O(vocabulary) per draw and without a sort; the cost of a
draw depends on its own rules alone. Keeps no state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.engine.sampling.grammar_masks import LEAST_BIAS, mask_logits
from baton.engine.sampling.logit_bias import bias_arrays
from baton.engine.sampling.noise import gumbel, gumbel_bound, noise_bits, stream_key
from baton.engine.scheduling.batch import Draw, Drawn
from baton.engine.scheduling.token_history import History
from baton.runtime.sampling import SamplingParams

Floats = NDArray[np.float32]

GREEDY_TEMPERATURE = 1e-5  # below it, one over the temperature leaves float32
_DRAW_LOGITS = 1 << 16  # of rows drawn together, so that temporaries stay in the cache
_DIGITS = ((21, 2048), (10, 2048), (0, 1024))  # shift and values of each digit of 32 bits
_SPARSE_RATIO = 8  # with at most 1 of 8 tokens kept, only these get noise


@dataclass(frozen=True, slots=True)
class DrawGroups:
    """The rows of a step's draws that need more than the highest logit, in order."""

    adjusted: list[int]  # penalties or a bias
    random: list[int]
    with_logprobs: list[int]
    masked: list[int]  # by a grammar


def group_draws(draws: Sequence[Draw]) -> DrawGroups:
    """Group the draws by their rules, before logits exist."""
    params = [draw.params for draw in draws]
    return DrawGroups(
        [row for row, p in enumerate(params) if p.logit_bias or p.needs_history],
        [row for row, p in enumerate(params) if p.temperature > GREEDY_TEMPERATURE],
        [row for row, p in enumerate(params) if p.top_logprobs is not None],
        [row for row, draw in enumerate(draws) if draw.allowed is not None],
    )


# Draws tokens int64 [draws] from adjusted float32 logits [draws, vocab], of what the masks admit;
# waits for them. Leaves the logits of draws with a mask and logprobs masked; the others may be.
DrawTokens = Callable[[Tensor, Sequence[Draw], DrawGroups], Tensor]


def torch_draw(logits: Tensor, draws: Sequence[Draw], groups: DrawGroups | None = None) -> Tensor:
    """Draw with torch: by masks, temperature, truncation and noise."""
    groups = groups or group_draws(draws)
    mask_logits(logits, draws, groups.masked)
    tokens, random = logits.argmax(dim=-1), groups.random
    if random:
        chosen = [draws[row] for row in random]
        rows = logits if len(random) == len(draws) else logits[random]
        tokens[random] = _draw(truncate(rows, [draw.params for draw in chosen]), chosen)
    return tokens


def sample(
    logits: Tensor,
    draws: Sequence[Draw],
    groups: DrawGroups | None = None,
    draw_tokens: DrawTokens = torch_draw,
) -> list[Drawn]:
    """Draw one token per row of `logits` [draws, vocab], float32, which may be overwritten.
    `groups`: the result of `group_draws`, if the caller has it.

    Greedy is the highest logit that the mask admits, after penalties and bias; the lowest id wins
    ties.
    """
    if not draws:
        return []
    groups = groups or group_draws(draws)
    adjust(logits, draws, groups.adjusted)
    tokens = draw_tokens(logits, draws, groups)
    return _drawn(logits, tokens, draws, groups.with_logprobs)


def adjust(logits: Tensor, draws: Sequence[Draw], rows: Sequence[int] | None = None) -> None:
    """Apply penalties and logit bias in place, [draws, vocab]; `rows`: the draws that have any,
    if the caller knows them.

    Repetition (Keskar et al. 2019, arXiv:1909.05858) counts prompt and output; frequency and
    presence count the output alone.
    """
    for row in group_draws(draws).adjusted if rows is None else rows:
        _adjust(logits[row], draws[row])


def _adjust(logits: Tensor, draw: Draw) -> None:  # logits [vocab]
    params, row = draw.params, logits.numpy()
    if draw.history is not None:
        _penalize(row, params, draw.history)
    if params.logit_bias:
        bias = bias_arrays(params.logit_bias)
        masked = draw.allowed is not None
        row[bias.tokens] += np.maximum(bias.amounts, LEAST_BIAS) if masked else bias.amounts


def _penalize(row: Floats, params: SamplingParams, history: History) -> None:  # row [vocab]
    """Apply penalties in time linear in the distinct tokens of prompt and output."""
    counts, repetition = history.counts(), params.repetition_penalty
    if repetition != 1.0:
        for seen in (history.text.prompt.distinct, counts.fresh):
            found = row[seen]
            row[seen] = np.where(found < 0, found * repetition, found / repetition)
    if params.frequency_penalty or params.presence_penalty:
        amounts = params.frequency_penalty * counts.counts + params.presence_penalty
        row[counts.tokens] -= amounts.astype(np.float32)


def truncate(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return logits over temperature, [draws, vocab], with the tokens that top-k, top-p and min-p
    exclude at minus infinity.

    Each rule is a lowest logit to keep, so tokens that tie with the last kept one are kept too.
    Top-p counts mass among what top-k keeps, min-p is relative to the best token
    (Nguyen et al. 2024, arXiv:2407.01082).
    """
    column = torch.tensor([[1.0 / p.temperature] for p in params])
    scaled = logits * column
    cutoff = torch.full((len(params), 1), -torch.inf)
    vocab = scaled.shape[1]
    ks = [p.top_k if 0 < p.top_k < vocab else 0 for p in params]
    for row, k in enumerate(ks):
        if k:
            cutoff[row] = _lowest_kept(scaled[row], None, k)
    for row, p in enumerate(params):
        if p.top_p < 1.0:
            cutoff[row] = _nucleus_cutoff(scaled[row], cutoff[row], p.top_p)
    rows = [row for row, p in enumerate(params) if p.min_p > 0]
    if rows:
        log_share = torch.tensor([[params[row].min_p] for row in rows]).log()
        lowest = scaled[rows].amax(dim=-1, keepdim=True) + log_share
        cutoff[rows] = torch.maximum(cutoff[rows], lowest)
    return scaled.masked_fill_(scaled < cutoff, -torch.inf)


def _nucleus_cutoff(scaled: Tensor, cutoff: Tensor, top_p: float) -> Tensor:
    """Return the lowest logit of the smallest set that holds `top_p` of the mass above `cutoff`
    (Holtzman et al. 2019, arXiv:1904.09751), of one row [vocab]; at least one token."""
    kept = scaled[scaled >= cutoff]
    weights = (kept - kept.max()).exp().to(torch.float64)
    return _lowest_kept(kept, weights, top_p * weights.sum().item())


def _lowest_kept(values: Tensor, weights: Tensor | None, goal: float) -> Tensor:
    """Return the greatest of `values` float32 [n] such that the values no less than it reach `goal`
    in number or, with `weights` float64 [n], in mass; the lowest one if rounding leaves too little.
    A radix select over the values' bits, by histograms, without a sort."""
    bits = (values + 0.0).view(torch.int32)  # minus zero becomes zero
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64) + (1 << 31)  # in their order
    for shift, bins in _DIGITS:
        digits = (keys >> shift) & (bins - 1)
        sums = torch.bincount(digits, weights, minlength=bins).flip(0).cumsum(0)  # from the top
        reached = ((sums >= goal) & (sums > 0)).nonzero()
        at = bins - 1 - int(reached[0]) if len(reached) else int(digits.min())
        if at < bins - 1:
            goal -= sums[bins - 2 - at].item()
        same = digits == at
        values, keys = values[same], keys[same]
        weights = None if weights is None else weights[same]
    return values[0]


def _draw(kept: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Return for each row of `kept` [draws, vocab] the token of the highest sum of logit and noise,
    the lowest of equals; int64 [draws]."""
    keys = torch.tensor(
        [stream_key(draw.params.seed, draw.choice, draw.position) for draw in draws]
    )  # int64 [draws, 2]
    sparse = (kept > -torch.inf).sum(dim=-1) * _SPARSE_RATIO <= kept.shape[1]
    if sparse.all():
        return _draw_sparse(kept, keys)
    tokens = torch.empty(len(draws), dtype=torch.int64)
    if sparse.any():
        tokens[sparse] = _draw_sparse(kept[sparse], keys[sparse])
    dense = (~sparse).nonzero()[:, 0]
    for rows in torch.split(dense, max(1, _DRAW_LOGITS // kept.shape[1])):
        tokens[rows] = _draw_dense(kept[rows], keys[rows])
    return tokens


def _draw_sparse(kept: Tensor, keys: Tensor) -> Tensor:
    """Draw from rows with few kept tokens: each gets its noise."""
    rows, tokens = (kept > -torch.inf).nonzero(as_tuple=True)  # by row, then by token
    noise = gumbel(noise_bits((keys[rows, 0], keys[rows, 1]), tokens))
    return _winners(len(kept), rows, tokens, kept[rows, tokens] + noise)


def _draw_dense(kept: Tensor, keys: Tensor) -> Tensor:
    """Draw from rows with many kept tokens. A cheap upper bound on the noise excludes nearly all
    tokens that cannot exceed the sum of the best logit, so that the exact noise is computed for a
    few; the result is the same."""
    halves = keys[:, :1], keys[:, 1:]  # each [rows, 1]
    bits = noise_bits(halves, torch.arange(kept.shape[1]))  # [rows, vocab]
    best = kept.argmax(dim=-1, keepdim=True)
    threshold = kept.gather(1, best) + gumbel(bits.gather(1, best))
    rows, tokens = (gumbel_bound(bits).add_(kept) >= threshold).nonzero(as_tuple=True)
    return _winners(len(kept), rows, tokens, kept[rows, tokens] + gumbel(bits[rows, tokens]))


def _winners(count: int, rows: Tensor, tokens: Tensor, sums: Tensor) -> Tensor:
    """Return for each of `count` rows the token of its highest sum, the lowest of equals, among
    candidates [n], at least one per row."""
    highest = sums.new_full((count,), -torch.inf).scatter_reduce(0, rows, sums, "amax")
    won = sums == highest[rows]
    last = torch.full((count,), torch.iinfo(torch.int64).max)
    return last.scatter_reduce(0, rows[won], tokens[won], "amin")


def _drawn(logits: Tensor, tokens: Tensor, draws: Sequence[Draw], rows: list[int]) -> list[Drawn]:
    """Build the result; `rows` are those with logprobs."""
    chosen = tokens.tolist()
    if not rows:
        return [Drawn(draw.choice, token) for draw, token in zip(draws, chosen, strict=True)]
    found: dict[int, tuple[float, tuple[tuple[int, float], ...]]] = {}
    logprobs = logits[rows].log_softmax(dim=-1)
    own = logprobs.gather(1, tokens[rows, None])[:, 0].tolist()
    widest = max(draws[row].params.top_logprobs or 0 for row in rows)
    best = logprobs.topk(min(widest, logprobs.shape[1]), dim=-1)
    values, ids = best.values.tolist(), best.indices.tolist()
    for at, row in enumerate(rows):
        count = draws[row].params.top_logprobs or 0
        top = tuple(zip(ids[at][:count], values[at][:count], strict=True))
        found[row] = own[at], top
    return [
        Drawn(draw.choice, chosen[row], *found.get(row, (None, ())))
        for row, draw in enumerate(draws)
    ]
