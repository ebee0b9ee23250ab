"""Conversations whose history is not computed again: a prefill worker READs what another worker
holds, and whatever befalls that READ, the answer is the same and nothing is held."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import Counter, Gauge

from baton.engine.scheduling.blocks import Hold
from baton.kv_transfer.memory_mover import Attempt, Fate
from baton.kv_transfer.peers.peer_client import HandoffLink
from baton.prefill_worker.cached_reads import CONTACT_S
from baton.prefill_worker.worker import PrefillWorker
from baton.proto import worker_pb2
from baton.runtime import handoff_metrics, metrics
from baton.runtime.config import Config, HandoffConfig, PoolConfig, StepConfig
from baton.runtime.errors import Unavailable
from baton.simulation.fleet.client import Client, Request
from baton.simulation.fleet.cluster import Cluster, MemoryPeers, Node
from tests.support.metric_values import metric_sum, metric_value
from tests.support.virtual_time import at_the_end, on_virtual_time

BLOCK = 4
HISTORY = list(range(100, 142))  # tokens of the first turn's prompt
ANSWER_TOKENS = 21
NEW = [7, 8, 9, 10, 11, 12, 13]  # tokens that the second turn adds
HELD = (len(HISTORY) + ANSWER_TOKENS - 1) // BLOCK  # full blocks; the last token is not computed


class Talk:
    """A prefill worker and a decode worker, or several, and a conversation of two turns."""

    def __init__(self, blocks: int = 64, prefill: int = 1, decode: int = 1) -> None:
        self.cluster = Cluster(
            Config(
                pool=PoolConfig(block_size=BLOCK),
                step=StepConfig(prefill_tokens=16, chunk_tokens=16, max_prompts=2),
                handoff=HandoffConfig(
                    lease_s=1.0, read_timeout_s=0.5, read_bytes=1, window_reads=2
                ),
            ),
            step_s=lambda batch: 0.01,
        )
        at_the_end(self.cluster.close)
        for number in range(prefill):
            self.cluster.add_prefill(f"prefill-{number}", blocks)
        for number in range(decode):
            self.cluster.add_decode(f"decode-{number}", 64)
        self.client = Client(self.cluster, "decode-0")

    async def first_turn(self) -> list[int]:
        """Return the second turn's prompt."""
        first = self.client.submit(HISTORY, max_tokens=ANSWER_TOKENS)
        await first.finished()
        assert first.tokens() == first.expected()
        return [*HISTORY, *first.tokens(), *NEW]

    def second_turn(
        self, prompt: list[int], source: worker_pb2.Source | None = None, **fields: Any
    ) -> Request:
        source = source or self.cluster.source("decode-0", HELD)
        return self.client.submit(prompt, max_tokens=5, source=source, **fields)

    async def answered(self, request: Request) -> None:
        await request.finished()
        assert request.tokens() == request.expected()
        await self.cluster.quiet()

    def faults(self, decide: Callable[[Attempt], Fate | None]) -> None:
        """Decide the fate of READs from decode workers; None: the usual one."""
        boot_ids = {node.worker.boot_id for node in self.cluster.decode.values()}
        before = self.cluster.exchange.decide

        def fate(attempt: Attempt) -> Fate:
            own = decide(attempt) if attempt.granter in boot_ids else None
            return own or before(attempt)

        self.cluster.exchange.decide = fate

    @property
    def prefill(self) -> Node[PrefillWorker]:
        return self.cluster.prefill["prefill-0"]


def counted(metric: Counter | Gauge) -> float:
    return metric_value(metric)


def attempts() -> float:
    """How many prompts have read, whatever came of it."""
    (family,) = handoff_metrics.CACHED_READS.collect()
    return sum(sample.value for sample in family.samples if sample.name.endswith("_total"))


def computed_tokens() -> float:
    return counted(metrics.TOKENS.labels("prompt"))


@on_virtual_time
async def test_second_turn_computes_only_what_no_worker_holds() -> None:
    talk = Talk()
    prompt = await talk.first_turn()
    before, read = computed_tokens(), counted(handoff_metrics.CACHED_READ_BLOCKS)
    second = talk.second_turn(prompt)
    await talk.answered(second)
    assert computed_tokens() - before == len(prompt) - HELD * BLOCK
    assert counted(handoff_metrics.CACHED_READ_BLOCKS) - read == HELD - len(HISTORY) // BLOCK
    assert second.outputs[0].cached_tokens == HELD * BLOCK
    pool = talk.cluster.prefill["prefill-0"].pool
    assert pool.counts().cached == len(prompt) // BLOCK  # what was READ serves the next turn


@on_virtual_time
async def test_prefill_workers_read_from_each_other_too() -> None:
    talk = Talk(prefill=2)
    prompt = await talk.first_turn()  # at the first of them
    first, second = talk.cluster.candidates()
    before = computed_tokens()
    talk.cluster.candidates = lambda: [second]
    blocks = len(HISTORY) // BLOCK
    request = talk.second_turn(prompt, talk.cluster.source(first.worker_id, blocks))
    await talk.answered(request)
    assert computed_tokens() - before == len(prompt) - blocks * BLOCK


