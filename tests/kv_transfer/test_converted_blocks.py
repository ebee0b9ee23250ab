"""A handoff between pools that store KV in different dtypes: both ends real, the form made up.

The granter's numbers are bytes; the reader stores each twice (or the other way round), so that
every byte that arrives can be said beforehand.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from baton.engine.scheduling.blocks import BlockPool, Hold
from baton.kv_transfer.checksum import converted_tag
from baton.kv_transfer.conversion import HostConversion, numba_checksums
from baton.kv_transfer.fetch_ledger import FetchLedger
from baton.kv_transfer.fetch_report import FetchReport
from baton.kv_transfer.granter import Computed, Granted, GrantingWorker, grant
from baton.kv_transfer.local_pool import HostPool
from baton.kv_transfer.memory_mover import Attempt, Fate, MemoryExchange, MemoryMover
from baton.kv_transfer.mover import PeerPool
from baton.kv_transfer.peers.converted_prompt import CALLS_PER_READ, Converter
from baton.kv_transfer.reader import HandoffReader
from baton.proto import handoff_pb2
from baton.runtime.config import HandoffConfig
from baton.runtime.errors import (
    ChecksumMismatch,
    EngineError,
    HandoffError,
    Incompatible,
    ReadFailed,
)
from baton.runtime.links import memory_link
from baton.runtime.wire import ModelLimits
from tests.support.handoff_stage import GRANTER, READER, first_tokens, name_of, on_virtual_time

BLOCK_BYTES, SLABS, POOL_BLOCKS, TOKENS = 256, 4, 32, 4
LIMITS = ModelLimits(1000, 64, "model", "uint8", b"key")
FORMS: dict[str, Callable[[NDArray[np.uint8]], NDArray[np.uint8]]] = {
    "twice": lambda block: np.repeat(block, 2),
    "half": lambda block: block[::2].copy(),
    "most": lambda block: np.resize(block, 192),
}


class Prompt:
    """Three chunks: four blocks, one, and a partial one; it reserves targets for all."""

    request_id = "r"

    def __init__(self, pool: BlockPool, each: int, pause_s: float = 0.0) -> None:
        self.blocks = pool.allocate(6, Hold.PINNED)
        self.targets: list[int] = []
        self.ended = 0
        self._pool, self._pause_s, self._each = pool, pause_s, each
        self._reserve = pool.pin_targets(6 * each)
        names = tuple(name_of(index) for index in range(5))
        self._events: list[Granted] = [
            Computed(0, tuple(self.blocks[:4]), names[:4], targets=self._taken(4)),
            Computed(4, tuple(self.blocks[4:5]), names[4:], targets=self._taken(1)),
            first_tokens(),
            Computed(5, tuple(self.blocks[5:]), (), 3, targets=self._taken(1)),
        ]

    def _taken(self, blocks: int) -> tuple[int, ...]:
        taken = self._reserve[: blocks * self._each]
        del self._reserve[: len(taken)]
        self.targets += taken
        return tuple(taken)

    async def next(self) -> Granted | None:
        # The next event comes after this pause of virtual time.
        await asyncio.sleep(self._pause_s)
        return self._events.pop(0) if self._events else None

    def end(self) -> None:
        self.ended += 1
        self._pool.unpin(self.blocks)


class Pair:
    """A granter and a reader whose blocks hold the same in `form`."""

    def __init__(
        self,
        form: str,
        decide: Callable[[Attempt], Fate] = lambda attempt: Fate(),
        call_blocks: int = 2,
        **config: Any,
    ) -> None:
        self.form = FORMS[form]
        random = np.random.default_rng(3)
        self.granted = random.integers(0, 256, (POOL_BLOCKS, BLOCK_BYTES), dtype=np.uint8)
        size = len(self.form(self.granted[0]))
        self.own = np.zeros((POOL_BLOCKS, size), dtype=np.uint8)
        call_bytes = call_blocks * max(size, BLOCK_BYTES)
        self.config = HandoffConfig(read_bytes=CALLS_PER_READ * call_bytes, **config)
        self.exchange = MemoryExchange(decide)
        self.mover = MemoryMover(HostPool(self.granted, SLABS), GRANTER, self.exchange)
        self.reader = MemoryMover(HostPool(self.own, SLABS), READER, self.exchange)
        self.pool = BlockPool(POOL_BLOCKS, TOKENS)
        conversion = HostConversion(
            "other",
            size,
            self.granted,
            lambda block: self.form(self.granted[block]).reshape(1, -1),
            numba_checksums(SLABS),
        )
        self.parts = conversion.parts
        self.converter = Converter(
            lambda name: conversion if name == "other" else None,
            LIMITS,
            self.mover,
            GRANTER,
            self.config,
            unpin=self.pool.unpin,
            on_unpin=self._wake,
        )
        self.woken = 0
        self.on_first: Callable[[handoff_pb2.FirstTokens], None] = lambda first: None
        self.prompt = Prompt(self.pool, self.parts)
        self.expected = [self.form(self.granted[block]) for block in self.prompt.blocks]
        self.quarantined: list[int] = []

    def _wake(self) -> None:
        self.woken += 1

    def opening(self, kv_dtype: str = "other", held: int = 0) -> handoff_pb2.OpenHandoff:
        return handoff_pb2.OpenHandoff(
            handoff_id=b"H" * 16,
            granter_boot_id=GRANTER,
            reader_boot_id=READER,
            tokens=range(23),
            held_blocks=held,
            choices=[0],
            lease_ms=1000,
            kv_dtype=kv_dtype,
        )

    async def fetch(
        self, own: Sequence[int], opening: handoff_pb2.OpenHandoff | None = None, held: int = 0
    ) -> FetchReport:
        opening = opening or self.opening(held=held)
        near, far = memory_link()
        granted = asyncio.create_task(
            grant(
                far,
                lambda asked: self.converter.granted(self.prompt, asked),
                GrantingWorker(self.mover, GRANTER, self.config),
            )
        )
        size = self.own.shape[1]
        pool = self.mover.describe()
        await self.reader.connect(
            PeerPool(
                GRANTER,
                pool.mover,
                b"",
                0,
                BLOCK_BYTES,
                POOL_BLOCKS,
                kv_dtype="uint8",
                unit_bytes=size,
            )  # fmt: skip
        )
        reader = HandoffReader(
            near, self.reader, GRANTER, TOKENS, self.config,
            lambda blocks, settled: self.quarantined.extend(blocks),
        )  # fmt: skip
        tags = [converted_tag(name_of(index), "other") for index in range(held, 5)]
        try:
            return await reader.fetch(opening, own, tags, self.on_first)
        finally:
            await reader.finished()
            self.report = await granted


OWN = [9, 2, 30, 11, 5, 6]


@pytest.mark.parametrize("form", sorted(FORMS))
def test_converted_blocks_arrive_and_the_lease_frees_them(form: str) -> None:
    read: list[tuple[int, int]] = []

    def decide(attempt: Attempt) -> Fate:
        read.append((len(attempt.local), len(attempt.remote)))
        return Fate(delay_s=0.01)

    pair = Pair(form, decide)
    targets = list(pair.prompt.targets)
    report, _ = on_virtual_time(lambda: pair.fetch(OWN))
    assert [pair.own[block].tolist() for block in OWN] == [e.tolist() for e in pair.expected]
    assert pair.parts == (2 if form == "twice" else 1)
    assert sum(local for local, _ in read) == 6  # a unit for each index
    assert all(remote == local * pair.parts for local, remote in read)
    assert report.bytes == 6 * pair.own.shape[1] and report.rereads == 0
    assert len(set(targets)) == 6 * pair.parts and not set(targets) & set(pair.prompt.blocks)
    assert pair.report.end == "closed" and pair.report.offered_blocks == 6
    assert pair.prompt.ended == 1 and pair.pool.counts().available == POOL_BLOCKS
    pair.pool.check()


@pytest.mark.parametrize("form", sorted(FORMS))
@pytest.mark.parametrize("call_blocks", [1, 3])
def test_a_call_takes_an_eighth_of_a_read_at_either_end(
    form: str, call_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other handoffs' checksums wait for the same thread."""
    calls: list[int] = []
    convert = HostConversion.convert

    def noted(self: HostConversion, sources: Sequence[int], *rest: Any) -> np.ndarray:
        calls.append(len(sources))
        return convert(self, sources, *rest)

    monkeypatch.setattr(HostConversion, "convert", noted)
    on_virtual_time(lambda: Pair(form, call_blocks=call_blocks).fetch(OWN))
    assert sum(calls) == 6 and max(calls) == call_blocks


