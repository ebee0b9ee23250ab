"""The cost of masks in a step: 32 rows that a grammar constrains over 32 plain ones.

    python -m benchmarks.constrained_step_cost --json FILE

    masked   submit 32 masks ─▶ forward pass: a wait of 20 ms ─▶ wait for the masks ─▶ draw
    plain                       forward pass                  ─▶                       draw

The forward pass of a device leaves the processors to the mask threads; where a CPU computes the
model, masks compete with it, so that each millisecond of them is half a millisecond of two cores.
The vocabulary has 150,000 tokens. Steps with and without masks alternate; a ratio is that of the
medians. Beside each stands the floor of this run: what the processor time of a step's masks, shared
by the mask threads, exceeds the forward pass by, over a plain step. Knows no engine.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from baton.engine.cpu_draws.sampling_numba import compiled_sampler
from baton.engine.sampling.draw_plan import Sampler, one_draw_each
from baton.engine.scheduling.batch import Draw
from baton.runtime.errors import InvalidRequest
from baton.runtime.grammar.choice_masks import ChoiceMasks, MaskThreads, TokenMask
from baton.runtime.grammar.grammar_compiler import MASK_THREADS
from baton.runtime.grammar.grammar_text import json_schema_grammar
from baton.runtime.grammar.matcher import CompiledGrammar, compile_grammar
from baton.runtime.grammar.vocabulary import Vocabulary, build_vocabulary
from baton.runtime.sampling import SamplingParams
from benchmarks.figures.report import Figure, at_most, parser, report
from benchmarks.inputs.constrained_schemas import Schema, all_schemas

VOCABULARY = 150_000
ROWS = 32
DEVICE_S = 0.02
STEPS = 40
LOGITS = 4  # of different steps
LIMIT = 1.05
_STRINGS: Schema = {
    "type": "object",
    "properties": {"rows": {"type": "array", "items": {"type": "string"}}},
    "required": ["rows"],
}


class ConstrainedRow:
    """The answers of one row, which begins another when one has ended."""

    def __init__(self, grammar: CompiledGrammar, threads: MaskThreads) -> None:
        self._grammar, self._threads = grammar, threads
        self._end = grammar.vocabulary.tokenizer.eos_token
        self._begin()

    def _begin(self) -> None:
        self._output: list[int] = []
        self.masks = ChoiceMasks(self._grammar, self._output, self._threads)

    def accept(self, token: int) -> None:
        if token == self._end:
            self._begin()
        else:
            self._output.append(token)


class TimedMasks:
    """Counts the processor time of masks."""

    def __init__(self, threads: MaskThreads) -> None:
        self._threads = threads
        self.seconds: list[float] = []  # of each mask

    def submit(self, work: Callable[[], bytes | None], /) -> Future[bytes | None]:
        return self._threads.submit(lambda: self._timed(work))

    def _timed(self, work: Callable[[], bytes | None]) -> bytes | None:
        started_s = time.thread_time()
        try:
            return work()
        finally:
            self.seconds.append(time.thread_time() - started_s)


@dataclass(slots=True)
class StepParts:
    """Seconds of each step, and of its parts."""

    steps: list[float] = field(default_factory=list)
    submits: list[float] = field(default_factory=list)
    forwards: list[float] = field(default_factory=list)  # more than 20 ms: the processors were busy
    waits: list[float] = field(default_factory=list)  # for masks, after the forward pass
    draws: list[float] = field(default_factory=list)

    def add(self, clock: Sequence[float]) -> None:
        """Add a step by the times at which its parts began, and its end."""
        begun, submitted, computed, awaited, drawn = clock
        self.steps.append(drawn - begun)
        self.submits.append(submitted - begun)
        self.forwards.append(computed - submitted)
        self.waits.append(awaited - computed)
        self.draws.append(drawn - awaited)

    def parts(self) -> str:
        parts = {
            "submit": self.submits,
            "forward": self.forwards,
            "wait": self.waits,
            "draw": self.draws,
        }
        return ", ".join(f"{n} {1e3 * statistics.median(each):.2f}" for n, each in parts.items())


def large_vocabulary(size: int) -> Vocabulary:
    """Made of bytes, and of pieces of text like those of a tokenizer."""
    draws = random.Random(1)
    letters = b'abcdefghijklmnopqrstuvwxyzABCDE0123456789_{}[]":,.-'
    tokens: dict[bytes, None] = {bytes([byte]): None for byte in range(256)}
    while len(tokens) < size - 1:
        head = b" " if draws.random() < 0.4 else b""
        tokens[head + bytes(draws.choices(letters, k=draws.randrange(2, 9)))] = None
    return build_vocabulary([*tokens, b"<end>"], [size - 1])


def step_costs() -> Iterator[Figure]:
    """Measure rows of one grammar, then rows of 32 grammars, greedy and at random."""
    vocabulary = large_vocabulary(VOCABULARY)
    one = compile_grammar(json_schema_grammar(_STRINGS), vocabulary)
    greedy, random_draws = SamplingParams(temperature=0.0), SamplingParams(temperature=0.8)
    yield _measured("step_cost_bs32", [one] * ROWS, greedy)
    mixed = _grammars(vocabulary, ROWS)
    yield _measured("step_cost_mixed_bs32", mixed, greedy)
    yield _measured("step_cost_mixed_random_bs32", mixed, random_draws)
    yield _mask_times(mixed)


def _grammars(vocabulary: Vocabulary, count: int) -> list[CompiledGrammar]:
    """The first `count` schemas, of different kinds, of which a grammar can be made."""
    found: list[CompiledGrammar] = []
    schemas = list(all_schemas())
    random.Random(2).shuffle(schemas)
    for _, schema in schemas:
        try:
            found.append(compile_grammar(json_schema_grammar(schema), vocabulary))
        except InvalidRequest:
            continue
        if len(found) == count:
            break
    return found


@dataclass(frozen=True, slots=True)
class StepShape:
    """The steps that are measured: their draws, without masks."""

    logits: Tensor  # float32 [LOGITS, rows, vocab], in turns
    params: SamplingParams
    sampler: Sampler


def _measured(name: str, grammars: Sequence[CompiledGrammar], params: SamplingParams) -> Figure:
    dice = torch.Generator().manual_seed(1)
    logits = torch.randn(LOGITS, len(grammars), VOCABULARY, generator=dice)
    shape = StepShape(logits, params, compiled_sampler())
    times = {True: StepParts(), False: StepParts()}
    with ThreadPoolExecutor(MASK_THREADS) as threads:
        masks = TimedMasks(threads)
        rows = [ConstrainedRow(grammar, masks) for grammar in grammars]
        for number in range(-1, STEPS):  # the first one warms up
            for masked in (number % 2 == 0, number % 2 == 1):
                into = times[masked] if number >= 0 else StepParts()
                _step(shape, rows if masked else None, number, into)
    plain_s = statistics.median(times[False].steps)
    ratio = statistics.median(times[True].steps) / plain_s
    mask_s = sum(masks.seconds) / (STEPS + 1)
    floor = 1 + max(0.0, mask_s / MASK_THREADS - DEVICE_S) / plain_s
    limit = at_most(name, ratio, LIMIT)
    parts = f"ms, masked: {times[True].parts()}; plain: {times[False].parts()}"
    used = f"masks {1e3 * mask_s:.2f} ms of processors a step, floor {floor:.3f}"
    return Figure(name, ratio, "", f"{limit.beside}; {used}; {parts}", limit.holds)


def _step(
    shape: StepShape, rows: Sequence[ConstrainedRow] | None, number: int, times: StepParts
) -> None:
    logits = shape.logits[number % LOGITS].clone()
    clock = [time.perf_counter()]
    allowed: Sequence[TokenMask | None] = [None] * len(logits)
    if rows is not None:
        allowed = [row.masks.mask(start=True) for row in rows]
    draws = [Draw(0, number + 1, shape.params, None, each) for each in allowed]
    plan = one_draw_each(draws)
    clock.append(time.perf_counter())
    time.sleep(DEVICE_S)  # a device computes the forward pass; the host's cores are free
    clock.append(time.perf_counter())
    for each in allowed:
        assert each is None or each.bitmask() is not None  # each of the rows is masked
    clock.append(time.perf_counter())
    drawn = shape.sampler(logits, plan)
    clock.append(time.perf_counter())
    times.add(clock)
    for row, found in zip(rows or (), drawn, strict=bool(rows)):
        row.accept(found.token)


def _mask_times(grammars: Sequence[CompiledGrammar]) -> Figure:
    """Measure masks alone in one thread, along random answers."""
    dice, found = random.Random(3), list[float]()
    for grammar in grammars:
        matcher = grammar.matcher()
        for _ in range(STEPS):
            started_s = time.perf_counter()
            bits = matcher.bitmask()
            found.append(1e3 * (time.perf_counter() - started_s))
            if bits is None or matcher.consume([dice.choice(_admitted(bits))]) != 1:
                break  # the answer has ended
    found.sort()
    beside = f"p50 {found[len(found) // 2]:.2f}, p99 {found[len(found) * 99 // 100]:.2f}"
    return Figure("mask_ms", statistics.mean(found), "ms", f"processor time of a row; {beside}")


def _admitted(bits: bytes) -> list[int]:
    found = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")
    return np.flatnonzero(found).tolist()


def main() -> None:
    options = parser(__doc__.partition("\n")[0]).parse_args()
    report(list(step_costs()), options.json)


if __name__ == "__main__":
    main()
