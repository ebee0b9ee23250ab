"""Measure later turns of long chats, whose history no worker computes again: real processes, NIXL.

    python -m benchmarks.multi_turn [--chats N] [--quick] [--trace FILE] [--json FILE]

A prefill and a decode worker, the random bf16 model of 0.45 B parameters of benchmarks.handoff, one
greedy request at a time. A chat has six turns: a first prompt of 1,500 tokens, answers of 48, and
32 new tokens a turn. The prefill worker computes each turn's prompt. It has the prompt before in
its own cache, except in turn 2: turn 1 was computed by the decode worker. It READs the rest from
the decode worker, which has all of it: 1,500 tokens in turn 2, an answer in each turn after it. The
benchmark is the router: it names the decode worker as the source, as placement does.
Beside each turn, a new prompt of the same length is computed as a whole, in the same way.

recomputed_share     of the tokens of a turn's history (its last prompt and answer), those that the
                     prefill worker computed once more; turns 2 to 6, all together. No turn before
                     computes the answer's last token, and a part of a block cannot be READ.
ttft_over_recompute  time from submit to first token of a turn, over that of the new prompt beside
                     it; the median of turns 2 to 6. `..._all_read` is that of turn 2 alone.
computed_over_least  prompt tokens that 4 prefill and 4 decode workers compute on virtual time for
                     2,000 chats of the Mooncake conversation trace (`--trace`), or 200 drawn ones,
                     by the product's placement and index, over those that had to be: which no
                     earlier prompt and no answer of the chat has, in blocks of one token, with
                     endless memory. `..._without_reads`: where nothing is read from other workers.
"""

from __future__ import annotations

from baton.runtime import tls_version  # noqa: F401  before anything imports grpc

# isort: split
import argparse
import asyncio
import os
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.models.embedded import embedded_model
from baton.runtime.telemetry import tracing
from benchmarks.figures.report import Figure, at_most, parser, report
from benchmarks.fleets.chat_replay import ChatReplay
from benchmarks.fleets.span_collector import SpanCollector
from benchmarks.fleets.worker_pair import Answer, RouterLink, WorkerPair, chunk_settings
from benchmarks.inputs.cached_model import cached_model
from benchmarks.inputs.chats import from_trace, least_tokens, synthetic

HISTORY_TOKENS = 1500  # of the first turn's prompt
ANSWER_TOKENS = 48
NEW_TOKENS = 32
TURNS = 6
TOKENS = range(16, 2048)  # that any of the models has
BLOCK_TOKENS = 16
CHUNK_TOKENS = 256
POOL_BLOCKS = 1024
CHATS = 3
TRACE_CHATS, DRAWN_CHATS = 2000, 200  # replayed
WORKERS = 4  # of each role, in the replay
WARM_UP_TURNS = 2  # of a chat before the others
SPANS_S = 15.0


@dataclass(frozen=True, slots=True)
class TurnTimes:
    """One turn, and the new prompt beside it."""

    number: int
    history_tokens: int
    answer: Answer
    recomputed: Answer
    prompt_tokens: int


class MultiTurnBench:
    def __init__(self, pair: WorkerPair, collector: SpanCollector) -> None:
        self._pair = pair
        self._collector = collector
        self._random = random.Random(os.urandom(8))
        self.turns: list[TurnTimes] = []

    async def run(self, chats: int) -> None:
        link = RouterLink(self._pair.wait_ready(), self._pair.token, self._pair.tls)
        try:
            await link.open()
            await self._chat(link, WARM_UP_TURNS)
            for _ in range(chats):
                self.turns += await self._chat(link, TURNS)
        finally:
            await link.close()

    async def _chat(self, link: RouterLink, turns_of_chat: int) -> list[TurnTimes]:
        prompt = self._tokens(HISTORY_TOKENS)
        answer = await link.ask(prompt, ANSWER_TOKENS, local=True)
        turns = []
        for number in range(2, turns_of_chat + 1):
            history = [*prompt, *answer.tokens]
            prompt = [*history, *self._tokens(NEW_TOKENS)]
            held = (len(history) - 1) // BLOCK_TOKENS
            answer = await link.ask(prompt, ANSWER_TOKENS, local=False, held_blocks=held)
            new = await link.ask(self._tokens(len(prompt)), 2, local=False)
            turns.append(TurnTimes(number, len(history), answer, new, len(prompt)))
        return turns

    def recomputed_tokens(self, turn: TurnTimes) -> int:
        """Return how many tokens of a turn's history the prefill worker computed."""
        span = self._collector.find(turn.answer.trace_id, tracing.PREFILL, SPANS_S)
        return max(0, turn.history_tokens - int(span.received["cached_tokens"]))

    def read_tokens(self, turn: TurnTimes) -> int:
        span = self._collector.find(turn.answer.trace_id, tracing.PREFILL, SPANS_S)
        return int(span.received["read_tokens"])

    def _tokens(self, count: int) -> list[int]:
        return self._random.choices(TOKENS, k=count)


