"""From logits to tokens: penalties, bias, temperature, truncation and the draw.

A draw is Gumbel-max (Gumbel 1954; Maddison et al. 2014, arXiv:1411.0030) with noise that
depends on (seed, choice, absolute position, token) alone, so neither the batch slot nor the
batch changes it, and rounding in the logits changes it only where two candidates tie.
Works on all draws of a step at once, in O(vocabulary) per draw; keeps no state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from baton.engine.batch import Draw, Drawn, SamplingParams
from baton.engine.noise import gumbel, gumbel_bound, noise_bits, stream_key

GREEDY_TEMPERATURE = 1e-5  # below it, one over the temperature leaves float32
_DRAW_NUMBERS = 1 << 16  # of whole rows together: what is made for each stays in a cache
_NUCLEUS_CANDIDATES = 1024  # sorted first; more only where these hold too little mass


@dataclass(frozen=True, slots=True)
class DrawKinds:
    """Which of a step's draws need more than the highest logit; places, in order."""

    adjusted: list[int]  # penalties or a bias
    random: list[int]
    told: list[int]  # with logprobs


def kinds_of(draws: Sequence[Draw]) -> DrawKinds:
    """Needs no logits: made while the device may still compute."""
    params = [draw.params for draw in draws]
    return DrawKinds(
        [row for row, p in enumerate(params) if p.logit_bias or p.needs_history],
        [row for row, p in enumerate(params) if p.temperature > GREEDY_TEMPERATURE],
        [row for row, p in enumerate(params) if p.top_logprobs is not None],
    )


def sample(logits: Tensor, draws: Sequence[Draw], kinds: DrawKinds | None = None) -> list[Drawn]:
    """Draw one token per row of `logits` [draws, vocab], float32, which may be overwritten.
    `kinds` as `kinds_of` makes them, where they are known already.

    Greedy is the highest logit after penalties and bias; the lowest id wins ties.
    """
    if not draws:
        return []
    kinds = kinds or kinds_of(draws)
    adjust(logits, draws, kinds.adjusted)
    tokens = logits.argmax(dim=-1)
    random = kinds.random
    if random:
        params = [draws[row].params for row in random]
        kept = truncate(logits[random], params)
        tokens[random] = _draw(kept, [draws[row] for row in random])
    return _drawn(logits, tokens, draws, kinds.told)


def adjust(logits: Tensor, draws: Sequence[Draw], rows: Sequence[int] | None = None) -> None:
    """Apply penalties and logit bias in place, [draws, vocab]; `rows`: the draws that have any,
    where they are known.

    Repetition (Keskar et al. 2019, arXiv:1909.05858) counts prompt and output; frequency and
    presence count the output alone.
    """
    for row in kinds_of(draws).adjusted if rows is None else rows:
        _adjust(logits[row], draws[row])


def _adjust(logits: Tensor, draw: Draw) -> None:  # logits [vocab]
    params = draw.params
    if params.needs_history and len(draw.history):
        _penalize(logits, draw)
    if params.logit_bias:
        tokens = torch.tensor([token for token, _ in params.logit_bias])
        amounts = torch.tensor([amount for _, amount in params.logit_bias])
        logits.index_add_(0, tokens, amounts)


def _penalize(logits: Tensor, draw: Draw) -> None:  # logits [vocab]
    params = draw.params
    history = np.asarray(draw.history, dtype=np.int64)
    if params.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(history))
        found = logits[seen]
        logits[seen] = torch.where(
            found < 0, found * params.repetition_penalty, found / params.repetition_penalty
        )
    if params.frequency_penalty or params.presence_penalty:
        output, counts = np.unique(history[draw.prompt_tokens :], return_counts=True)
        amounts = params.frequency_penalty * counts + params.presence_penalty
        logits[torch.from_numpy(output)] -= torch.from_numpy(amounts).to(torch.float32)