def test_blocks_that_the_reader_holds_are_not_read() -> None:
    pair = Pair("twice")
    on_virtual_time(lambda: pair.fetch(OWN[4:], held=4))
    assert [pair.own[block].tolist() for block in OWN[4:]] == [
        each.tolist() for each in pair.expected[4:]
    ]
    assert not pair.own[OWN[:4]].any()


@pytest.mark.parametrize("fate", ["corrupt", "wrong", "short"])
@pytest.mark.parametrize("form", ["twice", "half"])
def test_a_wrong_block_is_read_again(form: str, fate: str) -> None:
    pair = Pair(
        form, lambda attempt: Fate(**({fate: 1, "bit": 700} if attempt.number == 1 else {}))
    )
    report, _ = on_virtual_time(lambda: pair.fetch(OWN))
    assert report.reread_blocks == 1
    assert [pair.own[block].tolist() for block in OWN] == [e.tolist() for e in pair.expected]


def test_bytes_that_stay_wrong_are_never_used() -> None:
    pair = Pair("half", lambda attempt: Fate(corrupt=0))
    with pytest.raises(ChecksumMismatch):
        on_virtual_time(lambda: pair.fetch(OWN))
    assert pair.pool.counts().available == POOL_BLOCKS


def test_the_original_is_not_taken_for_the_converted_block() -> None:
    """A granter that offers its own blocks, with their own tags and checksums."""
    pair = Pair("most")
    pair.converter.granted = lambda prompt, opening: prompt
    with pytest.raises(ChecksumMismatch):
        on_virtual_time(lambda: pair.fetch(OWN))


