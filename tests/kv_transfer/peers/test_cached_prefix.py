"""Cached blocks as a grant: pinned while the handoff lasts, and only what is held is promised."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from baton.engine.scheduling.blocks import BlockPool, Hold
from baton.kv_transfer.granter import Computed, Granted, GrantedPrompt
from baton.kv_transfer.peers.cached_prefix import CachedGranter, CachedPrefix
from baton.kv_transfer.peers.converted_prompt import Converter
from baton.proto import handoff_pb2
from baton.runtime import identity
from baton.runtime.errors import Draining, HandoffError, InvalidRequest
from baton.runtime.wire import ModelLimits

SIZE = 4
TOKENS = list(range(1, 1 + 5 * SIZE))
LIMITS = ModelLimits(1000, 64, "model", "uint8", b"key of the cluster")


class Granting(Converter):
    """Says how many targets a block needs, and converts nothing."""

    def __init__(self, each: int) -> None:
        self.each = each

    def parts(self, opening: handoff_pb2.OpenHandoff) -> int:
        return self.each

    def granted(self, prompt: GrantedPrompt, opening: handoff_pb2.OpenHandoff) -> GrantedPrompt:
        return prompt


class Holder:
    """A pool that holds the first `held` blocks of TOKENS."""

    def __init__(self, held: int, room: int = 100, blocks: int = 8, each: int = 0) -> None:
        self.room = room
        self.pool = BlockPool(blocks, SIZE)
        self.draining = asyncio.Event()
        names = identity.chain(LIMITS.key, LIMITS.root(b""), TOKENS, SIZE)
        blocks = self.pool.allocate(held, Hold.USED)
        for index, block in enumerate(blocks):
            self.pool.identify(block, names[index], TOKENS[index * SIZE : (index + 1) * SIZE])
        self.pool.release(blocks, Hold.USED)
        self.blocks = blocks
        converter = Granting(each) if each else None
        self._granter = CachedGranter(
            self.pool, LIMITS, SIZE, self.draining, lambda converted: self.room, converter
        )

    def admit(self, **fields: Any) -> CachedPrefix:
        opening = {"tokens": TOKENS, "cached_only": True, "request_id": "r", **fields}
        prefix = self._granter.admit(handoff_pb2.OpenHandoff(**opening))
        return cast(CachedPrefix, prefix)


async def events(prefix: CachedPrefix) -> list[Granted]:
    found = []
    while (event := await prefix.next()) is not None:
        found.append(event)
    return found


@pytest.mark.parametrize(("held", "first"), [(5, 0), (5, 2), (3, 0), (3, 2)])
async def test_held_blocks_are_pinned_and_offered_once(held: int, first: int) -> None:
    holder = Holder(held)
    prefix = holder.admit(held_blocks=first)
    named, offer = await events(prefix)
    assert named == handoff_pb2.Held(blocks=held)
    assert isinstance(offer, Computed) and offer.first == first
    assert list(offer.blocks) == holder.blocks[first:held] and not offer.partial_tokens
    assert len(offer.identities) == held - first
    assert holder.pool.counts().pinned == held - first
    prefix.end()
    assert holder.pool.counts().available == holder.pool.total
    holder.pool.check()


@pytest.mark.parametrize(("room", "granted"), [(-1, 0), (0, 0), (2, 2), (3, 3), (4, 3)])
async def test_no_more_is_pinned_than_the_worker_has_room_for(room: int, granted: int) -> None:
    holder = Holder(5, room)
    prefix = holder.admit(held_blocks=2)
    named, *_ = await events(prefix)
    assert named == handoff_pb2.Held(blocks=2 + granted)
    assert holder.pool.counts().pinned == granted
    prefix.end()
    assert holder.pool.counts().pinned == 0


@pytest.mark.parametrize("held", [0, 2])
async def test_a_reader_that_holds_as_much_gets_no_offer(held: int) -> None:
    holder = Holder(held)
    prefix = holder.admit(held_blocks=held)
    assert await events(prefix) == [handoff_pb2.Held(blocks=held)]
    prefix.end()
    assert holder.pool.counts().pinned == 0


async def test_blocks_of_another_tenant_are_not_granted() -> None:
    prefix = Holder(5).admit(cache_salt=b"another")
    assert await events(prefix) == [handoff_pb2.Held(blocks=0)]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tokens": TOKENS[:-1]}, "full blocks"),
        ({"tokens": TOKENS * 4}, "context of 64"),
        ({"tokens": [*TOKENS[:-1], 1000]}, "outside the vocabulary"),
        ({"held_blocks": 5}, "nothing to grant"),
    ],
)
def test_what_is_out_of_bounds_is_named(fields: dict[str, object], named: str) -> None:
    holder = Holder(5)
    with pytest.raises(InvalidRequest, match=named):
        holder.admit(**fields)
    assert holder.pool.counts().pinned == 0


def test_a_worker_that_drains_or_is_asked_to_compute_refuses() -> None:
    holder = Holder(5)
    with pytest.raises(HandoffError, match="decode worker"):
        holder.admit(cached_only=False)
    holder.draining.set()
    with pytest.raises(Draining):
        holder.admit()


@pytest.mark.parametrize(("blocks", "granted"), [(20, 5), (10, 2), (6, 0)])
async def test_no_more_is_granted_than_there_is_room_to_convert(blocks: int, granted: int) -> None:
    holder = Holder(5, blocks=blocks, each=2)
    prefix = holder.admit()
    named, *offers = await events(prefix)
    assert named == handoff_pb2.Held(blocks=granted)
    assert [len(cast(Computed, offer).targets) for offer in offers] == [2 * granted] * bool(granted)
    assert holder.pool.counts().pinned == 3 * granted
    prefix.end()
    holder.pool.unpin(prefix.targets)
    assert holder.pool.counts().available == blocks
    holder.pool.check()