def truncate(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Logits over temperature, [draws, vocab], with what top-k, top-p and min-p exclude at
    minus infinity.

    Each rule is a lowest logit to keep, so tokens that tie with the last one kept stay, and no
    order among equals matters. Top-p counts mass among what top-k keeps, min-p is relative to
    the best token (Nguyen et al. 2024, arXiv:2407.01082).
    """
    column = torch.tensor([[1.0 / p.temperature] for p in params])
    scaled = logits * column
    cutoff = torch.full((len(params), 1), -torch.inf)
    vocab = scaled.shape[1]
    ks = [p.top_k if 0 < p.top_k < vocab else 0 for p in params]
    rows = [row for row, k in enumerate(ks) if k]
    if rows:
        best = scaled[rows].topk(max(ks), dim=-1).values
        last = torch.tensor([[ks[row] - 1] for row in rows])
        cutoff[rows] = best.gather(1, last)
    rows = [row for row, p in enumerate(params) if p.top_p < 1.0]
    if rows:
        top_p = torch.tensor([[params[row].top_p] for row in rows], dtype=torch.float64)
        cutoff[rows] = _nucleus_cutoff(scaled[rows], cutoff[rows], top_p)
    rows = [row for row, p in enumerate(params) if p.min_p > 0]
    if rows:
        log_share = torch.tensor([[params[row].min_p] for row in rows]).log()
        lowest = scaled[rows].amax(dim=-1, keepdim=True) + log_share
        cutoff[rows] = torch.maximum(cutoff[rows], lowest)
    return scaled.masked_fill_(scaled < cutoff, -torch.inf)


def _nucleus_cutoff(scaled: Tensor, cutoff: Tensor, top_p: Tensor) -> Tensor:
    """The lowest logit [rows, 1] of the smallest set that holds `top_p` of the mass above
    `cutoff` (Holtzman et al. 2019, arXiv:1904.09751); at least one token."""
    kept = scaled.masked_fill(scaled < cutoff, -torch.inf)
    best = kept.amax(dim=-1, keepdim=True)
    wanted = top_p * (kept - best).exp().sum(dim=-1, keepdim=True, dtype=torch.float64)
    count = min(_NUCLEUS_CANDIDATES, kept.shape[1])
    while True:
        ordered = kept.topk(count, dim=-1).values  # descending
        weights = (ordered - best).exp().to(torch.float64)
        mass = weights.cumsum(dim=-1)
        if count == kept.shape[1] or bool((mass[:, -1:] >= wanted).all()):
            break
        count = min(count * 16, kept.shape[1])
    size = (mass - weights < wanted).sum(dim=-1, keepdim=True).clamp(min=1)
    return torch.maximum(ordered.gather(1, size - 1), cutoff)


def _draw(kept: Tensor, draws: Sequence[Draw]) -> Tensor:
    """For each row of `kept` [draws, vocab] the token of the highest sum of logit and noise, the
    lowest of equals; int64 [draws]."""
    keys = torch.tensor(
        [stream_key(draw.params.seed, draw.choice, draw.position) for draw in draws]
    )  # int64 [draws, 2]
    rules = [draw.params for draw in draws]
    cut = torch.tensor([bool(p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0) for p in rules])
    if cut.all():
        return _draw_of_few(kept, keys)
    tokens = torch.empty(len(draws), dtype=torch.int64)
    if cut.any():
        tokens[cut] = _draw_of_few(kept[cut], keys[cut])
    whole = (~cut).nonzero()[:, 0]
    for rows in torch.split(whole, max(1, _DRAW_NUMBERS // kept.shape[1])):
        tokens[rows] = _draw_of_all(kept[rows], keys[rows])
    return tokens


def _draw_of_few(kept: Tensor, keys: Tensor) -> Tensor:
    """Where few tokens of a row are kept: the noise of each is made."""
    rows, tokens = (kept > -torch.inf).nonzero(as_tuple=True)  # by row, then by token
    noise = gumbel(noise_bits((keys[rows, 0], keys[rows, 1]), tokens))
    return _winners(len(kept), rows, tokens, kept[rows, tokens] + noise)


def _draw_of_all(kept: Tensor, keys: Tensor) -> Tensor:
    """The best logit's sum is a mark to beat. A cheap bound on the noise rules out nearly all
    other tokens, so that the exact noise is made for a handful; the result is the same."""
    halves = keys[:, :1], keys[:, 1:]  # each [rows, 1]
    bits = noise_bits(halves, torch.arange(kept.shape[1]))  # [rows, vocab]
    best = kept.argmax(dim=-1, keepdim=True)
    mark = kept.gather(1, best) + gumbel(bits.gather(1, best))
    rows, tokens = (gumbel_bound(bits).add_(kept) >= mark).nonzero(as_tuple=True)  # with the best
    return _winners(len(kept), rows, tokens, kept[rows, tokens] + gumbel(bits[rows, tokens]))


def _winners(count: int, rows: Tensor, tokens: Tensor, sums: Tensor) -> Tensor:
    """For each of `count` rows the token of its highest sum, the lowest of equals; candidates
    [n], at least one a row."""
    highest = sums.new_full((count,), -torch.inf).scatter_reduce(0, rows, sums, "amax")
    won = sums == highest[rows]
    last = torch.full((count,), torch.iinfo(torch.int64).max)
    return last.scatter_reduce(0, rows[won], tokens[won], "amin")


def _drawn(logits: Tensor, tokens: Tensor, draws: Sequence[Draw], rows: list[int]) -> list[Drawn]:
    """`rows`: those with logprobs."""
    chosen = tokens.tolist()
    if not rows:
        return [Drawn(draw.choice, token) for draw, token in zip(draws, chosen, strict=True)]
    found: dict[int, tuple[float, tuple[tuple[int, float], ...]]] = {}
    logprobs = logits[rows].log_softmax(dim=-1)
    own = logprobs.gather(1, tokens[rows, None])[:, 0].tolist()
    widest = max(draws[row].params.top_logprobs or 0 for row in rows)
    best = logprobs.topk(min(widest, logprobs.shape[1]), dim=-1)
    values, ids = best.values.tolist(), best.indices.tolist()
    for place, row in enumerate(rows):
        count = draws[row].params.top_logprobs or 0
        top = tuple(zip(ids[place][:count], values[place][:count], strict=True))
        found[row] = own[place], top
    return [
        Drawn(draw.choice, chosen[row], *found.get(row, (None, ())))
        for row, draw in enumerate(draws)
    ]
