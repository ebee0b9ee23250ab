"""A part of `benchmarks.gpu`: what a draw costs, beside torch's way of drawing, by a sort.

Every row of a batch draws with the same rules from a vocabulary of a real size. Holds no state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from baton.engine.sampling.draw_adjustments import Adjustments
from baton.engine.sampling.draw_logprobs import LogprobBuffers
from baton.engine.sampling.draw_rules import DrawRules
from baton.engine.sampling.mask_words import MaskWords, words_of
from baton.engine.scheduling.batch import Draw
from baton.engine.scheduling.token_history import history_of
from baton.engine.triton.adjust import adjust_logits, find_logprobs
from baton.engine.triton.sampling import draw_tokens
from baton.runtime.sampling import SamplingParams
from benchmarks.figures.report import Figure
from benchmarks.gpu_parts.models import GREEDY, replay_seconds, seconds_of
from benchmarks.gpu_parts.speed import Given

USUAL = SamplingParams(temperature=0.8, top_k=20, top_p=0.95)
_TEXT, _BIASES, _LOGPROBS = 4096, 1024, 20
SPREAD, SPREAD_FLAT = 3.0, 1.0  # standard deviation of logits
RULES = (  # name, rules, spread
    ("", USUAL, SPREAD),
    ("_plain", replace(USUAL, top_k=0, top_p=1.0), SPREAD),
    ("_greedy", GREEDY, SPREAD),
    ("_top_p", replace(USUAL, top_k=0), 2 * SPREAD),
    ("_top_p_flat", replace(USUAL, top_k=0), SPREAD_FLAT),
)


def draws(given: Given) -> Iterator[Figure]:
    """`draw_us_ROWSxVOCABULARY`: top-k 20 and top-p 0.95, as many models ask for; `_plain`: with a
    temperature alone; `_top_p`: with top-p alone, as peaked as a model's logits; `_top_p_flat`:
    over logits so flat that it keeps much of the vocabulary, the worst case; `_masked`: a greedy
    draw by a grammar; `_penalties` and `_logprobs`: what a greedy draw pays for those besides.
    Draws are replayed as graphs, as in a step."""
    vocab = 199 if given.dry else 151_936
    rows = 3 if given.dry else 64
    seconds: dict[str, float] = {}
    for count in (rows, 1):
        for name, params, spread in RULES:
            seconds[f"{count}{name}"] = found = _seconds(given, count, vocab, params, spread)
            yield Figure(f"draw_us_{count}x{vocab}{name}", found * 1e6, "us")
    yield from _with_extras(given, rows, vocab)
    logits = torch.randn(rows, vocab, device=given.device) * SPREAD
    by_sort = seconds_of(lambda: sorted_draw(logits, USUAL), given.device)
    note = "torch's sort, softmax and cumulative sum are 1"
    yield Figure(f"draw_us_{rows}x{vocab}_over_sort", seconds[f"{rows}"] / by_sort, "", note)


def _seconds(given: Given, rows: int, vocab: int, params: SamplingParams, spread: float) -> float:
    """Return the time of the draws of `rows` rows, all by `params`, from normal logits."""
    logits = torch.randn(rows, vocab, device=given.device) * spread
    each = [Draw(0, 1000 + row, replace(params, seed=row)) for row in range(rows)]
    rules = DrawRules.of(each).to(given.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=given.device)
    finite = torch.empty(rows, dtype=torch.int8, device=given.device)
    return replay_seconds(lambda: draw_tokens(logits, rules, tokens, finite), given.device)


def _with_extras(given: Given, rows: int, vocab: int) -> Iterator[Figure]:
    before = torch.randn(rows, vocab, device=given.device) * SPREAD
    logits = before.clone()
    tokens = torch.empty(rows, dtype=torch.int64, device=given.device)
    finite = torch.empty(rows, dtype=torch.int8, device=given.device)
    words = torch.randint(-(2**31), 2**31, (rows, words_of(vocab)), dtype=torch.int32)
    masks = MaskWords(torch.arange(rows, dtype=torch.int32), words).to(given.device)
    greedy = DrawRules.of([Draw(0, 1000 + row, GREEDY) for row in range(rows)]).to(given.device)
    penalized = Adjustments.of([_penalized(row, vocab) for row in range(rows)]).to(given.device)
    counts = torch.full((rows,), _LOGPROBS, device=given.device)
    room = LogprobBuffers.on(given.device, rows)

    def copy() -> None:
        logits.copy_(before)

    def draw_masked() -> None:
        copy()
        draw_tokens(logits, greedy, tokens, finite, masks)

    def penalize() -> None:
        copy()
        adjust_logits(logits, penalized)

    copied = replay_seconds(copy, given.device)
    seconds = replay_seconds(draw_masked, given.device)
    yield Figure(f"draw_us_{rows}x{vocab}_masked", (seconds - copied) * 1e6, "us")
    seconds = replay_seconds(penalize, given.device)
    yield Figure(f"draw_us_{rows}x{vocab}_penalties", (seconds - copied) * 1e6, "us")
    seconds = replay_seconds(lambda: find_logprobs(before, tokens, counts, room), given.device)
    yield Figure(f"draw_us_{rows}x{vocab}_logprobs", seconds * 1e6, "us")


def _penalized(row: int, vocab: int) -> Draw:
    """A draw with every penalty over a text of its own, and with a bias."""
    tokens = torch.randint(0, vocab, (_TEXT,), generator=torch.Generator().manual_seed(row))
    params = replace(
        GREEDY,
        repetition_penalty=1.1,
        frequency_penalty=0.1,
        presence_penalty=0.1,
        logit_bias=tuple((token, 0.5) for token in range(min(vocab, _BIASES))),
    )
    return Draw(0, _TEXT, params, history_of(tokens.tolist(), _TEXT // 2))


def sorted_draw(logits: Tensor, params: SamplingParams) -> Tensor:
    """int64 [rows]: a draw of each row of `logits` [rows, vocab] by top-k and top-p, from one
    sort, as engines do it that have no kernel for that; an exponential race picks the token."""
    ordered, tokens = (logits / params.temperature).sort(dim=-1, descending=True)
    ordered[:, params.top_k :] = -torch.inf
    masses = ordered.softmax(dim=-1)
    masses.masked_fill_(masses.cumsum(dim=-1) - masses >= params.top_p, 0.0)
    won = (masses / torch.empty_like(masses).exponential_()).argmax(dim=-1, keepdim=True)
    return tokens.gather(1, won)[:, 0]