@on_virtual_time
async def test_a_wrong_block_is_read_again_and_then_computed() -> None:
    talk = Talk()
    prompt = await talk.first_turn()
    wrong = 2  # READs with a flipped bit, of one block each
    reads = 0

    def flips(attempt: Attempt) -> Fate | None:
        nonlocal reads
        reads += 1
        return Fate(corrupt=0, bit=9) if attempt.checksummed and reads <= wrong else None

    talk.faults(flips)
    before, blocks = computed_tokens(), counted(handoff_metrics.CACHED_READ_BLOCKS)
    failures = counted(handoff_metrics.CHECKSUM_FAILURES)
    await talk.answered(talk.second_turn(prompt))
    assert counted(handoff_metrics.CHECKSUM_FAILURES) - failures == wrong
    read = counted(handoff_metrics.CACHED_READ_BLOCKS) - blocks
    held = len(HISTORY) // BLOCK + read
    assert read == HELD - len(HISTORY) // BLOCK  # two blocks, each read again once
    assert computed_tokens() - before == len(prompt) - held * BLOCK


FATES: dict[str, Fate] = {
    "corrupt": Fate(corrupt=0, bit=3),
    "failed": Fate(failed=True),
    "short": Fate(short=0),
    "stuck": Fate(stuck=True),
}


