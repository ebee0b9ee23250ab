"""Anomalies: whatever goes wrong in a handoff, it ends on both sides and nothing leaks."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from baton.kv_transfer.memory_mover import Attempt, Fate
from baton.kv_transfer.reader import HandoffReader
from baton.kv_transfer.session import ReaderLink, ReaderSession
from baton.proto import handoff_pb2
from baton.runtime.errors import (
    BatonError,
    EngineError,
    InvalidRequest,
    LeaseLost,
    Overloaded,
    ReadFailed,
    Unavailable,
    WorkerLost,
)
from baton.runtime.links import LinkClosed, memory_link
from tests.support import handoff_stage


@pytest.mark.parametrize("step", range(60))
def test_cancelled_at_any_step_nothing_leaks(step: int) -> None:
    stage = handoff_stage.Stage(decide=lambda attempt: Fate(delay_s=0.03))
    prompt = handoff_stage.chunked(pause=0.02)
    seen: list[bool] = []

    async def main() -> None:
        fetch = asyncio.ensure_future(handoff_stage.play(stage, prompt))
        asyncio.get_running_loop().at_step[step + 2] = fetch.cancel
        await asyncio.wait({fetch})
        seen.append(fetch.cancelled())
        reports = await stage.ended()
        for report in reports:  # told, not left to the lease
            assert report.end in ("closed", "refused"), report

    _, loop = handoff_stage.on_virtual_time(main)
    assert loop.time() < 100 + stage.config.lease_s
    if stage.sent:  # once opened, admitted and ended, exactly once each
        handoff_stage.nothing_left(stage, prompt)
        assert stage.sent[-1] == "closed"


def test_the_steps_cover_the_handoff_from_opening_to_end() -> None:
    stage = handoff_stage.Stage(decide=lambda attempt: Fate(delay_s=0.03))
    _, loop = handoff_stage.on_virtual_time(
        lambda: handoff_stage.play(stage, handoff_stage.chunked(pause=0.02))
    )
    assert 15 < loop.steps <= 60


def test_a_stuck_read_is_quarantined_until_it_lands_late() -> None:
    stage = handoff_stage.Stage(
        decide=lambda attempt: Fate(stuck=attempt.number == 2), read_timeout_s=0.5
    )
    prompt = handoff_stage.chunked()

    async def main() -> None:
        with pytest.raises(ReadFailed, match="made no progress for 0.5 s"):
            await handoff_stage.play(stage, prompt)
        (blocks, settled), *others = stage.quarantined
        assert not others and blocks == handoff_stage.OWN[2:4] and not settled.done()
        stage.granted[:] = 99  # the granter's lease is over: its blocks hold something else
        stage.exchange.release_stuck()
        assert settled.done() and (stage.own[blocks] == 99).all()  # it did land, harmlessly

    handoff_stage.on_virtual_time(main)
    assert stage.sent[-1] != "closed"  # a READ was in flight to the lease's end
    assert stage.reports[0].end == "expired"
    handoff_stage.nothing_left(stage, prompt)


def test_closed_is_said_late_once_an_abandoned_read_has_settled() -> None:
    stage = handoff_stage.Stage(
        decide=lambda attempt: Fate(stuck=attempt.number == 2), read_timeout_s=0.5
    )
    prompt = handoff_stage.chunked()

    async def main() -> None:
        asyncio.get_running_loop().call_later(1.0, stage.exchange.release_stuck)
        with pytest.raises(ReadFailed):
            await handoff_stage.play(stage, prompt)

    handoff_stage.on_virtual_time(main)
    assert stage.sent[-1] == "closed" and stage.reports[0].end == "closed"
    assert prompt.ended_at == [pytest.approx(1.0)]
    handoff_stage.nothing_left(stage, prompt)


def test_lost_renewals_end_both_sides_and_the_reader_first() -> None:
    stage, prompt = handoff_stage.Stage(), handoff_stage.chunked(pause=10.0)
    ended: list[float] = []

    async def main() -> None:
        link = stage.granter_link(prompt)
        link.lose_renewals = True
        with pytest.raises(LeaseLost, match="ran out"):
            names = [handoff_stage.name_of(index) for index in range(6)]
            await stage.fetch(link, stage.opening(), handoff_stage.OWN, names)
        ended.append(asyncio.get_running_loop().time())
        stage.reports = await stage.ended()

    handoff_stage.on_virtual_time(main)
    assert ended == [pytest.approx(1.8)]
    handoff_stage.nothing_left(stage, prompt)


def test_a_renewal_that_came_with_the_opening_is_answered_second() -> None:
    """A granter whose loop stood still finds both. Its reader takes an answer before `opened` for
    a broken protocol."""
    stage, prompt = handoff_stage.Stage(), handoff_stage.chunked()
    kinds: list[str | None] = []

    async def main() -> None:
        link = stage.granter_link(prompt)
        await link.send(handoff_pb2.ReaderMessage(open=stage.opening()))
        await link.send(handoff_pb2.ReaderMessage(renew=handoff_pb2.Renew(n=1)))
        while "acknowledged" not in kinds:
            kinds.append((await link.receive()).WhichOneof("kind"))
        await link.send(handoff_pb2.ReaderMessage(closed=handoff_pb2.Closed()))
        await stage.ended()

    handoff_stage.on_virtual_time(main)
    assert kinds[0] == "opened"


def test_no_read_is_started_once_the_lease_ran_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a pause: the offer came before the lease ended, and is heard after it."""
    started: list[Attempt] = []
    stage = handoff_stage.Stage(decide=lambda attempt: started.append(attempt) or Fate())
    prompt = handoff_stage.chunked()
    monkeypatch.setattr("baton.kv_transfer.session.ReaderSession.trusted", lambda session: False)

    async def main() -> None:
        with pytest.raises(LeaseLost, match="before a READ was started"):
            await handoff_stage.play(stage, prompt)

    handoff_stage.on_virtual_time(main)
    assert started == []
    handoff_stage.nothing_left(stage, prompt)


