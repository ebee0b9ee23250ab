"""Measure the cost of a handoff: a prefill and a decode worker as real processes, NIXL and gRPC
between.

    python -m benchmarks.handoff [--rounds N] [--unlike-rounds N] [--quick] [--json FILE]

A random bf16 model of 0.45 B parameters (28 layers, 1.75 MiB of KV in a block of 16 tokens),
prompts of 1,024 random tokens, no two with a common prefix, computed in chunks of 256 on either
worker; greedy; one request at a time. Each worker has as many threads as `baton serve` gives it.
The benchmark is the router: it holds a link to the decode worker, and collects the spans of both.
A round runs each of these once, so that all share the machine's moods; figures are medians:

    disaggregated   a new prompt, prefilled on the prefill worker
    raw             the same blocks again, by one bare NIXL READ into the pool of this process
    local           a new prompt, prefilled by the decode worker itself
    fetch           the same blocks again, by the product's reader and mover in this process,
                    which hear the offers when all is computed: nothing runs beside the fetch;
                    as often as the raw READ, and the median of these as there
    cached          a new prompt that only the prefill worker has cached, after a raw READ of it:
                    all its full blocks but the last are offered at once, while the last is computed

read_efficiency         GB/s of the idle fetch of a prompt's blocks, from the first offer heard to
                        the last block verified, over GB/s of the raw READ of these blocks in the
                        same round. The decode worker's own fetches are given beside it:
                        ..._beside_prefill of a cached prompt, while the prefill worker computes,
                        and ..._last_chunk, whose fixed costs count in the overhead below.
handoff_overhead_ms_p50 from the prefill worker's loop having the result of the last chunk's step,
                        to the decode worker's scheduler having put the sequence into its batch,
                        less the raw READ of that chunk's blocks. Verification counts as overhead.
ttft_ratio_1024         time from submit to first token, disaggregated over local.
second_token_ratio_1024 gap between first and second token disaggregated, over a decode step of
                        the local run (the median gap between its later tokens).
unequal_over_equal_ttft time to the first token by a decode worker with another number of ranks than
                        the prefill worker, over that by one with the same number: 1 and 2, and 2
                        and 1, the larger; fleets of their own (benchmarks.fleets.unlike_pairs.py).
unequal_sizes_over_equal_ttft   the same of blocks of 16 and 32 tokens, and 32 and 16; ..._second is
                        of the time to the second token, which needs all blocks in order.

Spans carry wall time; both workers take it from the same host's clocks.
"""

from __future__ import annotations

from baton.runtime import tls_version  # noqa: F401  before anything imports grpc

# isort: split
import argparse
import asyncio
import os
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from baton.deploy.processes.worker_process import SWITCH_INTERVAL_S
from baton.engine.spec.model_spec import ModelSpec, read_spec
from baton.kv_transfer import handshake
from baton.models.embedded import embedded_model
from baton.proto import handoff_pb2, worker_pb2
from baton.runtime.config import HandoffConfig
from baton.runtime.telemetry import tracing
from benchmarks.figures.idle_fetch import IdleFetch
from benchmarks.figures.raw_read import REPEATS, RawReader
from benchmarks.figures.report import Figure, at_least, at_most, parser, report
from benchmarks.fleets.span_collector import SpanCollector
from benchmarks.fleets.unlike_pairs import of_ranks, of_sizes, unlike_ratios
from benchmarks.fleets.worker_pair import Answer, RouterLink, WorkerPair, chunk_settings
from benchmarks.inputs.cached_model import cached_model

PROMPT_TOKENS = 1024
TOKENS = range(16, 2048)  # that any of the models has
CHUNK_TOKENS = 256
BLOCK_TOKENS = 16
OUTPUT_TOKENS = 8
POOL_BLOCKS = 192
RAW_BLOCKS = 160
ROUNDS = 12
UNLIKE_ROUNDS = 7
UNLIKE = {
    "unequal_over_equal_ttft": [of_ranks(1, 2), of_ranks(2, 1)],
    "unequal_sizes_over_equal_ttft": [
        of_sizes(*sizes, POOL_BLOCKS * BLOCK_TOKENS) for sizes in ((16, 32), (32, 16))
    ],
}
WARM_UPS = 2  # enough prompts to have touched every block of the pools
SPANS_S = 15.0


@dataclass(slots=True)
class HandoffTimes:
    """The measurements, one entry a round, in seconds."""

    ttft: list[float] = field(default_factory=list)
    local_ttft: list[float] = field(default_factory=list)
    second: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    raw_all: list[float] = field(default_factory=list)  # a block, of all blocks in one READ
    fetch_idle: list[float] = field(default_factory=list)  # a block, of all blocks
    raw_last: list[float] = field(default_factory=list)  # of the disaggregated prompt
    fetch_all: list[float] = field(default_factory=list)  # a block, of a cached prompt
    fetch_last: list[float] = field(default_factory=list)
    landed_last: list[float] = field(default_factory=list)
    heard_after: list[float] = field(default_factory=list)  # the last chunk's result
    tail: list[float] = field(default_factory=list)  # from there to the batch


