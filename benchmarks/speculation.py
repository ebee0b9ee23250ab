"""Measure speculative decoding: whether it changes a token, and what it gains.

    python -m benchmarks.speculation [--rounds N] [--only PART ...] [--quick] [--json FILE]

One process: the product's decode and prefill workers, on engines of baton-tiny or, for the formula,
of the random 0.45 B model of `benchmarks.engine_cpu`; KV moves within the process. Runs with and
without speculation alternate; a speed is the median over rounds of a round's ratio.

tokens_equal                         share of answers that equal plain decoding: float32 and, with
                                     `worker.deterministic`, bfloat16; greedy, seeded, n = 3,
                                     penalties, biases, stop tokens; local, by handoff, and
                                     continued on another worker after the first was killed
acceptance_disaggregated_over_local  accepted share of the draft's proposals, by handoff over local
speedup_over_formula_aN              an oracle that is right with probability 0.N, batch 1: measured
                                     speed-up over (1 + a + .. + a^k) / (step of k + 1 rows over one
                                     row), both from the same run
throughput_ratio_bs64                tokens a second of 192 chats, 64 at once, on (ngram) over off
speedup_baton_tiny_bs1               the shipped draft, one chat at a time, on over off
speedup_suffix                       suffix decoding of edits, one at a time, on over off
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from baton.decode_worker.speculator import Speculator
from baton.engine.speculation.ngram_proposer import NgramProposer
from baton.engine.speculation.suffix_proposer import SuffixProposer
from baton.models.embedded import embedded_draft, embedded_model
from baton.runtime import logs
from baton.simulation.fleet.client import Client, Request
from baton.simulation.fleet.oracle_proposer import OracleProposer
from benchmarks.figures.report import Figure, at_least, parser, report
from benchmarks.fleets.fixed_speculators import FixedDraft
from benchmarks.fleets.oracle_speedup import WITHIN_S, OraclePair, until
from benchmarks.fleets.speculating_cluster import SpeculatingCluster
from benchmarks.inputs.cached_model import VOCABULARY, cached_model
from benchmarks.inputs.speculation_workloads import ChatPrompt, chats, edits

DRAFT_TOKENS = 4
ANSWER_TOKENS = 40
FORMULA_TOKENS = 160
BATCH = 64
SHARES = (0.5, 0.7, 0.9)
RULES: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.8, "n": 3},
    {"temperature": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    {"logit_bias": {5: 3.0, 40: 2.0, 300: -4.0}},
)

Answers = list[list[int]]


@dataclass(frozen=True, slots=True)
class Served:
    """Some requests, the time until the last one ended, and what was proposed for them."""

    requests: list[Request]
    seconds: float
    processor_s: float  # of this process, all threads

    @property
    def answers(self) -> Answers:
        return [
            request.tokens(choice)
            for request in self.requests
            for choice in range(len(request.submit.choices))
        ]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.answers))

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def accepted_share(self) -> float:
        outputs = [output for request in self.requests for output in request.outputs]
        accepted = sum(output.accepted_proposal for output in outputs)
        rejected = sum(output.rejected_proposals for output in outputs)
        return accepted / max(1, accepted + rejected)


class TinyTexts:
    """Prompts as baton-tiny reads them."""

    def __init__(self) -> None:
        self._tokenizer = Tokenizer.from_file(str(embedded_model() / "tokenizer.json"))
        self.end = self._tokenizer.token_to_id("<|end|>")

    def ask(self, prompt: ChatPrompt, **how: Any) -> dict[str, Any]:
        tokens = self._tokenizer.encode(prompt.text, add_special_tokens=False).ids
        fields = {"max_tokens": ANSWER_TOKENS, "stop": (self.end,), "salt": prompt.tenant, **how}
        return {"prompt": tokens, **fields}


async def serve(
    cluster: SpeculatingCluster, asks: Sequence[dict[str, Any]], *, at_once: int
) -> Served:
    """Send the requests in their order, so many at once."""
    client, slots = Client(cluster, "decode-0"), asyncio.Semaphore(at_once)
    started_s, processor_s = time.perf_counter(), time.process_time()

    async def served(ask: dict[str, Any]) -> Request:
        async with slots:
            request = client.submit(**ask)
            await request.finished(WITHIN_S)
            return request

    requests = list(await asyncio.gather(*map(served, asks)))
    seconds = time.perf_counter() - started_s
    return Served(requests, seconds, time.process_time() - processor_s)


@contextlib.asynccontextmanager
async def cluster_of(
    folder: Path, speculator: Callable[[], Speculator | None], **how: Any
) -> AsyncIterator[SpeculatingCluster]:
    made = SpeculatingCluster(folder, speculator, **how)
    try:
        yield made
    finally:
        await made.close()


async def tokens_equal(texts: TinyTexts, count: int) -> Figure:
    """Compare every answer of a worker that speculates with that of one that does not."""
    same = total = 0
    prompts = chats(1, count)
    asks = [
        texts.ask(prompt, local=local, **rules)
        for prompt in prompts
        for rules in RULES
        for local in (True, False)
    ]
    for how in ({"dtype": "float32"}, {"dtype": "bfloat16", "deterministic": True}):
        async with cluster_of(embedded_model(), lambda: None, **how) as plain:
            wanted = (await serve(plain, asks, at_once=BATCH)).answers
        oracle = OracleProposer(0.7)
        oracle.texts = text_answers(asks, wanted)
        for speculator, draft in (
            (partial(Speculator, oracle, DRAFT_TOKENS), None),
            (partial(Speculator, None, DRAFT_TOKENS), embedded_draft()),
        ):
            async with cluster_of(embedded_model(), speculator, draft=draft, **how) as on:
                found = (await serve(on, asks, at_once=BATCH)).answers
                found += await after_a_kill(on, asks)
            pairs = list(zip(found, [*wanted, *single_answers(asks, wanted)], strict=True))
            same += sum(one == other for one, other in pairs)
            total += len(pairs)
    return at_least("tokens_equal", same / total, 1.0, "")


async def after_a_kill(cluster: SpeculatingCluster, asks: Sequence[dict[str, Any]]) -> Answers:
    """The answers with one choice, of which another worker gives what a killed one has not."""
    cluster.add_decode("decode-1", cluster.blocks)
    single = [ask for ask in asks if ask.get("n", 1) == 1]
    first = Client(cluster, "decode-0")
    begun = [first.submit(**ask) for ask in single]
    await until(lambda: all(len(each.outputs) > 3 or each.ended.is_set() for each in begun))
    cluster.decode["decode-0"].task.cancel()
    await asyncio.wait([cluster.decode["decode-0"].task])
    second = Client(cluster, "decode-1")
    answers = []
    for ask, request in zip(single, begun, strict=True):
        tokens = request.tokens()
        ended = len(tokens) == ask["max_tokens"] or tokens[-1:] == [ask["stop"][0]]
        if not ended:
            rest = second.submit(**ask, accepted=tokens)
            await rest.finished(WITHIN_S)
            tokens += rest.tokens()
        answers.append(tokens)
    return answers


def text_answers(asks: Sequence[dict[str, Any]], answers: Answers) -> Answers:
    """Return each choice's prompt and answer as one text."""
    found, at = [], 0
    for ask in asks:
        for _ in range(ask.get("n", 1)):
            found.append([*ask["prompt"], *answers[at]])
            at += 1
    return found


