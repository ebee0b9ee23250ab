"""A granter that keeps its lease and withholds one kind of message: given up in bounded time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from baton.kv_transfer.local_pool import HostPool
from baton.kv_transfer.mover import STUCK_S, ChecksumMonitor
from baton.kv_transfer.nixl_mover import NixlMover
from baton.kv_transfer.session import ReaderLink
from baton.proto import handoff_pb2
from baton.runtime.errors import AnswerOverdue, EngineError, HandoffError, LeaseLost
from tests.support import handoff_stage
from tests.support.waiting import eventually

TIMEOUT_S = 3.0
LEASE_S = 1.0


class Withholding:
    """A reader's link end: some kinds of message never arrive at it."""

    def __init__(self, link: ReaderLink, kinds: tuple[str, ...]) -> None:
        self._link = link
        self._kinds = kinds
        self.send, self.close = link.send, link.close

    async def receive(self) -> handoff_pb2.GranterMessage:
        while (message := await self._link.receive()).WhichOneof("kind") in self._kinds:
            pass
        return message


async def fetch_withheld(
    stage: handoff_stage.Stage,
    prompt: handoff_stage.ScriptedPrompt,
    *kinds: str,
    opening: handoff_pb2.OpenHandoff | None = None,
) -> tuple[Exception, float]:
    """What ends the fetch, and when."""
    opening = opening or stage.opening()
    names = [handoff_stage.name_of(index) for index in range(6)]
    link = Withholding(stage.granter_link(prompt), kinds)
    with pytest.raises(HandoffError) as raised:
        async with asyncio.timeout(60.0):
            await stage.fetch(link, opening, handoff_stage.OWN, names)
    ended_s = asyncio.get_running_loop().time()
    await stage.ended()
    return raised.value, ended_s


@pytest.mark.parametrize(
    ("kinds", "error", "within_s"),
    [
        (["opened"], HandoffError, 1.0),
        (["acknowledged"], LeaseLost, LEASE_S),
        (["offer"], HandoffError, 1.0),
        (["offer", "checksums"], AnswerOverdue, TIMEOUT_S + 1.5),
        (["checksums"], AnswerOverdue, TIMEOUT_S + 1.0),
        (["first_tokens"], AnswerOverdue, TIMEOUT_S + 1.5),
    ],
)
def test_fetch_fails_in_time_when_a_kind_is_withheld(
    kinds: list[str], error: type[Exception], within_s: float
) -> None:
    stage = handoff_stage.Stage(lease_s=LEASE_S, read_timeout_s=TIMEOUT_S)
    prompt = handoff_stage.chunked(pause=0.4)
    (found, ended_s), _ = handoff_stage.on_virtual_time(
        lambda: fetch_withheld(stage, prompt, *kinds)
    )
    assert type(found) is error and ended_s <= within_s
    handoff_stage.nothing_left(stage, prompt)


@pytest.mark.parametrize(
    ("kinds", "missing"),
    [
        (["held"], "number of held blocks"),
        (["held", "offer", "checksums"], "number of held blocks"),
        (["offer", "checksums"], "offers"),
        (["checksums"], "checksums"),
    ],
)
def test_cached_read_fails_in_time_when_a_kind_is_withheld(kinds: list[str], missing: str) -> None:
    """The granter holds three blocks of the six."""
    stage = handoff_stage.Stage(lease_s=LEASE_S, read_timeout_s=TIMEOUT_S)
    held = handoff_pb2.Held(blocks=3)
    offered = handoff_stage.computed(0, handoff_stage.THEIRS[:3])
    prompt = handoff_stage.ScriptedPrompt([held, offered])
    opening = stage.opening()
    opening.cached_only = True
    del opening.choices[:]
    (found, ended_s), _ = handoff_stage.on_virtual_time(
        lambda: fetch_withheld(stage, prompt, *kinds, opening=opening)
    )
    assert type(found) is AnswerOverdue and f"sent no {missing} for" in str(found)
    assert ended_s <= TIMEOUT_S + 0.1
    handoff_stage.nothing_left(stage, prompt)


def test_lease_ends_when_the_failure_is_withheld() -> None:
    stage = handoff_stage.Stage(lease_s=LEASE_S)
    prompt = handoff_stage.ScriptedPrompt(
        [handoff_stage.computed(0, [4]), 0.1, EngineError("the device failed")]
    )
    (found, ended_s), _ = handoff_stage.on_virtual_time(
        lambda: fetch_withheld(stage, prompt, "failed")
    )
    assert type(found) is LeaseLost and ended_s < 2 * LEASE_S
    handoff_stage.nothing_left(stage, prompt)


