"""A prefill worker over real gRPC, on the hash engine: handshakes, a handoff, and the stop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc.aio
import pytest

from baton.kv_transfer import handshake
from baton.kv_transfer.peers.handoff_service import HandoffService
from baton.proto import handoff_pb2, handoff_pb2_grpc, worker_pb2
from baton.runtime.config import Config, HandoffConfig, PoolConfig, StepConfig
from baton.runtime.errors import Incompatible, InvalidRequest, LeaseLost, by_code
from baton.runtime.grpc_links import ClientLink, credentials, open_channel, open_server, translate
from baton.runtime.links import LinkClosed
from baton.runtime.sampling import SamplingParams
from baton.simulation.fleet.cluster import SLABS, VOCAB, Cluster, Node
from baton.simulation.fleet.hash_engine import expected_output
from tests.support.waiting import eventually

pytestmark = pytest.mark.timed

LIMIT_S = 30.0
LEASE_S = 60.0  # in which every reader here has long said closed
SHORT_MS = 1000
Link = ClientLink[handoff_pb2.ReaderMessage, handoff_pb2.GranterMessage]


@dataclass(slots=True)
class Served:
    node: Node[Any]
    service: HandoffService
    stub: Any
    mine: handoff_pb2.HandshakeMessage

    def open(self) -> Link:
        return ClientLink(self.stub.Open(metadata=credentials("token")))

    def opening(self, tokens: list[int], **fields: object) -> handoff_pb2.ReaderMessage:
        values: dict[str, Any] = {
            "handoff_id": b"h" * 16,
            "granter_boot_id": self.node.worker.boot_id,
            "reader_boot_id": b"r" * 16,
            "tokens": tokens,
            "prompt_tokens": len(tokens),
            "choices": [0],
            "sampling": worker_pb2.Sampling(top_p=1.0, repetition_penalty=1.0),
            "lease_ms": 600_000,  # the worker's own bound is shorter
        }
        return handoff_pb2.ReaderMessage(open=handoff_pb2.OpenHandoff(**{**values, **fields}))

    async def nothing_held(self) -> None:
        await eventually(lambda: not self.node.worker.audit()["open_handoffs"], LIMIT_S)
        counts = self.node.pool.counts()
        assert counts.available == counts.total


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    config = Config(
        pool=PoolConfig(block_size=4),
        step=StepConfig(prefill_tokens=16, chunk_tokens=8),
        handoff=HandoffConfig(lease_s=LEASE_S),
    )
    cluster = Cluster(config)
    node = cluster.add_prefill("prefill-0", 32)
    common = handshake.compatibility("hash-engine", "uint8", 4, 1, SLABS, 8)
    mine = handshake.build("prefill-0", node.mover.describe(), common)
    service = HandoffService(node.worker.grants, lambda: mine)
    server = open_server("token")
    handoff_pb2_grpc.add_HandoffServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = open_channel(f"127.0.0.1:{port}")
    stub = handoff_pb2_grpc.HandoffStub(channel)
    yield Served(node, service, stub, mine)
    await channel.close()
    await server.stop(grace=1.0)
    await cluster.close()


async def answers(link: Link, blocks: int) -> list[handoff_pb2.GranterMessage]:
    """All that the granter says until it has said all: offers, sums and first tokens."""
    heard: list[handoff_pb2.GranterMessage] = []
    offered = summed = 0
    async with asyncio.timeout(LIMIT_S):
        while not (
            offered >= blocks
            and summed >= blocks * SLABS
            and any(message.HasField("first_tokens") for message in heard)
        ):
            heard.append(await link.receive())
            offered += len(heard[-1].offer.blocks)
            summed += len(heard[-1].checksums.checksums)
    return heard


async def failure(link: Link) -> Exception:
    async with asyncio.timeout(LIMIT_S):
        while not (message := await link.receive()).HasField("failed"):
            continue
    return by_code(message.failed.code, message.failed.detail)


async def test_a_fitting_peer_gets_the_workers_own_handshake(served: Served) -> None:
    theirs = handoff_pb2.HandshakeMessage()
    theirs.CopyFrom(served.mine)
    theirs.worker_id = "decode-0"
    answer = await served.stub.Handshake(theirs, metadata=credentials("token"), timeout=LIMIT_S)
    assert answer == served.mine


async def test_reads_are_served_promptly_for_a_while_after_a_handshake(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.kv_transfer.peers.grants.EXPECTED_READS_S", 0.05)
    mover, held = served.node.mover, asyncio.Event()
    hold = mover.hold_progress

    def hold_progress() -> None:
        hold()
        assert mover.holds == 1
        held.set()

    monkeypatch.setattr(mover, "hold_progress", hold_progress)
    await served.stub.Handshake(served.mine, metadata=credentials("token"), timeout=LIMIT_S)
    assert held.is_set()
    await eventually(lambda: not mover.holds, LIMIT_S)


async def test_an_unfit_peer_gets_every_difference(served: Served) -> None:
    theirs = handoff_pb2.HandshakeMessage()
    theirs.CopyFrom(served.mine)
    theirs.compatibility.kv_dtype = "float32"
    theirs.compatibility.block_size = 16
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.stub.Handshake(theirs, metadata=credentials("token"), timeout=LIMIT_S)
    error = translate(caught.value)
    assert isinstance(error, Incompatible)
    assert "kv_dtype" in str(error) and "block_size" in str(error)


async def test_a_handoff_offers_every_block_until_the_reader_closes_it(
    served: Served,
) -> None:
    tokens = list(range(22))
    link = served.open()
    await link.send(served.opening(tokens))
    heard = await answers(link, 6)
    assert heard[0].opened.lease_ms == LEASE_S * 1000
    offers = [message.offer for message in heard if message.HasField("offer")]
    indices = [offer.first + at for offer in offers for at in range(len(offer.blocks))]
    assert indices == list(range(6))
    assert [offer.partial_tokens for offer in offers][-1] == 2
    (first,) = [message.first_tokens for message in heard if message.HasField("first_tokens")]
    wanted = expected_output(
        tokens, 1, SamplingParams(temperature=0.0), choice=0, slabs=SLABS, vocab_size=VOCAB
    )
    assert [token.token for token in first.tokens] == wanted
    assert served.node.pool.counts().pinned == 6
    await link.send(handoff_pb2.ReaderMessage(closed=handoff_pb2.Closed()))
    await link.close()
    await served.nothing_held()


async def test_a_prompt_seen_before_is_offered_from_the_cache(served: Served) -> None:
    for cached in (0, 8):
        link = served.open()
        await link.send(served.opening(list(range(10))))
        heard = await answers(link, 3)
        (first,) = [m.first_tokens for m in heard if m.HasField("first_tokens")]
        assert first.cached_tokens == cached
        await link.send(handoff_pb2.ReaderMessage(closed=handoff_pb2.Closed()))
        await link.close()
        await served.nothing_held()


async def test_a_bad_opening_is_refused_in_its_own_words(served: Served) -> None:
    link = served.open()
    await link.send(served.opening([VOCAB]))
    error = await failure(link)
    assert isinstance(error, InvalidRequest) and "outside the vocabulary" in str(error)
    with pytest.raises(LinkClosed):
        await asyncio.wait_for(link.receive(), LIMIT_S)
    await link.close()
    await served.nothing_held()


async def test_an_opening_for_the_previous_worker_is_refused(served: Served) -> None:
    link = served.open()
    await link.send(served.opening([1, 2], granter_boot_id=b"o" * 16))
    assert "has restarted" in str(await failure(link))
    await link.close()
    await served.nothing_held()


async def test_the_stop_waits_for_a_lease_whose_reader_has_vanished(served: Served) -> None:
    link = served.open()
    await link.send(served.opening(list(range(10)), lease_ms=SHORT_MS))
    assert (await link.receive()).opened.lease_ms == SHORT_MS
    await link.close()  # without a word: READs may still come
    assert served.node.worker.audit()["open_handoffs"] == 1
    await served.service.finished(within_s=LIMIT_S)
    assert served.node.worker.audit()["open_handoffs"] == 0
    await served.nothing_held()


async def test_the_stop_leaves_a_reader_behind_that_renews_for_ever(served: Served) -> None:
    link = served.open()
    await link.send(served.opening(list(range(10))))
    await answers(link, 3)
    await served.service.finished(within_s=0.01)
    assert served.node.worker.audit()["open_handoffs"] == 1
    await link.send(handoff_pb2.ReaderMessage(closed=handoff_pb2.Closed()))
    await link.close()
    await served.nothing_held()


async def test_a_reader_that_stops_renewing_gets_the_end_of_its_lease(served: Served) -> None:
    link = served.open()
    await link.send(served.opening(list(range(10)), lease_ms=SHORT_MS))
    assert isinstance(await failure(link), LeaseLost)
    await link.close()
    await served.nothing_held()


async def test_the_stop_of_a_worker_without_handoffs_waits_for_nothing(served: Served) -> None:
    async with asyncio.timeout(LIMIT_S):
        await served.service.finished(within_s=10 * LIMIT_S)
