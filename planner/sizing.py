"""How many workers of each role some load needs, by a timing model and the size of a pool.

    prefill   a prompt takes S seconds; N workers are busy for rps * S / N of the time.
              Mean wait of a queue with equal service times (M/D/1): busy * S / (2 (1 - busy)).
    decode    a batch of b sequences takes t(b) seconds for b tokens. A worker that is to emit r
              tokens a second settles at the least b with b / t(b) >= r  (Little's law).
              Its pool holds these, and the prompts that are prefilled for it (rate * TTFT).

A role gets the smallest number of workers that stays below MAX_PREFILL_BUSY, or MAX_BATCH_SHARE of
batch and pool, and meets its objective. Means, not tails: bursts, cached prefixes and lengths that
differ are `baton simulate`'s. Pure.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator
from dataclasses import dataclass

from baton.planner.timing_model import StepWork, TimingModel
from baton.runtime.worker.attention_pairs import causal_pairs

MAX_PREFILL_BUSY = 0.75
MAX_BATCH_SHARE = 0.9
MAX_WORKERS = 100_000


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of equal lengths; objectives in seconds."""

    requests_per_s: float
    prompt_tokens: int
    output_tokens: int
    ttft_s: float = math.inf
    itl_s: float = math.inf

    @property
    def tokens_per_s(self) -> float:
        """Return the output tokens of all requests a second."""
        return self.requests_per_s * self.output_tokens


@dataclass(frozen=True, slots=True)
class PrefillSize:
    """`busy`: share of the time. `ttft_s`: mean, with the wait. `unmet`: the objective cannot be
    met by any number of workers."""

    workers: int
    prompt_s: float
    tokens_per_s: float  # of one worker
    busy: float
    ttft_s: float
    unmet: bool


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """Sequences of a worker: in a batch, and of the load's whole length in the pool."""

    batch: int
    pool: int


@dataclass(frozen=True, slots=True)
class DecodeSize:
    """`sequences`: mean batch of a worker; `reserved`: mean of sequences that its pool has room
    for while their prompts are prefilled. `unmet`: as above."""

    workers: int
    sequences: int
    reserved: float
    step_s: float
    tokens_per_s: float  # of one worker with its largest batch
    unmet: bool


def size_prefill(load: Load, timing: TimingModel, chunk_tokens: int) -> PrefillSize:
    """Return the size of the prefill role; a step computes up to `chunk_tokens` of one prompt."""
    chunks = list(_chunks(load.prompt_tokens, chunk_tokens))
    prompt_s = sum(
        timing.step_s(StepWork(prompt_tokens=end - start, pairs=causal_pairs(start, end)))
        for start, end in chunks
    )
    tail = chunks[-1][1] - chunks[-1][0]  # earlier chunks move while later ones are computed
    other_s = timing.host_s(load.prompt_tokens) + timing.transfer_s(tail)
    work = load.requests_per_s * prompt_s
    workers = max(1, math.ceil(work / MAX_PREFILL_BUSY))
    unmet = prompt_s + other_s >= load.ttft_s
    if not unmet and load.ttft_s < math.inf:
        # wait <= slack  <=>  busy <= 2 slack / (prompt + 2 slack)
        slack = load.ttft_s - prompt_s - other_s
        workers = max(workers, math.ceil(work * (prompt_s + 2 * slack) / (2 * slack)))
        unmet = workers > MAX_WORKERS
    busy = work / workers
    return PrefillSize(
        workers=workers,
        prompt_s=prompt_s,
        tokens_per_s=load.prompt_tokens / prompt_s,
        busy=busy,
        ttft_s=prompt_s + other_s + busy * prompt_s / (2 * (1 - busy)),
        unmet=unmet,
    )


def size_decode(
    load: Load, timing: TimingModel, limits: DecodeLimits, prefill: PrefillSize
) -> DecodeSize:
    """Return the size of the decode role. The blocks of a request are reserved on the decode
    worker before its prompt is prefilled (by `prefill`)."""
    room = max(1, int(MAX_BATCH_SHARE * min(limits.batch, limits.pool)))
    unmet = _step_s(load, timing, 1) > load.itl_s
    batches = range(1, room + 1)
    if not unmet:
        within = bisect.bisect_right(batches, load.itl_s, key=lambda b: _step_s(load, timing, b))
        batches = batches[:within]
    largest = batches[-1]
    tokens_per_s = largest / _step_s(load, timing, largest)

    def batch_of(workers: int) -> int:
        each = load.tokens_per_s / workers
        at = bisect.bisect_left(batches, each, key=lambda b: b / _step_s(load, timing, b))
        return batches[min(at, len(batches) - 1)]

    def held(workers: int) -> float:
        return batch_of(workers) + load.requests_per_s / workers * prefill.ttft_s

    least = max(1, math.ceil(load.tokens_per_s / tokens_per_s))
    counts = range(least, max(least + 1, MAX_WORKERS))
    pool = max(1.0, MAX_BATCH_SHARE * limits.pool)
    at = bisect.bisect_left(counts, True, key=lambda workers: held(workers) <= pool)
    workers = counts[min(at, len(counts) - 1)]
    sequences = batch_of(workers)
    return DecodeSize(
        workers=workers,
        sequences=sequences,
        reserved=load.requests_per_s / workers * prefill.ttft_s,
        step_s=_step_s(load, timing, sequences),
        tokens_per_s=tokens_per_s,
        unmet=unmet,
    )


def _step_s(load: Load, timing: TimingModel, sequences: int) -> float:
    """Return the seconds of a step; a sequence has half of its output on average."""
    context = load.prompt_tokens + load.output_tokens / 2
    return timing.step_s(StepWork(sequences=sequences, context_tokens=sequences * context))


def _chunks(tokens: int, chunk_tokens: int) -> Iterator[tuple[int, int]]:
    for start in range(0, tokens, chunk_tokens):
        yield start, min(start + chunk_tokens, tokens)
