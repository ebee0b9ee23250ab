"""Measure the draws of a step on a CPU, beside a plain argmax and beside drawing by a sort.

    python -m benchmarks.sampling [--rows 64] [--vocab 151936] [--rounds 5] [--json FILE]

Every row of a step draws by the same rules, from logits of its own. Each figure is the best of
the rounds, which take the kinds in turns; `_over_argmax` is what a kind takes over what the
highest logit of the same rows takes in the same run, `sorted_..._over_argmax` the same for a
draw that sorts the vocabulary, as engines do that have no kernel for it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from baton.engine.cpu_draws.sampling_numba import compiled_draw
from baton.engine.sampling.sampling import sample
from baton.engine.scheduling.batch import Draw
from baton.runtime.sampling import SamplingParams
from benchmarks.figures.report import Figure, at_most, parser, report

BIASES = 1024
DEAR_OVER_ARGMAX = 15.0  # of the dearest rules: a sort took a hundred times as long
_SHARES = {"wide": SamplingParams(temperature=2.0, top_p=0.9999)}


def kinds(vocab: int) -> dict[str, SamplingParams]:
    """The parameters that a client may send, each at its highest cost."""
    bias = tuple(
        (token, 0.5) for token in random.Random(1).sample(range(vocab), min(BIASES, vocab))
    )
    return {
        "greedy": SamplingParams(temperature=0.0),
        "plain": SamplingParams(temperature=0.8),
        "usual": SamplingParams(temperature=0.8, top_k=20, top_p=0.95),
        **_SHARES,
        "all_but_one": SamplingParams(top_k=vocab - 1),
        "all_rules": SamplingParams(temperature=2.0, top_k=vocab - 1, top_p=0.9999, min_p=1e-6),
        "bias": SamplingParams(temperature=0.0, logit_bias=bias),
        "logprobs": SamplingParams(temperature=0.0, top_logprobs=20),
    }


def draw_by_sort(logits: Tensor, params: SamplingParams) -> Tensor:
    """int64 [rows], by one sort of every row; an exponential race picks the token."""
    ordered, tokens = (logits / params.temperature).sort(dim=-1, descending=True)
    masses = ordered.softmax(dim=-1)
    masses.masked_fill_(masses.cumsum(dim=-1) - masses >= params.top_p, 0.0)
    won = (masses / torch.empty_like(masses).exponential_()).argmax(dim=-1, keepdim=True)
    return tokens.gather(1, won)[:, 0]


def measure(rows: int, vocab: int, rounds: int) -> dict[str, float]:
    """Seconds of a step's draws by kind, of "argmax" and of each "sorted_" kind."""
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(2)) * 3
    work: dict[str, Callable[[], object]] = {"argmax": lambda: logits.argmax(dim=-1)}
    for name, params in kinds(vocab).items():
        draws = [Draw(0, 1000 + row, replace(params, seed=row)) for row in range(rows)]

        def drawn(draws: list[Draw] = draws) -> object:
            return sample(logits, draws, draw_tokens=compiled_draw)

        work[name] = drawn
    for name, params in _SHARES.items():
        # mypy infers no type for the default of a lambda
        work[f"sorted_{name}"] = lambda params=params: draw_by_sort(logits, params)  # type: ignore[misc]
    best = dict.fromkeys(work, float("inf"))
    for _ in range(rounds + 1):  # the first one warms up
        for name, each in work.items():
            began = time.perf_counter()
            each()
            best[name] = min(best[name], time.perf_counter() - began)
    return best


def figures(seconds: dict[str, float]) -> list[Figure]:
    plain = seconds["argmax"]
    found = [Figure("argmax_ms", plain * 1000, "ms", "the highest logit of every row")]
    for name, took in seconds.items():
        if name == "argmax":
            continue
        ratio = took / plain
        found.append(Figure(f"{name}_ms", took * 1000, "ms"))
        named = f"{name}_over_argmax"
        sort = name.startswith("sorted_")
        found.append(Figure(named, ratio) if sort else at_most(named, ratio, DEAR_OVER_ARGMAX))
    return found


def main() -> None:
    options = parser(__doc__.partition("\n")[0])
    options.add_argument("--rows", type=int, default=64)
    options.add_argument("--vocab", type=int, default=151_936)
    options.add_argument("--rounds", type=int, default=5)
    given = options.parse_args()
    report(figures(measure(given.rows, given.vocab, given.rounds)), given.json)


if __name__ == "__main__":
    main()