@pytest.mark.parametrize("fate", FATES)
@pytest.mark.parametrize("good", range(6))
@on_virtual_time
async def test_blocks_after_a_failed_read_are_computed(fate: str, good: int) -> None:
    """Each READ from a number on fails; those before it count."""
    talk = Talk()
    prompt = await talk.first_turn()
    reads = 0

    def fails(attempt: Attempt) -> Fate | None:
        nonlocal reads
        reads += 1
        return FATES[fate] if reads > good else None

    talk.faults(fails)
    blocks, before = counted(handoff_metrics.CACHED_READ_BLOCKS), computed_tokens()
    request = talk.second_turn(prompt)
    await request.finished()
    assert request.tokens() == request.expected()
    read = int(counted(handoff_metrics.CACHED_READ_BLOCKS) - blocks)
    wanted = HELD - len(HISTORY) // BLOCK
    assert read == min(good, wanted)
    assert computed_tokens() - before == len(prompt) - (len(HISTORY) // BLOCK + read) * BLOCK
    if fate == "stuck" and good < wanted:
        assert talk.prefill.pool.counts().quarantined > 0
        talk.cluster.exchange.release_stuck()
    await talk.cluster.quiet()


@on_virtual_time
async def test_no_prompt_waits_for_a_source_that_has_just_failed() -> None:
    talk = Talk()
    prompt = await talk.first_turn()
    talk.faults(lambda attempt: Fate(failed=True))
    await talk.answered(talk.second_turn(prompt))
    failed = counted(handoff_metrics.CACHED_READS.labels("failed"))
    others = [*prompt[:-1], 99, *range(40)]
    await talk.answered(talk.second_turn(others, talk.cluster.source("decode-0", 50)))
    assert counted(handoff_metrics.CACHED_READS.labels("failed")) == failed


@on_virtual_time
async def test_a_queued_prompt_does_not_ask_a_source_that_failed_since() -> None:
    talk = Talk(blocks=18)  # room for one prompt
    prompt = await talk.first_turn()
    talk.faults(lambda attempt: Fate(failed=True, delay_s=0.05))
    others = range(500, 500 + len(prompt))
    reads = attempts()
    for request in [talk.second_turn(prompt), talk.second_turn([*others])]:
        await request.finished()
        assert request.tokens() == request.expected()
    await talk.cluster.quiet()
    assert attempts() - reads == 1


@on_virtual_time
async def test_only_what_the_source_still_holds_is_read() -> None:
    talk = Talk()
    prompt = await talk.first_turn()
    partial = counted(handoff_metrics.CACHED_READS.labels("partial"))
    before = computed_tokens()
    await talk.answered(
        talk.second_turn([*prompt, *range(30)], talk.cluster.source("decode-0", 24))
    )
    assert counted(handoff_metrics.CACHED_READS.labels("partial")) - partial == 1
    assert computed_tokens() - before == len(prompt) + 30 - HELD * BLOCK


@pytest.mark.parametrize("steps", range(1, 12))
@on_virtual_time
async def test_the_source_may_die_at_any_time(steps: int) -> None:
    talk = Talk(decode=2)
    prompt = await talk.first_turn()
    other = Client(talk.cluster, "decode-1")
    talk.faults(lambda attempt: Fate(delay_s=0.01))
    request = other.submit(prompt, max_tokens=5, source=talk.cluster.source("decode-0", HELD))
    await asyncio.sleep(0.003 * steps)
    await talk.cluster.kill_decode("decode-0")
    await request.finished()
    assert request.tokens() == request.expected()
    await talk.cluster.quiet()


@pytest.mark.parametrize("steps", range(0, 14, 2))
@on_virtual_time
async def test_a_cancelled_request_ends_its_reads(steps: int) -> None:
    talk = Talk()
    prompt = await talk.first_turn()
    talk.faults(lambda attempt: Fate(delay_s=0.01))
    request = talk.second_turn(prompt)
    await asyncio.sleep(0.003 * steps)
    talk.client.cancel(request)
    await talk.cluster.quiet()
    await talk.answered(talk.second_turn(prompt))


@on_virtual_time
async def test_lost_destinations_make_a_prompt_wait_again() -> None:
    talk = Talk(blocks=20)  # the prompt needs 18
    prompt = await talk.first_turn()
    held = talk.prefill.pool.allocate(2, Hold.USED)
    talk.faults(lambda attempt: Fate(stuck=True) if attempt.checksummed else None)
    queried, queued = counted(metrics.PREFIX_QUERIED_TOKENS), metric_sum(metrics.QUEUE_SECONDS)
    request = talk.second_turn(prompt)
    await asyncio.sleep(1.5)
    counts = talk.prefill.pool.counts()
    assert counts.quarantined == 2 and not request.ended.is_set()
    assert talk.prefill.worker.audit()["waiting"] == 1
    talk.prefill.pool.release(held, Hold.USED)
    talk.cluster.exchange.release_stuck()
    await talk.answered(request)
    assert counted(metrics.PREFIX_QUERIED_TOKENS) - queried == 2 * len(prompt)  # once at each end
    assert metric_sum(metrics.QUEUE_SECONDS) - queued < 0.5  # not from its arrival again


@on_virtual_time
async def test_lost_destinations_may_leave_too_few_for_a_prompt() -> None:
    """Its reader asks again until there is room, as it asks any worker that is full."""
    talk = Talk(blocks=18)  # as many as the prompt needs
    prompt = await talk.first_turn()
    talk.faults(lambda attempt: Fate(stuck=True) if attempt.checksummed else None)
    request = talk.second_turn(prompt)
    await asyncio.sleep(1.5)
    assert talk.prefill.pool.counts().quarantined == 2 and not request.ended.is_set()
    assert talk.prefill.worker.audit()["waiting"] == 0
    talk.cluster.exchange.release_stuck()
    await talk.answered(request)


@pytest.mark.parametrize("wait_s", [0.05, 5.0])
@on_virtual_time
async def test_no_prompt_waits_long_for_a_first_contact(
    monkeypatch: pytest.MonkeyPatch, wait_s: float
) -> None:
    """Of `wait_s` seconds; a source that was not reached is asked again by a later turn."""
    opened = MemoryPeers.open

    async def open_late(
        peers: MemoryPeers, candidate: worker_pb2.Candidate, contact_s: float = math.inf
    ) -> HandoffLink:
        if contact_s < math.inf:
            await asyncio.sleep(min(wait_s, contact_s))
            if wait_s > contact_s:
                raise Unavailable("the first contact takes longer")
        return await opened(peers, candidate, contact_s)

    monkeypatch.setattr(MemoryPeers, "open", open_late)
    talk = Talk()
    prompt = await talk.first_turn()
    loop, before = asyncio.get_running_loop(), counted(handoff_metrics.CACHED_READ_BLOCKS)
    begun_s = loop.time()
    second = talk.second_turn(prompt)
    await talk.answered(second)
    assert loop.time() - begun_s < 0.7
    assert (counted(handoff_metrics.CACHED_READ_BLOCKS) > before) == (wait_s < CONTACT_S)
    wait_s, before = 0.0, counted(handoff_metrics.CACHED_READ_BLOCKS)
    await asyncio.sleep(2.0)
    longer = [*prompt, *second.tokens(), *NEW]
    await talk.answered(talk.second_turn(longer, talk.cluster.source("decode-0", len(longer) // 4)))
    assert counted(handoff_metrics.CACHED_READ_BLOCKS) > before


@on_virtual_time
async def test_a_source_that_drains_is_not_waited_for() -> None:
    talk = Talk(decode=2)
    prompt = await talk.first_turn()
    talk.cluster.decode["decode-0"].worker.draining.set()
    other = Client(talk.cluster, "decode-1")
    request = other.submit(prompt, max_tokens=5, source=talk.cluster.source("decode-0", HELD))
    await talk.answered(request)


@on_virtual_time
async def test_a_decode_worker_pins_nothing_that_it_has_promised() -> None:
    """Its running sequences have credit for all of its pool."""
    talk = Talk(decode=2)
    prompt = await talk.first_turn()
    source = talk.cluster.source("decode-0", HELD)
    busy = talk.client.submit(list(range(600, 748)), max_tokens=100, local=True)
    await asyncio.sleep(0.05)
    node = talk.cluster.decode["decode-0"]
    spare = node.pool.available - node.worker.load().promised_blocks
    assert 0 <= spare < HELD - len(HISTORY) // BLOCK
    other = Client(talk.cluster, "decode-1")
    before = counted(handoff_metrics.CACHED_READ_BLOCKS)
    request = other.submit(prompt, max_tokens=5, source=source)
    await request.finished()
    assert request.tokens() == request.expected()
    assert counted(handoff_metrics.CACHED_READ_BLOCKS) - before <= spare
    talk.client.cancel(busy)
    await talk.cluster.quiet()