class HandoffBench:
    """One pair of workers, one run of rounds."""

    def __init__(self, pair: WorkerPair, collector: SpanCollector, spec: ModelSpec) -> None:
        self._pair = pair
        self._collector = collector
        self._spec = spec
        self._random = random.Random(os.urandom(8))
        self._asked: list[tuple[Answer, Answer]] = []  # disaggregated, cached
        self.rounds = HandoffTimes()

    async def run(self, rounds: int) -> None:
        records = self._pair.wait_ready()
        link = RouterLink(records, self._pair.token, self._pair.tls)
        raw = RawReader(link.candidate, self._pair.token, self._pair.tls)
        idle = IdleFetch(link.candidate, self._pair.token, self._pair.tls, HandoffConfig())
        try:
            common = self._common(await link.open())
            await raw.connect(common, RAW_BLOCKS)
            await idle.connect(common, raw.block_bytes, PROMPT_TOKENS // BLOCK_TOKENS)
            for number in range(-WARM_UPS, rounds):
                await self._round(link, raw, idle, keep=number >= 0)
        finally:
            await link.close()
            await raw.close()
            await idle.close()
        self.block_bytes = raw.block_bytes
        for apart, cached in self._asked:
            self._read_spans(apart)
            self._read_cached(cached)

    def _common(self, hello: worker_pb2.WorkerHello) -> handoff_pb2.Compatibility:
        spec = self._spec
        return handshake.compatibility(
            hello.model_fingerprint,
            hello.kv_dtype,
            hello.block_size,
            spec.layers,
            spec.kv_heads,
            spec.head_dim,
        )

    async def _round(
        self, link: RouterLink, raw: RawReader, idle: IdleFetch, *, keep: bool
    ) -> None:
        prompt = self._prompt()
        apart = await link.ask(prompt, OUTPUT_TOKENS, local=False)
        _, raw_last = await raw.times(prompt, CHUNK_TOKENS // BLOCK_TOKENS)
        local = await link.ask(self._prompt(), OUTPUT_TOKENS, local=True)
        prompt = self._prompt()
        raw_block, _ = await raw.times(prompt, CHUNK_TOKENS // BLOCK_TOKENS)
        fetches = [await idle.seconds(prompt, BLOCK_TOKENS) for _ in range(REPEATS)]
        fetch_block = statistics.median(fetches)
        cached = await link.ask(prompt, OUTPUT_TOKENS, local=False)
        if not keep:
            return
        self._asked.append((apart, cached))
        kept = self.rounds
        kept.ttft.append(apart.ttft_s)
        kept.local_ttft.append(local.ttft_s)
        kept.second.append(apart.gaps_s[0])
        kept.step.append(statistics.median(local.gaps_s[1:]))
        kept.raw_all.append(raw_block)
        kept.fetch_idle.append(fetch_block)
        kept.raw_last.append(raw_last)

    def _read_spans(self, answer: Answer) -> None:
        find, trace = self._collector.find, answer.trace_id
        last = (PROMPT_TOKENS - CHUNK_TOKENS) // BLOCK_TOKENS
        computed = find(trace, tracing.CHUNK, SPANS_S, end=PROMPT_TOKENS).end_s
        fetch = find(trace, tracing.FETCH, SPANS_S, first=last)
        batched = find(trace, tracing.DECODE, SPANS_S).received["batched_s"]
        self.rounds.heard_after.append(fetch.start_s - computed)
        self.rounds.landed_last.append(fetch.received["landed_s"] - fetch.start_s)
        self.rounds.fetch_last.append(fetch.end_s - fetch.start_s)
        self.rounds.tail.append(batched - computed)

    def _read_cached(self, answer: Answer) -> None:
        fetch = self._collector.find(answer.trace_id, tracing.FETCH, SPANS_S, first=0)
        self.rounds.fetch_all.append((fetch.end_s - fetch.start_s) / fetch.received["blocks"])

    def _prompt(self) -> list[int]:
        return self._random.choices(TOKENS, k=PROMPT_TOKENS)


def figures(rounds: HandoffTimes, block_bytes: int, threads: int) -> list[Figure]:
    """The four of the module's head, then what they are made of."""
    last_bytes = block_bytes * CHUNK_TOKENS // BLOCK_TOKENS
    efficiency = _ratios(rounds.raw_all, rounds.fetch_idle)
    beside = _ratios(rounds.raw_all, rounds.fetch_all)
    of_last = _ratios(rounds.raw_last, rounds.fetch_last)
    overhead = [(t - r) * 1e3 for t, r in zip(rounds.tail, rounds.raw_last, strict=True)]
    ttft = _median(rounds.ttft) / _median(rounds.local_ttft)
    second = _median(rounds.second) / _median(rounds.step)
    return [
        at_least("read_efficiency", _median(efficiency), 0.75),
        at_most("handoff_overhead_ms_p50", _median(overhead), 8.0, "ms"),
        at_most("ttft_ratio_1024", ttft, 1.05),
        at_most("second_token_ratio_1024", second, 1.35),
        Figure("handoff_overhead_ms_p90", _p90(overhead), "ms"),
        Figure("read_efficiency_p10", -_p90([-e for e in efficiency])),
        Figure("read_efficiency_beside_prefill", _median(beside)),
        Figure("read_efficiency_last_chunk", _median(of_last)),
        Figure("fetch_gb_per_s", block_bytes / _median(rounds.fetch_idle) / 1e9, "GB/s", "prompt"),
        Figure("raw_read_gb_per_s", block_bytes / _median(rounds.raw_all) / 1e9, "GB/s", "prompt"),
        Figure(
            "raw_read_last_gb_per_s", last_bytes / _median(rounds.raw_last) / 1e9, "GB/s", "last"
        ),
        Figure("raw_read_last_ms", _ms(rounds.raw_last), "ms", "last chunk"),
        Figure("offer_heard_ms", _ms(rounds.heard_after), "ms", "after last chunk computed"),
        Figure("landed_ms", _ms(rounds.landed_last), "ms", "after offer heard"),
        Figure("verified_ms", _ms(rounds.fetch_last), "ms", "after offer heard"),
        Figure("batched_ms", _ms(rounds.tail), "ms", "after last chunk computed"),
        Figure("ttft_ms", _ms(rounds.ttft), "ms", _spread(rounds.ttft)),
        Figure("local_ttft_ms", _ms(rounds.local_ttft), "ms", _spread(rounds.local_ttft)),
        Figure("second_token_ms", _ms(rounds.second), "ms", _spread(rounds.second)),
        Figure("local_step_ms", _ms(rounds.step), "ms", _spread(rounds.step)),
        Figure("rounds", len(rounds.ttft)),
        Figure("threads_per_worker", threads),
    ]


def _ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(above, below, strict=True)]


def unlike_figures(name: str, ratios: dict[str, list[tuple[float, float]]]) -> list[Figure]:
    """Return the figures of each pair, by their medians, and the largest one's limit."""
    each, largest = [], 0.0
    for pair, found in ratios.items():
        first, second = ([ratio[index] for ratio in found] for index in (0, 1))
        largest = max(largest, _median(first))
        for label, values in ((pair, first), (f"{pair}_second", second)):
            spread = f"{min(values):.3f} to {max(values):.3f}"
            each.append(Figure(f"{name}_{label}", _median(values), "", spread))
    return [at_most(name, largest, 1.05), *each]


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


def _p90(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.9 * len(values)))]