def single_answers(asks: Sequence[dict[str, Any]], answers: Answers) -> Answers:
    """Return the answers of the requests with one choice."""
    found, at = [], 0
    for ask in asks:
        count = ask.get("n", 1)
        found += answers[at : at + count] if count == 1 else []
        at += count
    return found


async def acceptance_ratio(texts: TinyTexts, count: int) -> Figure:
    """The draft's accepted share: its KV of the prompt was computed elsewhere, and moved."""
    shares = []
    for local in (False, True):
        asks = [texts.ask(prompt, local=local) for prompt in chats(2, count)]
        make = partial(FixedDraft, DRAFT_TOKENS)
        async with cluster_of(embedded_model(), make, draft=embedded_draft()) as cluster:
            shares.append((await serve(cluster, asks, at_once=1)).accepted_share)
    ratio = shares[0] / shares[1]
    beside = f"limits: 0.99 to 1.01; {shares[0]:.3f} over {shares[1]:.3f} accepted"
    return Figure("acceptance_disaggregated_over_local", ratio, "", beside, 0.99 <= ratio <= 1.01)


async def formula(rounds: int, tokens: int) -> list[Figure]:
    """The measured speed-up of an oracle over what its acceptance and the steps' costs allow."""
    pair = OraclePair(DRAFT_TOKENS)
    async with cluster_of(
        cached_model(), pair.speculator, prefill=False, dtype="bfloat16"
    ) as cluster:
        cluster.add_decode("decode-1", cluster.blocks)
        ratios = await pair.ratios(cluster, VOCABULARY, SHARES, rounds=rounds, tokens=tokens)
    return [
        at_least(f"speedup_over_formula_a{round(10 * share)}", statistics.median(found), 0.9)
        for share, found in ratios.items()
    ]