def test_the_lease_is_checked_after_each_landing_and_before_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """I3: seen complete, then trusted, then summed. A lapse in between voids the bytes."""
    stage = handoff_stage.Stage(decide=lambda attempt: Fate(delay_s=0.1))
    prompt = handoff_stage.chunked()
    asked: list[bool] = []

    def trusted(session: ReaderSession) -> bool:
        asked.append(handoff_stage.moved(stage, handoff_stage.OWN[:2], handoff_stage.THEIRS[:2]))
        return not asked[-1]  # READs may start

    monkeypatch.setattr("baton.kv_transfer.session.ReaderSession.trusted", trusted)

    async def main() -> None:
        with pytest.raises(LeaseLost, match="before a READ was known to be complete"):
            await handoff_stage.play(stage, prompt)

    handoff_stage.on_virtual_time(main)
    assert asked[0] is False and asked.count(True) == 1 and asked[-1] is True
    handoff_stage.nothing_left(stage, prompt)


def test_a_failed_read_ends_the_handoff_without_quarantine() -> None:
    stage = handoff_stage.Stage(decide=lambda attempt: Fate(failed=attempt.number == 2))
    prompt = handoff_stage.chunked()

    async def main() -> None:
        with pytest.raises(ReadFailed):
            await handoff_stage.play(stage, prompt)

    handoff_stage.on_virtual_time(main)
    assert stage.sent[-1] == "closed" and not stage.quarantined
    handoff_stage.nothing_left(stage, prompt)


@pytest.mark.parametrize(
    ("error", "seen"),
    [
        (Overloaded("full"), Overloaded),
        (InvalidRequest("odd"), InvalidRequest),
        (EngineError("NaN"), EngineError),
        (ZeroDivisionError("secret"), EngineError),
    ],
)
def test_a_granters_failure_midway_is_reported(error: Exception, seen: type[BatonError]) -> None:
    stage = handoff_stage.Stage()
    prompt = handoff_stage.ScriptedPrompt(
        [handoff_stage.computed(0, handoff_stage.THEIRS[:2]), 0.1, error]
    )

    async def main() -> None:
        with pytest.raises(seen) as caught:
            await handoff_stage.play(stage, prompt)
        assert "secret" not in str(caught.value)

    handoff_stage.on_virtual_time(main)
    assert stage.reports[0].failure is error and stage.reports[0].end == "closed"
    handoff_stage.nothing_left(stage, prompt)


def test_a_worker_that_restarted_refuses_by_name() -> None:
    stage, prompt = handoff_stage.Stage(), handoff_stage.chunked()

    async def main() -> None:
        opening = stage.opening()
        opening.granter_boot_id = b"old boot id 1234"
        with pytest.raises(Unavailable, match="restarted"):
            await stage.fetch(stage.granter_link(prompt), opening, handoff_stage.OWN, [b"x"] * 6)
        stage.reports = await stage.ended()

    handoff_stage.on_virtual_time(main)
    assert stage.reports[0].end == "refused" and not prompt.ended_at  # it was never admitted


