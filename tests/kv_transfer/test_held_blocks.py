"""The ledger of a fetch whose granter holds fewer blocks than it was asked for."""

from __future__ import annotations

import pytest

from baton.kv_transfer.fetch_ledger import FetchLedger
from baton.kv_transfer.mover import PeerPool
from baton.proto import handoff_pb2
from baton.runtime.errors import HandoffError

FIRST, COUNT = 2, 4


@pytest.fixture
def ledger() -> FetchLedger:
    opening = handoff_pb2.OpenHandoff(
        tokens=range(4 * (FIRST + COUNT)), held_blocks=FIRST, cached_only=True
    )
    pool = PeerPool(
        boot_id=b"p" * 16,
        mover="memory",
        metadata=b"",
        base_address=0,
        block_bytes=64,
        num_blocks=50,
        device_id=0,
        memory="DRAM",
        versions={},
    )
    names = [bytes([number]) * 16 for number in range(COUNT)]
    cells = [(10 + index,) for index in range(COUNT)]
    return FetchLedger(opening, cells, names, pool, slabs=1, block_size=4)


def offer(first: int, count: int) -> handoff_pb2.Offer:
    return handoff_pb2.Offer(first=first, blocks=range(count))


@pytest.mark.parametrize("held", range(FIRST, FIRST + COUNT + 1))
def test_a_fetch_ends_with_what_is_held(ledger: FetchLedger, held: int) -> None:
    ledger.record_held(held)
    assert ledger.complete == (held == FIRST)
    if held > FIRST:
        ledger.record_offer(offer(FIRST, held - FIRST))
    assert ledger.all_offered
    for index in range(FIRST, held):
        assert ledger.leading == index - FIRST and not ledger.complete
        ledger.record_verified([index])
    assert ledger.complete and ledger.leading == held - FIRST


def test_more_than_is_held_may_not_be_offered(ledger: FetchLedger) -> None:
    ledger.record_held(FIRST + 1)
    with pytest.raises(HandoffError, match="names indices"):
        ledger.record_offer(offer(FIRST, 2))


@pytest.mark.parametrize("held", [0, FIRST - 1, FIRST + COUNT + 1])
def test_what_cannot_be_held_is_refused(ledger: FetchLedger, held: int) -> None:
    with pytest.raises(HandoffError, match=f"holds {held} blocks"):
        ledger.record_held(held)


def test_what_is_held_is_named_before_any_offer(ledger: FetchLedger) -> None:
    ledger.record_offer(offer(FIRST, 1))
    with pytest.raises(HandoffError, match="1 offered before"):
        ledger.record_held(FIRST + 2)


def test_leading_blocks_end_at_the_first_gap(ledger: FetchLedger) -> None:
    ledger.record_verified([FIRST, FIRST + 1, FIRST + 3])
    assert ledger.leading == 2
