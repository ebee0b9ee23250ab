"""The simulation itself: its client must see broken protocol, its cluster must see what is held."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from baton.engine.scheduling.blocks import Hold
from baton.proto import worker_pb2
from baton.runtime.config import Config, HandoffConfig, PoolConfig
from baton.runtime.errors import Unavailable
from baton.simulation.fleet.client import Client, ProtocolBroken, Request
from baton.simulation.fleet.cluster import Cluster
from tests.support.waiting import eventually


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    made = Cluster(Config(pool=PoolConfig(block_size=4), handoff=HandoffConfig(lease_s=0.3)))
    made.add_prefill("prefill-0", 32)
    made.add_prefill("prefill-1", 32)
    made.add_decode("decode-0", 32)
    yield made
    await made.close()


def request(accepted: int = 0, choices: int = 1) -> Request:
    return Request(
        worker_pb2.Submit(
            request_id="r",
            max_tokens=8,
            choices=[worker_pb2.Choice(choice=c, accepted=[0] * accepted) for c in range(choices)],
        )
    )


def output(index: int, token: int | None, end: int = 0, choice: int = 0) -> worker_pb2.Output:
    made = worker_pb2.Output(request_id="r", attempt=1, choice=choice, index=index)
    made.end = end
    if token is not None:
        made.token = token
    return made


def test_outputs_in_order_are_the_tokens() -> None:
    seen = request()
    for one in (output(0, 5), output(1, 6), output(2, None, worker_pb2.CANCELLED)):
        seen.emit(one)
    assert seen.tokens() == [5, 6] and seen.end().end == worker_pb2.CANCELLED


@pytest.mark.parametrize("indices", [[1], [0, 2], [0, 0], [0, 1, 1], [1, 0]])
def test_a_missing_repeated_or_late_index_breaks_the_protocol(indices: list[int]) -> None:
    seen = request()
    for index in indices:
        seen.emit(output(index, 5))
    with pytest.raises(ProtocolBroken, match="indices"):
        seen.tokens()


def test_a_retry_that_repeats_an_accepted_token_is_a_breach() -> None:
    seen = request(accepted=2)
    seen.emit(output(2, 5))
    assert seen.tokens() == [5]
    repeated = request(accepted=2)
    repeated.emit(output(0, 5))
    with pytest.raises(ProtocolBroken, match="indices"):
        repeated.tokens()


def test_anything_behind_the_end_breaks_the_protocol() -> None:
    for late in (output(1, 6), output(1, None, worker_pb2.CANCELLED)):
        seen = request()
        seen.emit(output(0, 5, worker_pb2.LENGTH))
        seen.emit(late)
        with pytest.raises(ProtocolBroken, match="after the end"):
            seen.tokens()


async def test_a_request_is_finished_with_all_its_choices() -> None:
    seen = request(choices=2)
    seen.emit(output(0, 5, worker_pb2.LENGTH, choice=1))
    with pytest.raises(TimeoutError):
        await seen.finished(within_s=0.01)
    seen.emit(output(0, 5, worker_pb2.LENGTH, choice=0))
    await seen.finished(within_s=0.01)


async def test_a_held_block_is_not_quiet_and_its_worker_is_named(cluster: Cluster) -> None:
    await cluster.quiet()
    held = cluster.decode["decode-0"].pool.allocate(1, Hold.LEASED)
    with pytest.raises(TimeoutError, match="decode-0"):
        await cluster.quiet(within_s=0.03)
    cluster.decode["decode-0"].pool.release(held, Hold.LEASED)
    await cluster.quiet()


async def test_a_killed_worker_leaves_no_candidate_stream_or_task(
    cluster: Cluster,
) -> None:
    node = cluster.prefill["prefill-0"]
    seen = Client(cluster, "decode-0").submit(list(range(30)))

    def links() -> list[bytes]:
        return [boot_id for _, boot_id in cluster.open_links if boot_id == node.worker.boot_id]

    await eventually(links)
    assert len(links()) == 1
    await cluster.kill_prefill("prefill-0")
    assert node.task.done()
    assert [candidate.worker_id for candidate in cluster.candidates()] == ["prefill-1"]
    with pytest.raises(Unavailable, match="no such worker"):
        cluster.handoff_stream(node.worker.boot_id)
    await seen.finished()
    assert seen.tokens() == seen.expected()
    await cluster.quiet()


async def test_ids_are_never_given_twice(cluster: Cluster) -> None:
    ids = [cluster.new_id() for _ in range(50)]
    boots = [node.worker.boot_id for node in cluster.prefill.values()]
    assert len({*ids, *boots}) == len(ids) + len(boots)
    assert {len(one) for one in ids} == {16}
