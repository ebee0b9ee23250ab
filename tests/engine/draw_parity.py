"""The draws of the engine's GPU kernels against those of torch, on a GPU or in the interpreter.

As in `attention_parity.py`, a check returns its error and the largest that is allowed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import torch
import triton.language as tl
from parity import Check
from torch import Tensor

from baton.engine.sampling.draw_adjustments import Adjustments
from baton.engine.sampling.draw_logprobs import LogprobBuffers
from baton.engine.sampling.draw_rules import DrawRules
from baton.engine.sampling.mask_words import MASKED_LOGIT, MaskWords
from baton.engine.sampling.sampling import adjust, sample
from baton.engine.scheduling.batch import Draw
from baton.engine.scheduling.token_history import PromptTokens, Text
from baton.engine.triton import sampling
from baton.engine.triton.adjust import adjust_logits, find_logprobs
from baton.engine.triton.sampling import draw_tokens
from baton.runtime.sampling import SamplingParams

_RULES = {
    "greedy": SamplingParams(temperature=0.0),
    "plain": SamplingParams(temperature=0.9),
    "top-k": SamplingParams(temperature=1.3, top_k=7),
    "top-p": SamplingParams(temperature=0.8, top_p=0.7),
    "min-p": SamplingParams(temperature=1.1, min_p=0.05),
    "all": SamplingParams(temperature=1.2, top_k=40, top_p=0.9, min_p=0.02),
    "nothing kept but the best": SamplingParams(temperature=1.0, top_p=0.0),
    "nearly all": SamplingParams(temperature=2.0, top_p=0.9999),
    "all but one": SamplingParams(temperature=1.0, top_k=198),
}


# Rules at the limits of what the kernels list of a row. At a high temperature each kept token is
# about as likely as any other, so that a wrong cutoff is seen.
_EDGE_RULES = {
    "usual": SamplingParams(temperature=0.8, top_k=20, top_p=0.95),
    "top-k 1": SamplingParams(temperature=0.9, top_k=1),
    "top-k 2, hot": SamplingParams(temperature=200.0, top_k=2),
    "few best, hot": SamplingParams(temperature=200.0, top_k=9, top_p=0.5),
    "many best": SamplingParams(temperature=1.5, top_k=1000, top_p=0.99),
    "too many best": SamplingParams(temperature=1.5, top_k=2500, top_p=0.99),
    "too many best, hot": SamplingParams(temperature=200.0, top_k=2500, top_p=0.3),
    "more than there are": SamplingParams(temperature=0.9, top_k=1 << 30, top_p=0.95),
    "all but one and nearly all": SamplingParams(temperature=1.4, top_k=-1, top_p=1 - 1e-7),
    "top-p tiny": SamplingParams(temperature=0.8, top_p=1e-12),
    "top-p": SamplingParams(temperature=1.6, top_p=0.95),
    "top-p, hot": SamplingParams(temperature=200.0, top_p=0.6),
    "min-p": SamplingParams(temperature=1.6, min_p=0.01),
    "plain": SamplingParams(temperature=1.6),
    "plain, hot": SamplingParams(temperature=200.0),
}
_SMALL = {  # limits in the interpreter, so that few tokens reach them
    "_GROUPS": 256,
    "_SHORTEST_SLICE": 512,
    "_RESOLVED": 1024,
    "_LONGEST_LIST": 400,
    "_MOST_BEST": 100,
    "_NUCLEUS": 128,
    "_WIDE_NUCLEUS": 190,
}


@contextmanager
def _limits(tiny: bool, **others: int) -> Iterator[None]:
    with ExitStack() as stack:
        for name, value in ((_SMALL if tiny else {}) | others).items():
            was = getattr(sampling, name)
            new = tl.constexpr(value) if isinstance(was, tl.constexpr) else value
            stack.enter_context(patch.object(sampling, name, new))
        yield


def _edge_params(name: str, vocab: int, tiny: bool) -> SamplingParams:
    params = _EDGE_RULES[name]
    if params.top_k < 0:
        return replace(params, top_k=vocab - 1)
    return replace(params, top_k=params.top_k // 10) if tiny and params.top_k > 20 else params


def _edge_logits(vocab: int, generator: torch.Generator) -> Tensor:
    """Rows that differ in how many tokens are close to the best: [12, vocab]."""
    normal = torch.randn(12, vocab, generator=generator)
    exponents = torch.randint(-149, 1, (vocab,), generator=generator).double()
    rows = [
        normal[0] * 3,
        normal[1].mul(4).round() * 0.75,  # ties, also with the k-th
        (normal[2] * 2).bfloat16().float(),
        normal[3] * 0.3,  # flat
        torch.full((vocab,), -3.5),
        torch.where(torch.arange(vocab) % 7 == 3, 1.0, 0.25),
        normal[6].sort().values * 3,  # the best are the last
        torch.where(torch.arange(vocab) % (vocab // 5) == 0, normal[7], MASKED_LOGIT),
        torch.exp2(exponents).float() * normal[8].sign(),  # in each binade, to the last bit
        normal[9].sign() * 3e38,
        normal[10].clamp(max=0.0).abs() * -20,  # half of them are the best: minus zero
        normal[11] * 1e-3 + torch.where(torch.arange(vocab) == vocab - 1, 30.0, 0.0),
    ]
    return torch.stack(rows)


def _edges(name: str) -> Check:
    def run(device: torch.device, tiny: bool) -> tuple[float, float]:
        vocab = 2_003 if tiny else 151_937
        logits = _edge_logits(vocab, torch.Generator().manual_seed(5))
        params = _edge_params(name, vocab, tiny)
        draws = [Draw(0, row, replace(params, seed=row)) for row in range(len(logits))]
        wanted = [drawn.token for drawn in sample(logits.clone(), draws)]
        with _limits(tiny):
            found, finite = _drawn(logits.to(device), draws)
        wrong = sum(a != b for a, b in zip(found, wanted, strict=True))
        wrong += 9 * (finite != [1] * len(draws))
        return float(wrong), 0.0 if tiny else 1.0

    return run


def _drawn(logits: Tensor, draws: Sequence[Draw]) -> tuple[list[int], list[int]]:
    """Tokens, and whether their rows are finite."""
    tokens = torch.full((len(draws),), -1, dtype=torch.int64, device=logits.device)
    finite = torch.full((len(draws),), -1, dtype=torch.int8, device=logits.device)
    draw_tokens(logits, DrawRules.of(draws).to(logits.device), tokens, finite)
    return tokens.tolist(), finite.tolist()


def _divided(device: torch.device, tiny: bool) -> tuple[float, float]:
    """A row draws the same alone, where 32 programs share it, and in a batch, where one has it."""
    vocab = 2_003 if tiny else 151_936
    params = [_edge_params(name, vocab, tiny) for name in _EDGE_RULES]
    logits = torch.randn(len(params), vocab, device=device)
    draws = [Draw(0, row, replace(each, seed=row)) for row, each in enumerate(params)]
    with _limits(tiny):
        alone = [
            _drawn(logits[row : row + 1], draws[row : row + 1])[0][0] for row in range(len(draws))
        ]
    wrong = 0
    for programs in (1,) if tiny else (1, 60):
        with _limits(tiny, _PROGRAMS=programs):
            wrong += sum(a != b for a, b in zip(_drawn(logits, draws)[0], alone, strict=True))
    return float(wrong), 0.0


def _overflowing(device: torch.device, tiny: bool) -> tuple[float, float]:
    """Logits that leave float32 once divided by the temperature end in a token all the same."""
    vocab = 5_003 if tiny else 151_936
    logits = torch.randn(8, vocab, device=device) * 5e37
    rules = SamplingParams(temperature=1e-3)
    each = (rules, replace(rules, top_k=20, top_p=0.95), replace(rules, top_k=2500, top_p=0.5))
    draws = [Draw(0, row, replace(each[row % 3], seed=row)) for row in range(8)]
    found, finite = _drawn(logits, draws)
    good = all(0 <= token < vocab for token in found) and finite == [1] * 8
    return 0.0 if good else 1.0, 0.0


def _draws(name: str) -> Check:
    def run(device: torch.device, tiny: bool) -> tuple[float, float]:
        rows, vocab = (6, 199) if tiny else (128, 151_936)
        logits = torch.randn(rows, vocab, device=device) * 2
        logits[0, vocab // 2 :] = logits[0, : vocab - vocab // 2].clone()  # ties
        logits[1], logits[2] = -7.25, 0.0
        logits[2, 5], logits[2, 7:9] = 9e4, -0.0
        logits[3, ::2] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
        logits[3, 1::2] = 1.0
        params = _RULES[name]
        draws = []
        for row in range(rows):
            own = replace(params, seed=row * 7919 - 3)
            draws.append(Draw(row % 3, (1 << 40) * (row % 2) + row, own))
        tokens = torch.full((rows,), -1, dtype=torch.int64, device=device)
        finite = torch.full((rows,), -1, dtype=torch.int8, device=device)
        draw_tokens(logits, DrawRules.of(draws).to(device), tokens, finite)
        wanted = [drawn.token for drawn in sample(logits.cpu(), draws)]
        wrong = sum(a != b for a, b in zip(tokens.tolist(), wanted, strict=True))
        # On a GPU products and exponentials may differ in their last bit: a near tie may flip.
        return float(wrong + int((finite != 1).sum())), 0.0 if tiny else 1.0

    return run


def _slots(device: torch.device, tiny: bool) -> tuple[float, float]:
    logits = torch.randn(5, 150 if tiny else 32_000, device=device)
    params = [SamplingParams(1.1, top_p=0.8, seed=row) for row in range(5)]
    draws = [Draw(0, 7 * row, each) for row, each in enumerate(params)]

    def drawn(rows: list[int]) -> list[int]:
        tokens = torch.empty(len(rows), dtype=torch.int64, device=device)
        finite = torch.empty(len(rows), dtype=torch.int8, device=device)
        rules = DrawRules.of([draws[row] for row in rows]).to(device)
        draw_tokens(logits[rows], rules, tokens, finite)
        return tokens.tolist()

    together = drawn([4, 3, 2, 1, 0])[::-1]
    alone = [drawn([row])[0] for row in range(5)]
    return float(sum(a != b for a, b in zip(together, alone, strict=True))), 0.0


def _broken(device: torch.device, tiny: bool) -> tuple[float, float]:
    logits = torch.randn(4, 300, device=device)
    logits[1, 7], logits[2, 299] = float("nan"), float("inf")
    draws = [Draw(0, 5, SamplingParams(seed=row)) for row in range(4)]
    tokens = torch.full((4,), -1, dtype=torch.int64, device=device)
    finite = torch.full((4,), -1, dtype=torch.int8, device=device)
    draw_tokens(logits, DrawRules.of(draws).to(device), tokens, finite)
    wanted = sample(logits[[0, 3]].cpu(), [draws[0], draws[3]])
    good = tokens[[0, 3]].tolist() == [drawn.token for drawn in wanted]
    good = good and tokens[[1, 2]].tolist() == [0, 0] and finite.tolist() == [1, 0, 0, 1]
    return 0.0 if good else 1.0, 0.0


def _adjusted(tiny: bool, vocab: int) -> list[Draw]:
    """Draws of every mixture of rules, and of none, each with a text of its own."""
    generator = np.random.default_rng(7)
    prompt, output = (300, 200) if tiny else (40_000, 20_000)  # several pieces of each list
    bias = generator.choice(vocab, 60 if tiny else 1024, replace=False)
    pairs = tuple((int(token), float(np.float32(generator.normal()))) for token in bias)
    draws = []
    for number in range(16):
        params = SamplingParams(
            temperature=0.0,
            repetition_penalty=1.3 if number & 1 else 1.0,
            frequency_penalty=0.37 if number & 2 else 0.0,
            presence_penalty=-0.21 if number & 4 else 0.0,
            logit_bias=pairs if number & 8 else (),
        )
        made = [generator.integers(0, vocab // 2, n).tolist() for n in (prompt, output)]
        text = Text(PromptTokens(made[0]), made[1])
        history = text.until(output) if params.needs_history else None
        draws.append(Draw(0, number, params, history))
    return draws


def _penalties(device: torch.device, tiny: bool) -> tuple[float, float]:
    """Bit for bit, with and without a token that the lists miss."""
    vocab = 2_999 if tiny else 151_936
    draws = _adjusted(tiny, vocab)
    before = torch.randn(len(draws), vocab, device=device) * 3
    wrong = 0
    for fed in (None, 1, vocab - 1, draws[1].history.text.output[0]):
        adjustments, known = Adjustments.of(draws).to(device), draws
        if fed is not None:
            adjustments.pending_token.fill_(fed)
            known = [
                replace(each, history=each.history.extended(fed)) if each.history else each
                for each in draws
            ]
        found, wanted = before.clone(), before.cpu()
        adjust_logits(found, adjustments)
        adjust(wanted, known)
        wrong += int((found.cpu() != wanted).sum())
    return float(wrong), 0.0


class _Admitted:
    """Admits each token that is divisible by `step`."""

    def __init__(self, step: int, bits: int) -> None:
        self._step, self._bits = step, bits

    def bitmask(self) -> bytes:
        found = np.arange(self._bits) % self._step == 0
        return np.packbits(found, bitorder="little").tobytes()

    def extended(self, tokens: Sequence[int]) -> _Admitted:
        return self


def _masked(device: torch.device, tiny: bool) -> tuple[float, float]:
    """The tokens of masks on the host, in rows with and without one, and with a shorter one."""
    rows, vocab = (6, 4_203) if tiny else (64, 151_936)
    logits = torch.randn(rows, vocab, device=device) * 2
    lengths = (vocab + -vocab % 32, (vocab - 100) // 32 * 32)
    draws = [
        Draw(0, row, rules, None, None if row % 3 == 2 else _Admitted(row + 2, lengths[row % 2]))
        for row, rules in zip(range(rows), [*_RULES.values()] * rows, strict=False)
    ]
    wanted = sample(logits.clone().cpu(), draws)
    before = logits.clone()
    masks = MaskWords.of(draws, vocab).to(device)
    tokens = torch.full((rows,), -1, dtype=torch.int64, device=device)
    finite = torch.full((rows,), -1, dtype=torch.int8, device=device)
    draw_tokens(logits, DrawRules.of(draws).to(device), tokens, finite, masks)
    wrong = sum(found != each.token for found, each in zip(tokens.tolist(), wanted, strict=True))
    for row in range(rows):
        steps = torch.arange(vocab, device=device)
        barred = (steps % (row + 2) != 0) | (steps >= lengths[row % 2])
        left = before[row] if row % 3 == 2 else before[row].masked_fill(barred, MASKED_LOGIT)
        wrong += int((logits[row] != left).sum())
    return float(wrong + int((finite != 1).sum())), 0.0


def _barred(device: torch.device, tiny: bool) -> tuple[float, float]:
    """No rule of a draw trips over a token that must not be drawn."""
    rows, vocab = (6, 199) if tiny else (64, 151_936)
    logits = torch.randn(rows, vocab, device=device) * 2
    best = logits.argmax(dim=-1).tolist()
    draws = []
    for row, rules in zip(range(rows), [*_RULES.values()] * rows, strict=False):
        barred = (best[row], *range(row, vocab, 3))
        params = replace(rules, seed=row, min_tokens=1, barred=barred, top_logprobs=3)
        draws.append(Draw(0, row, params.at(0)))
    wanted = sample(logits.clone().cpu(), draws)  # which overwrites them
    adjust_logits(logits, Adjustments.of(draws).to(device))
    tokens = torch.full((rows,), -1, dtype=torch.int64, device=device)
    finite = torch.full((rows,), -1, dtype=torch.int8, device=device)
    draw_tokens(logits, DrawRules.of(draws).to(device), tokens, finite)
    wrong = sum(a != b.token for a, b in zip(tokens.tolist(), wanted, strict=True))
    barred_drawn = sum(
        token in dict(draw.params.logit_bias)
        for token, draw in zip(tokens.tolist(), draws, strict=True)
    )
    wrong += 9 * (barred_drawn + int((finite != 1).sum()))
    return float(wrong), 0.0 if tiny else 1.0


def _logprobs(device: torch.device, tiny: bool) -> tuple[float, float]:
    """Ties go to the lowest ids; rows that ask for none are left alone."""
    rows, vocab = (5, 9_001) if tiny else (64, 151_936)
    logits = torch.randn(rows, vocab, device=device) * 3
    logits[1, 5::4096] = logits[1].max() + 1  # all in one lane
    logits[2] = 1.0
    tokens = torch.arange(rows, device=device) * 7
    counts = torch.tensor([(0, 64, 20, -1, 3)[row % 5] for row in range(rows)], device=device)
    room = LogprobBuffers.on(device, rows)
    find_logprobs(logits, tokens, counts, room)
    wanted = logits.cpu().double().log_softmax(-1)
    worst = 0.0
    for row, count in enumerate(counts.tolist()):
        order = logits[row].cpu().sort(descending=True, stable=True).indices[: max(count, 0)]
        best = room.tokens[row, 1 : 1 + len(order)].cpu()
        chosen = torch.cat([tokens[row : row + 1].cpu(), order]) if count >= 0 else order
        values = room.values[row, : len(chosen)].cpu()
        if not torch.equal(best.long(), order) or room.values[row, len(chosen) :].any():
            return float("inf"), 0.0
        worst = max(worst, float((values - wanted[row, chosen]).abs().max()) if count >= 0 else 0.0)
    return worst, 2e-5


CHECKS: dict[str, Check] = {f"draws: {name}": _draws(name) for name in _RULES}
CHECKS |= {f"draws, edges: {name}": _edges(name) for name in _EDGE_RULES}
CHECKS["draws: divided among any number of programs"] = _divided
CHECKS["draws: too large for float32 over the temperature"] = _overflowing
CHECKS["draws: alone as in any slot of a batch"] = _slots
CHECKS["draws: rows that are not finite are reported, the others unharmed"] = _broken
CHECKS["draws: penalties and biases"] = _penalties
CHECKS["draws: masked by grammars"] = _masked
CHECKS["draws: adjusted, with barred tokens"] = _barred
CHECKS["draws: logprobs"] = _logprobs