def test_slow_prompt_is_waited_for_between_its_offers() -> None:
    stage = handoff_stage.Stage(lease_s=LEASE_S, read_timeout_s=TIMEOUT_S)
    report, _ = handoff_stage.on_virtual_time(
        lambda: handoff_stage.play(stage, handoff_stage.chunked(pause=4 * TIMEOUT_S))
    )
    assert report.seconds > 8 * TIMEOUT_S and handoff_stage.moved(
        stage, handoff_stage.OWN, handoff_stage.THEIRS
    )


def test_slow_checksums_are_waited_for_while_some_come() -> None:
    stage = handoff_stage.Stage(lease_s=LEASE_S, read_timeout_s=TIMEOUT_S)
    stage.exchange.checksum_s = 0.8 * TIMEOUT_S  # of two blocks
    prompt = handoff_stage.ScriptedPrompt(
        [handoff_stage.computed(0, handoff_stage.THEIRS), handoff_stage.first_tokens()]
    )
    report, _ = handoff_stage.on_virtual_time(lambda: handoff_stage.play(stage, prompt))
    assert report.seconds > 2 * TIMEOUT_S and handoff_stage.moved(
        stage, handoff_stage.OWN, handoff_stage.THEIRS
    )


def test_stuck_checksums_turn_the_granter_red_and_are_given_up() -> None:
    stage = handoff_stage.Stage(lease_s=LEASE_S, read_timeout_s=TIMEOUT_S)
    prompt = handoff_stage.chunked()

    async def main() -> None:
        stage.granter.stick_checksums()
        await fetch_withheld(stage, prompt)
        assert stage.granter.oldest_checksum_s() >= TIMEOUT_S  # no reader waits for it any more
        assert "checksum thread" in (stage.granter.failure_reason() or "")
        stage.granter.release_checksums()
        await asyncio.sleep(0)
        assert stage.granter.failure_reason() is None and stage.granter.oldest_checksum_s() == 0

    handoff_stage.on_virtual_time(main)
    handoff_stage.nothing_left(stage, prompt)


def test_reader_reports_the_age_of_unverified_blocks() -> None:
    stage = handoff_stage.Stage(lease_s=LEASE_S, read_timeout_s=TIMEOUT_S)

    async def main() -> None:
        fetch = asyncio.ensure_future(fetch_withheld(stage, handoff_stage.chunked(), "checksums"))
        # The reader has waited this long for checksums, on virtual time.
        await asyncio.sleep(2.0)
        assert 1.5 < stage.readers[0].unverified_s() < 2.0
        await fetch

    handoff_stage.on_virtual_time(main)


def test_monitor_counts_from_the_last_end() -> None:
    monitor = ChecksumMonitor()
    assert monitor.failure_reason(50.0) is None and monitor.oldest_s(50.0) == 0
    for call in (1, 2):
        monitor.begin(call, 100.0)
    monitor.end(1, 100.0 + STUCK_S)
    assert monitor.oldest_s(100.5 + STUCK_S) == STUCK_S + 0.5
    assert monitor.failure_reason(99.5 + 2 * STUCK_S) is None
    assert f"{STUCK_S:.1f} s" in (monitor.failure_reason(100.0 + 2 * STUCK_S) or "")
    monitor.end(2, 100.0 + 3 * STUCK_S)
    assert monitor.failure_reason(200.0) is None


@pytest.mark.usefixtures("scripted")
def test_nixl_mover_is_red_while_its_checksum_thread_is_stuck(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("baton.kv_transfer.mover.STUCK_S", 0.05)
    go_on = threading.Event()

    class StuckPool(HostPool):
        def checksums(self, blocks: Sequence[int], seeds: Sequence[int]) -> NDArray[np.uint64]:
            assert go_on.wait(30.0)
            return super().checksums(blocks, seeds)

    async def main() -> None:
        pool = StuckPool(np.zeros((8, 256), dtype=np.uint8), 1)
        mover = NixlMover(pool, b"B" * 16)
        caller = asyncio.ensure_future(mover.checksums([0], [1]))
        await eventually(mover.failure_reason)
        caller.cancel()
        await asyncio.sleep(0)
        assert mover.oldest_checksum_s() >= 0.05
        assert "checksum thread" in (mover.failure_reason() or "")
        go_on.set()
        await eventually(lambda: not mover.failure_reason())
        assert mover.oldest_checksum_s() == 0
        await mover.close()

    asyncio.run(main())
