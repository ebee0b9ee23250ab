"""A granter whose word cannot be true, and a reader that breaks the rules: refused by name."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, NoReturn

import pytest

from baton.kv_transfer.checksum import block_seed
from baton.kv_transfer.checksum_cache import ChecksumCache
from baton.kv_transfer.fetch_ledger import FetchLedger
from baton.kv_transfer.granter import grant
from baton.proto import handoff_pb2 as pb
from baton.proto import worker_pb2
from baton.runtime.errors import (
    BatonError,
    HandoffError,
    InvalidRequest,
    Overloaded,
    Unavailable,
)
from baton.runtime.links import LinkClosed, memory_link
from tests.support import handoff_stage

OWN = [20, 3, 21, 5, 9, 30]
CELLS = [(block,) for block in OWN]
SHAPE = {"slabs": handoff_stage.SLABS, "block_size": handoff_stage.BLOCK_TOKENS}
OPENED = pb.GranterMessage(opened=pb.Opened(lease_ms=2000))


def offer(first: int, blocks: list[int], partial: int = 0) -> pb.GranterMessage:
    return pb.GranterMessage(offer=pb.Offer(first=first, blocks=blocks, partial_tokens=partial))


def sums(first: int, count: int) -> pb.GranterMessage:
    return pb.GranterMessage(checksums=pb.Checksums(first=first, checksums=[0] * count))


def first_tokens(*choices: int) -> pb.GranterMessage:
    tokens = [pb.FirstToken(choice=choice, token=1) for choice in choices]
    return pb.GranterMessage(first_tokens=pb.FirstTokens(tokens=tokens))


LIES: dict[str, tuple[list[pb.GranterMessage], str]] = {
    "speaks before opening": ([offer(0, [1])], "began with offer"),
    "says nothing at all": ([pb.GranterMessage()], "unknown message"),
    "opens twice": ([OPENED, OPENED], "twice"),
    "opens for no time": ([pb.GranterMessage(opened=pb.Opened())], "with a lease of 0"),
    "offers a block outside its pool": ([OPENED, offer(1, [32])], "block 32 of a pool of 32"),
    "offers a place before": ([OPENED, offer(0, [1])], "indices 0 to 1; the handoff has 1 to 6"),
    "offers a place beyond": ([OPENED, offer(5, [1, 2])], "indices 5 to 7"),
    "offers a huge place": ([OPENED, offer(2**32 - 1, [1])], "the handoff has 1 to 6"),
    "offers a place twice": ([OPENED, offer(1, [1, 2]), offer(2, [4])], "index 2 twice"),
    "offers nothing": ([OPENED, offer(1, [])], "empty offer"),
    "offers the partial block as full": ([OPENED, offer(4, [1, 2])], "index 5 as a full"),
    "offers a full block as partial": ([OPENED, offer(1, [1], 3)], "no partial last block"),
    "offers a partial block in company": ([OPENED, offer(4, [1, 2], 3)], "no partial last block"),
    "offers the wrong count of tokens": ([OPENED, offer(5, [1], 2)], "no partial last block"),
    "offers the partial block twice": ([OPENED, offer(5, [1], 3), offer(5, [1], 3)], "5 twice"),
    "sums what was not offered": ([OPENED, sums(1, 4)], "index 1 are out of order"),
    "sums twice": ([OPENED, offer(1, [1]), sums(1, 4), sums(1, 4)], "out of order"),
    "sums part of a block": (
        [OPENED, offer(1, [1]), sums(1, 3)],
        "3 checksums of the granter; each block needs 4",
    ),
    "sums nothing": ([OPENED, offer(1, [1]), sums(1, 0)], "0 checksums"),
    "sums beyond": ([OPENED, offer(1, [1]), sums(1, 40)], "indices 1 to 11"),
    "samples another choice": (
        [OPENED, first_tokens(1)],
        r"choices \[1\], not once for each of \[0\]",
    ),
    "samples too often": ([OPENED, first_tokens(0), first_tokens(0)], "once"),
}


async def against(stage: handoff_stage.Stage, messages: list[pb.GranterMessage]) -> list[str]:
    """Fetch indices 1 to 5 (the last with 3 tokens) from a granter that plays `messages`."""
    near, far = memory_link()
    heard: list[str] = []

    async def lie() -> None:
        await far.receive()
        for message in messages:
            await far.send(message)
        try:
            while True:
                heard.append((await far.receive()).WhichOneof("kind"))
                if heard[-1] == "closed":
                    await far.close()
        except LinkClosed:
            return

    liar = asyncio.ensure_future(lie())
    names = [handoff_stage.name_of(index) for index in range(1, 5)]
    try:
        await stage.fetch(near, stage.opening(held=1, partial=3), OWN[1:], names)
    finally:
        await stage.ended()
        await liar
    return heard


@pytest.mark.parametrize("lie", LIES)
def test_what_cannot_be_true_ends_the_handoff(lie: str) -> None:
    stage = handoff_stage.Stage()
    messages, says = LIES[lie]

    async def main() -> None:
        with pytest.raises(HandoffError, match=says):
            await against(stage, messages)

    handoff_stage.on_virtual_time(main)
    assert all(settled.done() for _, settled in stage.quarantined)


def test_an_error_named_on_the_wire_is_raised_here() -> None:
    stage = handoff_stage.Stage()
    busy = worker_pb2.Failure(code="Overloaded", detail="32 prompts wait", retryable=True)

    async def main() -> None:
        with pytest.raises(Overloaded, match="32 prompts wait"):
            await against(stage, [pb.GranterMessage(failed=busy)])
        strange = worker_pb2.Failure(code="FromTheFuture", detail="?")
        with pytest.raises(BatonError, match="FromTheFuture"):
            await against(stage, [pb.GranterMessage(failed=strange)])

    handoff_stage.on_virtual_time(main)


def test_a_stream_that_ends_early_is_no_success() -> None:
    stage = handoff_stage.Stage()

    async def main() -> None:
        near, far = memory_link()
        await far.send(OPENED)
        await far.close()
        with pytest.raises(LinkClosed):
            await stage.fetch(near, stage.opening(), OWN, [b"x"] * 6)
        await stage.ended()

    handoff_stage.on_virtual_time(main)


def test_what_the_first_token_callback_raises_ends_the_fetch() -> None:
    stage = handoff_stage.Stage()

    def refuse(_: pb.FirstTokens) -> None:
        raise RuntimeError("the caller's own fault")

    stage.first = type("Callback", (), {"append": staticmethod(refuse)})()
    with pytest.raises(RuntimeError, match="own fault"):
        handoff_stage.on_virtual_time(lambda: against(stage, [OPENED, first_tokens(0)]))


def test_identities_must_fit_the_blocks() -> None:
    stage = handoff_stage.Stage()
    pool = stage.granter.describe()
    with pytest.raises(ValueError, match="do not match"):
        FetchLedger(stage.opening(), CELLS, [b"x"] * 4, pool, **SHAPE)
    ledger = FetchLedger(stage.opening(), CELLS, [b"x"] * 6, pool, **SHAPE)
    assert list(ledger.record_offer(pb.Offer(first=2, blocks=[9, 8]))) == [2, 3]
    assert ledger.own([2, 3]) == [21, 5] and ledger.remote([3, 2]) == [8, 9]
    assert ledger.seeds([3]) == [block_seed(handoff_stage.GRANTER, 8, b"x")]
    assert not ledger.all_offered and not ledger.complete


@pytest.mark.parametrize("full", [0, 1])
@pytest.mark.parametrize("tokens", [1, 2])
def test_a_partial_block_has_the_rest_of_the_prompt(full: int, tokens: int) -> None:
    """Of 7 tokens, 6 and 5 would fill a block of another size."""
    stage = handoff_stage.Stage()
    opening = pb.OpenHandoff(
        handoff_id=b"h" * 16, tokens=range(full * handoff_stage.BLOCK_TOKENS + 3)
    )
    tags = [b"x"] * full
    ledger = FetchLedger(opening, CELLS[: full + 1], tags, stage.granter.describe(), **SHAPE)
    with pytest.raises(HandoffError, match=f"offers {tokens} tokens in indices"):
        ledger.record_offer(pb.Offer(first=full, blocks=[1], partial_tokens=tokens))
    assert list(ledger.record_offer(pb.Offer(first=full, blocks=[1], partial_tokens=3))) == [full]


Change = Callable[[pb.OpenHandoff], object]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda opening: opening.ClearField("lease_ms"), "lacks a lease"),
        (lambda opening: opening.ClearField("tokens"), "lacks a lease, tokens"),
        (lambda opening: setattr(opening, "handoff_id", b"short"), "16 bytes"),
        (lambda opening: setattr(opening, "granter_boot_id", b""), "restarted"),
    ],
)
def test_a_bad_opening_is_refused(change: Change, says: str) -> None:
    stage, prompt = handoff_stage.Stage(), handoff_stage.ScriptedPrompt([])

    async def main() -> None:
        opening = stage.opening()
        change(opening)
        with pytest.raises((HandoffError, Unavailable), match=says):
            await stage.fetch(stage.granter_link(prompt), opening, OWN, [b"x"] * 6)
        (report,) = await stage.ended()
        assert report.end == "refused"

    handoff_stage.on_virtual_time(main)
    assert not prompt.ended_at and stage.granter.holds == 0


@pytest.mark.parametrize("error", [Overloaded("busy"), InvalidRequest("bad"), KeyError("bug")])
def test_an_admission_error_is_reported_and_nothing_is_pinned(error: Exception) -> None:
    stage = handoff_stage.Stage()

    def admit(_: pb.OpenHandoff) -> NoReturn:
        raise error

    async def main() -> None:
        near, far = memory_link()
        serving = asyncio.ensure_future(grant(far, admit, stage.granting()))
        with pytest.raises(BatonError) as caught:
            await stage.fetch(near, stage.opening(), OWN, [b"x"] * 6)
        await stage.ended()
        if isinstance(error, BatonError):
            assert type(caught.value) is type(error)
        else:  # a fault of the worker's own: told without its text; the worker logs it whole
            assert caught.value.code == "EngineError" and "bug" not in str(caught.value)
        report = await serving
        assert report.end == "refused" and report.failure is error

    handoff_stage.on_virtual_time(main)
    assert stage.granter.holds == 0


def test_a_reader_that_never_opens_is_not_waited_for_long() -> None:
    stage = handoff_stage.Stage()

    async def main() -> None:
        _, far = memory_link()
        report = await grant(far, lambda _: None, stage.granting())
        assert report.end == "refused" and "no opening" in str(report.failure)

    _, loop = handoff_stage.on_virtual_time(main)
    assert loop.time() <= 100 + 2 * stage.config.lease_s


def test_a_late_renewal_is_answered_and_changes_nothing() -> None:
    stage, prompt = handoff_stage.Stage(), handoff_stage.ScriptedPrompt([60.0])

    async def main() -> list[str]:
        link = stage.granter_link(prompt)
        await link.send(pb.ReaderMessage(open=stage.opening()))
        # The lease has to run out, on virtual time.
        await asyncio.sleep(stage.config.lease_s)
        with contextlib.suppress(LinkClosed):  # it may have hung up already
            await link.send(pb.ReaderMessage(renew=pb.Renew(n=1)))
        heard = []
        try:
            while True:
                message = await link.receive()
                heard.append(message.failed.code or message.WhichOneof("kind"))
        except LinkClosed:
            (report,) = await stage.ended()
            assert report.end == "expired"
            return heard

    heard, _ = handoff_stage.on_virtual_time(main)
    assert heard[:2] == ["opened", "LeaseLost"]
    assert prompt.ended_at == [pytest.approx(2.0, abs=0.3)]


def test_a_cancelled_granter_keeps_its_pins_for_the_lease() -> None:
    stage, prompt = handoff_stage.Stage(), handoff_stage.ScriptedPrompt([60.0])

    async def main() -> None:
        link = stage.granter_link(prompt)
        await link.send(pb.ReaderMessage(open=stage.opening()))
        # The handoff has to be served, on virtual time.
        await asyncio.sleep(0.1)
        (serving,) = stage.grants
        serving.cancel()
        # A first cancellation may change nothing in this virtual time.
        await asyncio.sleep(1.0)
        serving.cancel()  # insisting does not help either
        # A second one may change nothing either.
        await asyncio.sleep(0.5)
        assert not prompt.ended_at and not serving.done()
        with pytest.raises(asyncio.CancelledError):
            await serving
        assert prompt.ended_at == [pytest.approx(2.0, abs=0.3)]
        await link.close()

    handoff_stage.on_virtual_time(main)
    assert stage.granter.holds == 0


def test_the_cache_of_sums_is_bounded_and_forgets() -> None:
    cache = ChecksumCache(max_blocks=2)
    rows: Any = [object(), object(), object()]
    for block, row in enumerate(rows):
        cache.put(block, b"id", row)
        cache.get(0, b"id")
    assert len(cache) == 2 and cache.get(1, b"id") is None  # the least recently used went
    assert cache.get(2, b"id") is rows[2] and cache.get(2, b"other") is None
    cache.forget([2, 5])
    assert cache.get(2, b"id") is None and len(cache) == 1
    with pytest.raises(ValueError, match="0 blocks is empty"):
        ChecksumCache(0)