def test_targets_stay_pinned_until_the_call_has_ended() -> None:
    """The reader leaves while the thread converts: what it writes into is not given away."""
    pair = Pair("twice", lease_s=1.0)

    async def leave() -> None:
        pair.mover.stick_checksums()
        fetch = asyncio.create_task(pair.fetch(OWN))
        # The fetch has to wait for checksums, on virtual time.
        await asyncio.sleep(0.3)
        fetch.cancel()
        await asyncio.wait({fetch})
        assert pair.prompt.ended == 1
        assert pair.pool.counts().pinned == 6 * pair.parts and pair.woken == 0
        pair.mover.release_checksums()
        # The pins have to be released, on virtual time.
        await asyncio.sleep(0.1)
        assert pair.pool.counts().available == POOL_BLOCKS and pair.woken == 1

    on_virtual_time(leave)


@pytest.mark.parametrize("form", sorted(FORMS))
def test_first_tokens_wait_for_no_conversion(form: str) -> None:
    """They go out while the thread converts; nothing is verified yet."""
    pair, events = Pair(form, lease_s=1.0), list[str]()

    async def ask() -> FetchReport:
        pair.mover.stick_checksums()
        pair.on_first = lambda first: events.append("first tokens")
        fetch = asyncio.create_task(pair.fetch(OWN))
        # The fetch has to wait for checksums, on virtual time.
        await asyncio.sleep(0.3)
        events.append("released")
        pair.mover.release_checksums()
        return await fetch

    on_virtual_time(ask)
    assert events == ["first tokens", "released"]
    assert [pair.own[block].tolist() for block in OWN] == [e.tolist() for e in pair.expected]
    assert pair.prompt.ended == 1 and pair.pool.counts().available == POOL_BLOCKS


def test_a_failed_conversion_ends_its_handoff_alone() -> None:
    pair = Pair("half")

    def failing(block: NDArray[np.uint8]) -> NDArray[np.uint8]:
        raise ValueError("no memory for it")

    pair.form = failing
    with pytest.raises(EngineError, match="ValueError"):
        on_virtual_time(lambda: pair.fetch(OWN))
    assert pair.pool.counts().available == POOL_BLOCKS


def test_a_dtype_that_is_not_converted_to_is_named() -> None:
    pair = Pair("half")
    with pytest.raises(Incompatible, match="'strange', and 'uint8' here is not converted to it"):
        pair.converter.parts(pair.opening("strange"))
    assert pair.converter.parts(pair.opening("")) == 0
    assert pair.converter.parts(pair.opening("uint8")) == 0
    assert pair.converter.granted(pair.prompt, pair.opening("uint8")) is pair.prompt


def test_an_offer_that_lacks_a_part_is_refused() -> None:
    peer = PeerPool(GRANTER, "memory", b"", 0, 64, 8)
    opening, cells = Pair("half").opening(), [(1,), (2,)]
    ledger = FetchLedger(opening, cells, [b"a", b"b"], peer, slabs=SLABS, block_size=TOKENS, each=2)
    with pytest.raises(HandoffError, match="3 blocks; each index needs 2"):
        ledger.record_offer(handoff_pb2.Offer(first=0, blocks=[1, 2, 3]))
    with pytest.raises(HandoffError, match="block 8 of a pool of 8"):
        ledger.record_offer(handoff_pb2.Offer(first=0, blocks=[1, 8]))
    ledger.record_offer(handoff_pb2.Offer(first=0, blocks=[5, 4, 3, 0]))
    assert ledger.remote([1, 0]) == [3, 0, 5, 4]
    assert ledger.all_offered


def test_a_read_of_half_a_unit_is_refused() -> None:
    pair = Pair("twice")

    async def read() -> None:
        await pair.reader.connect(
            PeerPool(GRANTER, "memory", b"", 0, BLOCK_BYTES, 8, unit_bytes=512)
        )
        pair.reader.read(GRANTER, [1], [2])

    with pytest.raises(ReadFailed, match="1 blocks do not fit into 1"):
        on_virtual_time(read)
