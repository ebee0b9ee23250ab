"""Conversations through real processes, whose workers migrate, drain and change their roles: later
turns READ their history, and each answer is that of a worker that computes all of it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from chaos.cluster import Cluster
from tests.support.conversation import SHOWN_S, talk

pytestmark = [pytest.mark.timeout(600), pytest.mark.nightly]

TURNS = 4
LONG = 400  # tokens of an answer: computing them again takes twice as long as a READ and more
SETTINGS = ("router.placement=disaggregated", "handoff.lease_s=1.0")


@contextmanager
def fleet(folder: Path, prefill: int, decode: int) -> Iterator[Cluster]:
    cluster = Cluster(folder, SETTINGS)
    try:
        yield cluster.start(prefill, decode)
    finally:
        cluster.close()
        print(cluster.logs())


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """The answers of a worker that computes all by itself."""
    alone = Cluster(tmp_path_factory.mktemp("alone"), ("router.read_cached=false",))
    try:
        alone.start(0, 1)
        return asyncio.run(talk(alone.url, TURNS, max_tokens=LONG))
    finally:
        alone.close()


async def test_a_migrated_turn_is_read_by_the_next(
    expected: list[list[int]], tmp_path: Path, until: Callable[..., Awaitable[None]]
) -> None:
    """The worker that decodes the second answer is killed; later turns read from the other."""
    with fleet(tmp_path, 1, 2) as cluster:
        killed: list[str] = []

        def strike() -> bool:
            busy = [name for name in decoders(cluster) if cluster.audit(name)["running"]]
            if busy:
                cluster.kill(busy[0])
                killed.append(busy[0])
            return bool(busy)

        async def between(turn: int) -> None:
            if turn == 1:
                tasks.append(asyncio.create_task(until(strike)))
            elif turn == 2:
                before.append(reads(cluster))

        tasks: list[asyncio.Task[None]] = []
        before: list[float] = []
        assert await talk(cluster.url, TURNS, between, max_tokens=LONG) == expected
        await asyncio.gather(*tasks)
        assert len(killed) == 1 and len(decoders(cluster)) == 1
        assert reads(cluster) >= before[0] + 1
        cluster.quiet(within_s=8.0)


@pytest.mark.parametrize("change", ["drain", "role"])
async def test_a_granter_that_leaves_costs_no_answer(
    change: str, expected: list[list[int]], tmp_path: Path
) -> None:
    """The decode worker with the history drains, or becomes a prefill worker, before the second
    turn, which another one decodes; later turns read from that."""
    with fleet(tmp_path, 1, 2) as cluster:

        async def between(turn: int) -> None:
            if turn != 1:
                return
            (holder,) = [
                name
                for name in decoders(cluster)
                if cluster.metric(name, "baton_tokens_total", kind="output")
            ]
            if change == "drain":
                await asyncio.to_thread(cluster.kill, holder, signal.SIGTERM)
                assert await asyncio.to_thread(cluster.wait_end, holder) == 0
            else:
                await asyncio.to_thread(cluster.change_role, holder, "prefill")

        assert await talk(cluster.url, TURNS, between, max_tokens=LONG) == expected
        assert reads(cluster) >= 1
        cluster.quiet(within_s=8.0)


async def test_a_reader_that_changes_its_role_costs_no_answer(
    expected: list[list[int]], tmp_path: Path
) -> None:
    """The reader becomes a decode worker; the worker in its place holds nothing, and reads."""
    with fleet(tmp_path, 2, 1) as cluster:

        async def between(turn: int) -> None:
            if turn == 1:
                (reader,) = [
                    name
                    for name in cluster.workers()
                    if name.startswith("prefill")
                    and cluster.metric(name, "baton_tokens_total", kind="prompt")
                ]
                await asyncio.to_thread(cluster.change_role, reader, "decode")
                # Routers have to hear of the cached blocks; they report no end of that.
                await asyncio.sleep(SHOWN_S)

        assert await talk(cluster.url, TURNS, between, max_tokens=LONG) == expected
        assert reads(cluster) >= 1
        cluster.quiet(within_s=8.0)


def decoders(cluster: Cluster) -> list[str]:
    return [name for name in cluster.records() if name.startswith("decode")]


def reads(cluster: Cluster) -> float:
    """Return how many READs of cached blocks the living workers have completed."""
    return sum(
        cluster.metric(name, "baton_cached_reads_total", outcome="complete")
        for name in cluster.records()
    )