def figures(bench: MultiTurnBench, threads: int) -> list[Figure]:
    turns = bench.turns
    recomputed = sum(map(bench.recomputed_tokens, turns))
    history = sum(turn.history_tokens for turn in turns)
    second = [turn for turn in turns if turn.number == 2]
    return [
        at_most("recomputed_share", recomputed / history, 0.02),
        at_most("ttft_over_recompute", _ratio(turns), 0.5),
        Figure("ttft_over_recompute_all_read", _ratio(second), "", "turn 2"),
        Figure("ttft_ms", _ms([turn.answer for turn in turns]), "ms"),
        Figure("all_read_ttft_ms", _ms([turn.answer for turn in second]), "ms", "turn 2"),
        Figure("recompute_ttft_ms", _ms([turn.recomputed for turn in turns]), "ms"),
        Figure("read_tokens", sum(map(bench.read_tokens, turns)) / len(turns), "", "of a turn"),
        Figure("turns", len(turns)),
        Figure("threads_per_worker", threads),
    ]


def replay_figures(trace: Path | None) -> list[Figure]:
    chats = synthetic(DRAWN_CHATS) if trace is None else from_trace(trace, TRACE_CHATS)
    least = least_tokens(chats)
    counts = ChatReplay(chats, WORKERS, WORKERS).run()
    without = ChatReplay(chats, WORKERS, WORKERS).run(read_cached=False)
    return [
        at_most("computed_over_least", counts.computed / least, 1.03),
        Figure("computed_over_least_without_reads", without.computed / least),
        Figure("replayed_chats", len(chats), "", "drawn" if trace is None else trace.name),
        Figure("replayed_turns", counts.turns),
        Figure("least_tokens", least),
        Figure("replay_read_tokens", counts.read),
        Figure("replay_local_turns", counts.local),
    ]


def _ratio(turns: Sequence[TurnTimes]) -> float:
    return statistics.median(turn.answer.ttft_s / turn.recomputed.ttft_s for turn in turns)


def _ms(answers: Sequence[Answer]) -> float:
    return statistics.median(answer.ttft_s for answer in answers) * 1e3


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    model = options.model or (embedded_model() if options.quick else cached_model())
    collector = SpanCollector()
    pair = WorkerPair(
        model,
        [
            f"pool.blocks={POOL_BLOCKS}",
            f"pool.block_size={BLOCK_TOKENS}",
            f"telemetry.otlp_endpoint={collector.endpoint}",
            *chunk_settings(CHUNK_TOKENS),
            *options.set,
        ],
    )
    try:
        bench = MultiTurnBench(pair, collector)
        asyncio.run(bench.run(options.chats))
        found = figures(bench, pair.threads)
    finally:
        pair.close()
        collector.close()
    report([*found, *replay_figures(options.trace)], options.json)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    made = parser("Later turns of long chats")
    made.add_argument("--chats", type=int, default=CHATS)
    made.add_argument("--trace", type=Path, help="conversation_trace.jsonl of Mooncake")
    made.add_argument("--quick", action="store_true", help="the small embedded model instead")
    made.add_argument("--model", type=Path, help="another model's folder")
    made.add_argument("--set", action="append", default=[], help="a setting, SECTION.KEY=VALUE")
    return made.parse_args(arguments)


if __name__ == "__main__":
    main()