@pytest.mark.parametrize(("deadline_ms", "most_s"), [(700, 0.7), (0, 0.9)])
def test_endless_renewals_pin_no_longer_than_the_request_lives(
    deadline_ms: int, most_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.kv_transfer.granter.MAX_DEADLINE_MS", 900)
    stage, prompt = handoff_stage.Stage(), handoff_stage.chunked(pause=50.0)
    acknowledged: list[int] = []
    failures: list[str] = []

    async def main() -> None:
        opening = stage.opening()
        opening.deadline_ms = deadline_ms
        link = stage.granter_link(prompt)
        await link.send(handoff_pb2.ReaderMessage(open=opening))
        listening = asyncio.ensure_future(listen(link))
        with pytest.raises(LinkClosed):
            for n in range(1, 1000):
                # A reader renews at this period, on virtual time.
                await asyncio.sleep(0.1)
                await link.send(handoff_pb2.ReaderMessage(renew=handoff_pb2.Renew(n=n)))
        await listening
        stage.reports = await stage.ended()

    async def listen(link: ReaderLink) -> None:
        with contextlib.suppress(LinkClosed):
            while message := await link.receive():
                if message.WhichOneof("kind") == "acknowledged":
                    acknowledged.append(message.acknowledged.n)
                elif message.WhichOneof("kind") == "failed":
                    failures.append(message.failed.code)

    handoff_stage.on_virtual_time(main)
    lease_s = stage.config.lease_s
    assert stage.reports[0].end == "expired" and set(failures) == {"LeaseLost"}
    last_s = 0.1 * max(acknowledged)  # that was heard in time
    assert last_s == pytest.approx(most_s + 2 * lease_s, abs=0.11)
    assert prompt.ended_at[0] == pytest.approx(last_s + lease_s, abs=0.01)
    handoff_stage.nothing_left(stage, prompt)


def test_a_silent_granter_is_given_up_after_the_lease() -> None:
    stage = handoff_stage.Stage()

    async def main() -> None:
        near, _ = memory_link()
        with pytest.raises(LeaseLost, match="no answer"):
            await stage.fetch(near, stage.opening(), handoff_stage.OWN, [b"x"] * 6)
        await stage.ended()

    _, loop = handoff_stage.on_virtual_time(main)
    assert loop.time() < 100 + 2 * stage.config.lease_s


def test_a_broken_stream_is_a_lost_worker_and_pins_outlive_it() -> None:
    stage, prompt = handoff_stage.Stage(), handoff_stage.chunked(pause=5.0)

    async def main() -> None:
        link = stage.granter_link(prompt)
        asyncio.get_running_loop().call_later(0.7, lambda: asyncio.ensure_future(link.close()))
        with pytest.raises(WorkerLost) as caught:
            await stage.fetch(link, stage.opening(), handoff_stage.OWN, [b"x"] * 6)
        assert isinstance(caught.value, LinkClosed)
        assert not prompt.ended_at
        stage.reports = await stage.ended()

    handoff_stage.on_virtual_time(main)
    assert stage.reports[0].end == "expired"
    assert prompt.ended_at == [pytest.approx(2.5)]  # the last renewal was at 0.5 s
    handoff_stage.nothing_left(stage, prompt)


def test_an_unknown_peer_fails_and_hangs_up() -> None:
    stage, prompt = handoff_stage.Stage(), handoff_stage.chunked()

    async def main() -> None:
        link = stage.granter_link(prompt)
        stage.exchange.leave(handoff_stage.GRANTER)
        with pytest.raises(ReadFailed, match="no worker"):
            await stage.fetch(link, stage.opening(), handoff_stage.OWN, [b"x"] * 6)
        await link.close()
        await stage.ended()

    handoff_stage.on_virtual_time(main)
    assert not prompt.ended_at and not stage.sent


def test_a_stream_on_which_nothing_is_fetched_is_closed() -> None:
    """Its reader found beforehand that the blocks do not suit it."""
    stage, prompt = handoff_stage.Stage(), handoff_stage.ScriptedPrompt([])

    async def main() -> None:
        link, size = stage.granter_link(prompt), handoff_stage.BLOCK_TOKENS
        reader = HandoffReader(
            link, stage.reader, handoff_stage.GRANTER, size, stage.config, stage.quarantine_blocks
        )
        await reader.finished()
        (report,) = await stage.ended()
        assert report.end == "refused" and isinstance(report.failure, LinkClosed)

    _, loop = handoff_stage.on_virtual_time(main)
    assert loop.time() < stage.config.lease_s / 2
