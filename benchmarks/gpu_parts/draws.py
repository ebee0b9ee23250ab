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
from baton.engine.scheduling.batch import Draw, SamplingParams
from baton.engine.scheduling.token_history import history_of
from baton.engine.triton.adjust import adjust_logits, find_logprobs
from baton.engine.triton.sampling import draw_tokens
from benchmarks.figures.report import Figure
from benchmarks.gpu_parts.models import GREEDY, seconds_of
from benchmarks.gpu_parts.speed import Given

USUAL = SamplingParams(temperature=0.8, top_k=20, top_p=0.95)
_TEXT, _BIASES, _LOGPROBS = 4096, 1024, 20
RULES = {"": USUAL, "_plain": SamplingParams(temperature=0.8), "_greedy": GREEDY}


def draws(given: Given) -> Iterator[Figure]:
    """`draw_us_ROWSxVOCABULARY`: top-k 20 and top-p 0.95, as many models ask for; `_plain`: with a
    temperature alone; `_masked`: a greedy draw by a grammar; `_penalties` and `_logprobs`: what a
    greedy draw pays for those besides."""
    rows, vocab = (3, 199) if given.dry else (64, 151_936)
    logits = torch.randn(rows, vocab, device=given.device) * 3
    tokens = torch.empty(rows, dtype=torch.int64, device=given.device)
    finite = torch.empty(rows, dtype=torch.int8, device=given.device)
    times = {}
    for name, params in RULES.items():
        each = [Draw(0, 1000 + row, replace(params, seed=row)) for row in range(rows)]
        rules = DrawRules.of(each).to(given.device)

        def draw(rules: DrawRules = rules) -> None:
            draw_tokens(logits, rules, tokens, finite)

        times[name] = seconds_of(draw, given.device)
        yield Figure(f"draw_us_{rows}x{vocab}{name}", times[name] * 1e6, "us")
    copied = seconds_of(lambda: logits.clone(), given.device)
    words = torch.randint(-(2**31), 2**31, (rows, words_of(vocab)), dtype=torch.int32)
    masks = MaskWords(torch.arange(rows, dtype=torch.int32), words).to(given.device)
    greedy = DrawRules.of([Draw(0, 1000 + row, GREEDY) for row in range(rows)]).to(given.device)

    def draw_masked() -> None:
        draw_tokens(logits.clone(), greedy, tokens, finite, masks)

    seconds = seconds_of(draw_masked, given.device)
    yield Figure(f"draw_us_{rows}x{vocab}_masked", (seconds - copied) * 1e6, "us")
    penalized = Adjustments.of([_penalized(row, vocab) for row in range(rows)]).to(given.device)
    seconds = seconds_of(lambda: adjust_logits(logits.clone(), penalized), given.device)
    yield Figure(f"draw_us_{rows}x{vocab}_penalties", (seconds - copied) * 1e6, "us")
    counts = torch.full((rows,), _LOGPROBS, device=given.device)
    room = LogprobBuffers.on(given.device, rows)
    seconds = seconds_of(lambda: find_logprobs(logits, tokens, counts, room), given.device)
    yield Figure(f"draw_us_{rows}x{vocab}_logprobs", seconds * 1e6, "us")
    by_sort = seconds_of(lambda: sorted_draw(logits, USUAL), given.device)
    name = f"draw_us_{rows}x{vocab}_over_sort"
    yield Figure(name, times[""] / by_sort, "", "torch's sort, softmax and cumulative sum are 1")


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
    ordered, places = (logits / params.temperature).sort(dim=-1, descending=True)
    ordered[:, params.top_k :] = -torch.inf
    masses = ordered.softmax(dim=-1)
    masses.masked_fill_(masses.cumsum(dim=-1) - masses >= params.top_p, 0.0)
    won = (masses / torch.empty_like(masses).exponential_()).argmax(dim=-1, keepdim=True)
    return places.gather(1, won)[:, 0]