@dataclass(frozen=True, slots=True)
class Gain:
    """The ratios of on to off, medians over rounds, and the accepted share of the last round."""

    tokens_per_s: float
    tokens_per_processor_s: float  # other processes change it little
    accepted_share: float


async def gain(
    asks: Sequence[dict[str, Any]],
    speculator: Callable[[], Speculator],
    *,
    rounds: int,
    at_once: int,
    draft: Path | None = None,
    first: int = 1,
) -> Gain:
    """`first`: rounds before those that count, in which the worker learns what its steps cost."""
    ratios, processor, share = [], [], 0.0
    async with (
        cluster_of(embedded_model(), lambda: None, prefill=False) as off,
        cluster_of(embedded_model(), speculator, prefill=False, draft=draft) as on,
    ):
        for number in range(-first, rounds):
            order = (off, on) if number % 2 else (on, off)
            served = {each: await serve(each, asks, at_once=at_once) for each in order}
            share = served[on].accepted_share
            if number >= 0:
                ratios.append(served[on].tokens_per_s / served[off].tokens_per_s)
                processor.append(
                    (served[on].tokens / served[on].processor_s)
                    / (served[off].tokens / served[off].processor_s)
                )
    return Gain(statistics.median(ratios), statistics.median(processor), share)


async def large_batch(asks: Sequence[dict[str, Any]], rounds: int) -> Figure:
    """Speculation by n-grams of more chats than run at once, so that the batch stays full."""
    gained = await gain(
        asks,
        lambda: Speculator(NgramProposer(), DRAFT_TOKENS),
        rounds=4 * rounds,  # a round is 3 s long, and differs from the next by a tenth
        at_once=BATCH,
        first=3,
    )
    limit = at_least("throughput_ratio_bs64", gained.tokens_per_s, 0.98)
    beside = f"{limit.beside}; by processor time {gained.tokens_per_processor_s:.3f}"
    return Figure(limit.name, gained.tokens_per_s, "", beside, limit.holds)


async def lone_requests(
    name: str,
    asks: Sequence[dict[str, Any]],
    make: Callable[[], Speculator],
    rounds: int,
    **how: Any,
) -> Figure:
    """One request at a time."""
    gained = await gain(asks, make, rounds=rounds, at_once=1, **how)
    beside = f"{gained.accepted_share:.2f} of the proposals accepted"
    return Figure(name, gained.tokens_per_s, "", beside)


PARTS = ("equal", "acceptance", "formula", "large_batch", "draft", "suffix")


async def measure(rounds: int, only: Sequence[str], *, quick: bool) -> list[Figure]:
    texts, found = TinyTexts(), []
    few, many, tokens = (2, 4, 24) if quick else (6, 3 * BATCH, FORMULA_TOKENS)
    if "equal" in only:
        found.append(await tokens_equal(texts, few))
    if "acceptance" in only:
        found.append(await acceptance_ratio(texts, 4 * few))
    if "formula" in only:
        found += await formula(rounds, tokens)
    if "large_batch" in only:
        found.append(
            await large_batch([texts.ask(each, local=True) for each in chats(3, many)], rounds)
        )
    if "draft" in only:
        asks = [texts.ask(prompt, local=True) for prompt in chats(4, few)]
        make, draft = partial(Speculator, None, DRAFT_TOKENS), embedded_draft()
        found.append(await lone_requests("speedup_baton_tiny_bs1", asks, make, rounds, draft=draft))
    if "suffix" in only:
        asks = [texts.ask(prompt, local=True) for prompt in edits(5, 2, few)]
        make = partial(Speculator, SuffixProposer(), 8)
        found.append(await lone_requests("speedup_suffix", asks, make, rounds))
    return found


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--rounds", type=int, default=2, metavar="N")
    options.add_argument("--quick", action="store_true", help="less of all: to see that it runs")
    options.add_argument(
        "--only", nargs="+", choices=PARTS, default=PARTS, help="these parts alone"
    )
    given = options.parse_args()
    logs.setup("benchmark", "critical")  # workers are killed on purpose
    figures = asyncio.run(measure(given.rounds, given.only, quick=given.quick))
    report(figures, given.json, ["Accepted lengths of arctic-inference were not measured."])


if __name__ == "__main__":
    main()
