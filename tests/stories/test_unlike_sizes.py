"""Prefill and decode workers with blocks of unlike sizes: tokens are those of a run without any
handoff, every READ is of whole blocks of the granter, and nothing is left behind."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
from prometheus_client import Counter, Gauge

from baton.engine.scheduling.blocks import BlockPool
from baton.kv_transfer.memory_mover import Attempt, Fate, MemoryMover
from baton.proto import worker_pb2
from baton.runtime import handoff_metrics, metrics
from baton.runtime.config import Config, HandoffConfig, PoolConfig, StepConfig
from baton.simulation.fleet.client import Client, Request
from baton.simulation.fleet.cluster import Cluster
from tests.support.machine_speed import slowness
from tests.support.metric_values import metric_value
from tests.support.waiting import eventually

SIZES = [(4, 8), (8, 4), (4, 16), (16, 4)]  # of the prefill worker, of the decode worker
LENGTHS = (1, 3, 4, 5, 8, 15, 16, 17, 31, 32, 33, 61)
OUTPUT = 24
LOCAL = handoff_metrics.LOCAL_PREFILLS.labels("no_candidate")
CHOOSER = random.Random(11)
PROMPT = [CHOOSER.randrange(1000) for _ in range(61)]


class Pair:
    """A prefill worker and a decode worker; `attempts` are all READs, `fate` is of the next one."""

    def __init__(self, prefill: int, decode: int, blocks: int = 80, lease_s: float = 5.0) -> None:
        step = StepConfig(prefill_tokens=48, chunk_tokens=16, local_prefill_tokens=16)
        handoff = HandoffConfig(lease_s=lease_s)
        self.cluster = Cluster(Config(pool=PoolConfig(prefill), step=step, handoff=handoff))
        self.cluster.block_size = prefill
        self.cluster.add_prefill("prefill-0", blocks)
        self.cluster.block_size = decode
        self.cluster.add_decode("decode-0", blocks)
        self.client = Client(self.cluster, "decode-0")
        self.local = 0  # prompts that no prefill worker can hand over
        self.attempts: list[Attempt] = []
        self.fates: list[Fate] = []
        self.cluster.exchange.decide = self._decide

    def _decide(self, attempt: Attempt) -> Fate:
        self.attempts.append(attempt)
        return self.fates.pop(0) if self.fates else Fate()

    @property
    def pools(self) -> tuple[BlockPool, BlockPool]:
        return self.cluster.prefill["prefill-0"].pool, self.cluster.decode["decode-0"].pool

    def ask(self, prompt: list[int] = PROMPT, **fields: Any) -> Request:
        return self.client.submit(prompt, max_tokens=fields.pop("max_tokens", OUTPUT), **fields)


@pytest.fixture
async def made() -> AsyncIterator[list[Pair]]:
    pairs: list[Pair] = []
    before = counted(LOCAL)
    yield pairs
    for pair in pairs:
        await pair.cluster.close()
    assert counted(LOCAL) - before == sum(pair.local for pair in pairs)


def start(made: list[Pair], *args: int, lease_s: float = 5.0) -> Pair:
    made.append(Pair(*args, lease_s=lease_s))
    return made[-1]


async def answered(request: Request, choice: int = 0) -> list[int]:
    await request.finished()
    assert request.end(choice).end == worker_pb2.LENGTH, request.end(choice)
    assert request.tokens(choice) == request.expected(choice)
    return request.tokens(choice)


def counted(metric: Counter | Gauge) -> float:
    return metric_value(metric)


@pytest.mark.parametrize("sizes", SIZES)
async def test_tokens_are_those_of_a_run_without_a_handoff(
    made: list[Pair], sizes: tuple[int, int]
) -> None:
    pair = start(made, *sizes)
    for number, length in enumerate(LENGTHS):
        before = counted(handoff_metrics.REORDERED_BLOCKS)
        await answered(pair.ask([number, *PROMPT[1:length]], temperature=number % 2))
        read = counted(handoff_metrics.REORDERED_BLOCKS) - before
        assert read == -(-length // sizes[0])  # the granter's blocks, each whole and once
        await pair.cluster.quiet()
    assert {len(a.remote) for a in pair.attempts} == {a.units for a in pair.attempts}


@pytest.mark.parametrize("sizes", SIZES)
async def test_a_granters_block_is_as_few_descriptors_as_it_can_be(
    made: list[Pair], sizes: tuple[int, int]
) -> None:
    """One for a block that an own one holds, and one for each own block that it fills."""
    prefill, decode = sizes
    pair = start(made, prefill, decode)
    await answered(pair.ask())
    mover = pair.cluster.decode["decode-0"].mover
    shape = mover.shape(pair.cluster.prefill["prefill-0"].worker.boot_id)
    assert len(shape.cuts) == max(1, prefill // decode)
    assert sum(cut.length for cut in shape.cuts) == shape.unit_bytes
    assert sum(attempt.units for attempt in pair.attempts) == -(-len(PROMPT) // prefill)


@pytest.mark.parametrize("sizes", SIZES)
async def test_a_cached_prefix_is_not_read_again(made: list[Pair], sizes: tuple[int, int]) -> None:
    """What the reader holds is rounded down to whole blocks of the granter."""
    prefill, decode = sizes
    pair = start(made, prefill, decode)
    await answered(pair.ask())
    await pair.cluster.quiet()
    pair.attempts.clear()
    for kept in (60, 40, 37, 20, 9):
        request = pair.ask([*PROMPT[:kept], 7, 8, 9])
        await answered(request)
        largest = max(prefill, decode)
        assert request.outputs[0].cached_tokens >= kept // largest * largest
        await pair.cluster.quiet()
    assert max(attempt.units for attempt in pair.attempts) * prefill <= 61 - 9


@pytest.mark.parametrize("sizes", SIZES)
async def test_siblings_share_a_prompt(made: list[Pair], sizes: tuple[int, int]) -> None:
    pair = start(made, *sizes)
    for length in (16, 21, 37):
        request = pair.ask(PROMPT[:length], n=3, temperature=1.0)
        for choice in range(3):
            await answered(request, choice)
        await pair.cluster.quiet()


@pytest.mark.parametrize("sizes", SIZES)
async def test_a_later_turn_reads_the_answer(made: list[Pair], sizes: tuple[int, int]) -> None:
    """The prefill worker READs what the decode worker holds, in the other direction, as far as the
    blocks of both end at the same token."""
    prefill, decode = sizes
    pair = start(made, prefill, decode)
    answer = await answered(pair.ask())
    await pair.cluster.quiet()
    prompt = [*PROMPT, *answer, 7, 8, 9]
    shown = (len(PROMPT) + OUTPUT - 1) // decode  # blocks that the router knows
    source = pair.cluster.source("decode-0", shown)
    read, computed = (
        counted(handoff_metrics.CACHED_READ_BLOCKS),
        counted(metrics.TOKENS.labels("prompt")),
    )
    await answered(pair.ask(prompt, source=source))
    whole = shown * decode // max(sizes) * max(sizes)
    assert counted(metrics.TOKENS.labels("prompt")) - computed == len(prompt) - whole
    assert counted(handoff_metrics.CACHED_READ_BLOCKS) - read > 0
    await pair.cluster.quiet()


@pytest.mark.parametrize("sizes", SIZES)
async def test_a_source_that_holds_less_is_read_as_far_as_it_does(
    made: list[Pair], sizes: tuple[int, int]
) -> None:
    prefill, decode = sizes
    pair = start(made, prefill, decode)
    answer = await answered(pair.ask())
    await pair.cluster.quiet()
    for more in (1, 2, 3, 5):
        source = pair.cluster.source("decode-0", (len(PROMPT) + OUTPUT - 1) // decode + more)
        prompt = [*PROMPT, *answer, *range(100 + more, 140 + more)]
        await answered(pair.ask(prompt, source=source))
        await pair.cluster.quiet()


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(
    "fate", [Fate(corrupt=0, bit=77), Fate(short=0), Fate(wrong=0)], ids=["bit", "short", "wrong"]
)
async def test_a_wrong_block_is_read_again(
    made: list[Pair], sizes: tuple[int, int], fate: Fate
) -> None:
    pair = start(made, *sizes)
    pair.fates = [fate]
    before = counted(handoff_metrics.CHECKSUM_FAILURES)
    await answered(pair.ask())
    assert counted(handoff_metrics.CHECKSUM_FAILURES) - before == 1
    await pair.cluster.quiet()


@pytest.mark.parametrize("sizes", SIZES)
async def test_stuck_reads_quarantine_each_block_once(
    made: list[Pair], sizes: tuple[int, int]
) -> None:
    """Several READs may have one own block as their destination."""
    pair = start(made, *sizes)
    pair.fates = [Fate(stuck=True)] * 3
    request = pair.ask()
    await eventually(lambda: pair.cluster.exchange.stuck >= 2)
    pair.client.cancel(request)
    own = pair.pools[1]
    await eventually(lambda: own.counts().quarantined)
    own.check()
    pair.fates.clear()
    pair.cluster.exchange.release_stuck()
    await pair.cluster.quiet()
    assert own.counts().quarantined == 0
    await answered(pair.ask())


@pytest.mark.parametrize("sizes", SIZES)
async def test_blocks_stay_in_quarantine_while_they_are_put_in_order(
    made: list[Pair], sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread does not stop when its fetch ends."""
    pair, begun, go = start(made, *sizes), asyncio.Event(), asyncio.Event()
    put_in_order = MemoryMover.put_in_order

    async def slow(self: MemoryMover, *args: Any) -> None:
        begun.set()
        await go.wait()
        await put_in_order(self, *args)

    monkeypatch.setattr(MemoryMover, "put_in_order", slow)
    request = pair.ask()
    await asyncio.wait_for(begun.wait(), 5 * slowness())
    pair.client.cancel(request)
    own = pair.pools[1]
    await eventually(lambda: own.counts().quarantined)
    own.check()
    go.set()
    await pair.cluster.quiet()
    assert own.counts().quarantined == 0


async def test_a_prompt_is_local_without_room_for_whole_blocks(made: list[Pair]) -> None:
    """11 blocks of 4 hold the 42 tokens and the answer, and no three blocks of 16."""
    pair = start(made, 16, 4, 11, lease_s=1.0)
    pair.local = 1
    await answered(pair.ask(PROMPT[:42], max_tokens=2))
    assert not pair.attempts
    await pair.cluster.quiet(within_s=10)  # its granter waits for an opening as long as a lease