def _ms(seconds: Sequence[float]) -> float:
    return _median(seconds) * 1e3


def _spread(seconds: Sequence[float]) -> str:
    return f"{min(seconds) * 1e3:.1f} to {max(seconds) * 1e3:.1f}"


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # as in the worker whose reader and mover these are
    model = options.model or (embedded_model() if options.quick else cached_model())
    collector = SpanCollector()
    settings = [
        f"pool.blocks={POOL_BLOCKS}",
        f"pool.block_size={BLOCK_TOKENS}",
        *chunk_settings(CHUNK_TOKENS),
        *options.set,
    ]
    pair = WorkerPair(model, [*settings, f"telemetry.otlp_endpoint={collector.endpoint}"])
    try:
        bench = HandoffBench(pair, collector, read_spec(model))
        asyncio.run(bench.run(options.rounds))
    finally:
        pair.close()
        collector.close()
    found = figures(bench.rounds, bench.block_bytes, pair.threads)
    if options.unlike_rounds:
        prompt, rounds = (TOKENS, PROMPT_TOKENS), options.unlike_rounds
        for name, pairs in UNLIKE.items():
            ratios = {
                pair.name: asyncio.run(unlike_ratios(model, settings, pair, prompt, rounds))
                for pair in pairs
            }
            found += unlike_figures(name, ratios)
    report(found, options.json)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    made = parser("What a handoff costs")
    made.add_argument("--rounds", type=int, default=ROUNDS)
    made.add_argument(
        "--unlike-rounds",
        type=int,
        default=UNLIKE_ROUNDS,
        help="with unlike ranks and sizes; 0: none",
    )
    made.add_argument("--quick", action="store_true", help="the small embedded model instead")
    made.add_argument("--model", type=Path, help="another model's folder")
    made.add_argument("--set", action="append", default=[], help="a setting, SECTION.KEY=VALUE")
    return made.parse_args(arguments)


if __name__ == "__main__":
    main()
