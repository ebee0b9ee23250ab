"""READs of an agent against scripted bindings: posted, polled, in segments, and their ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from baton.kv_transfer import nixl_agent
from baton.kv_transfer.local_pool import DevicePool
from baton.kv_transfer.nixl_agent import NixlAgent
from baton.kv_transfer.read_segments import Landed
from baton.kv_transfer.segment_queue import SegmentQueue
from baton.runtime.errors import ReadFailed
from tests.support import nixl_agents
from tests.support.scripted_nixl import Ended, ScriptedAgent

Made = tuple[NixlAgent, ScriptedAgent]


def test_a_read_that_is_done_when_posted(made: Made) -> None:
    agent, fake = made
    nixl_agents.there(agent, lambda: agent.connect(nixl_agents.nixl_peer()))
    fake.first_state = "DONE"
    assert nixl_agents.start_read(agent).wait() is None
    assert fake.indices == [([7, 2], [4, 0])]
    assert "release read 0" in fake.log


def test_a_read_is_polled_until_it_is_done(made: Made) -> None:
    agent, fake = made
    nixl_agents.there(agent, lambda: agent.connect(nixl_agents.nixl_peer()))
    ended = nixl_agents.start_read(agent)
    fake.wait_polls(5)
    assert not ended.reported and agent.unsettled == 1
    fake.posted[0].state = "DONE"
    assert ended.wait() is None
    fake.wait_polls(2)
    assert agent.unsettled == 0 and fake.log.count("release read 0") == 1


def test_reads_into_a_device_have_their_own_polling(
    scripted: ScriptedAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing: Any = None
    device = DevicePool(
        1 << 40, 8, nixl_agents.nixl_pool().block_bytes, 1, 0, nothing, lambda: None
    )
    monkeypatch.setattr(nixl_agent, "SPIN_S", 600.0)  # a host's
    agent = NixlAgent(device, "name", SegmentQueue())
    try:
        nixl_agents.there(agent, lambda: agent.connect(nixl_agents.nixl_peer()))
        ended = nixl_agents.start_read(agent)
        scripted.wait_polls(3)
        scripted.posted[0].state = "DONE"
        assert ended.wait() is None
    finally:
        agent.stop()


@pytest.mark.parametrize(("state", "says"), [("ERR", "ERR"), ("raise", "remote disconnected")])
def test_an_error_ends_a_read_once_and_keeps_its_cause(made: Made, state: str, says: str) -> None:
    agent, fake = made
    nixl_agents.there(agent, lambda: agent.connect(nixl_agents.nixl_peer()))
    ended = nixl_agents.start_read(agent)
    fake.posted[0].state = state
    failure = ended.wait()
    assert isinstance(failure, ReadFailed) and says in str(failure)
    fake.wait_polls(3)
    assert len(ended.reported) == 1


def test_posting_that_raises_ends_the_read(made: Made) -> None:
    agent, fake = made
    nixl_agents.there(agent, lambda: agent.connect(nixl_agents.nixl_peer()))
    fake.first_state = ConnectionError("gone")
    failure = nixl_agents.start_read(agent).wait()
    assert isinstance(failure, ReadFailed) and isinstance(failure.__cause__, ConnectionError)


@pytest.fixture
def connected(made: Made, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Made]:
    """Connects to the peer, with so many seconds between its connections."""

    def connect(reconnect_s: float) -> Made:
        monkeypatch.setattr(nixl_agent, "RECONNECT_S", reconnect_s)
        nixl_agents.there(made[0], lambda: made[0].connect(nixl_agents.nixl_peer()))
        return made

    return connect


def test_after_an_error_the_next_read_adds_the_peer_again(
    connected: Callable[[float], Made],
) -> None:
    """UCX keeps a broken connection broken, so NIXL would fail every READ from then on."""
    agent, fake = connected(0.0)
    failed = nixl_agents.start_read(agent)
    fake.posted[0].state = "raise"
    assert isinstance(failed.wait(), ReadFailed)
    assert "remove peer" not in fake.log  # not before a READ needs it
    fake.first_state = "DONE"
    assert nixl_agents.start_read(agent).wait() is None
    assert fake.log.count("remove peer") == 1 and fake.log.count("release blocks of peer") == 1
    assert nixl_agents.start_read(agent).wait() is None
    assert fake.log.count("remove peer") == 1


def test_a_peer_is_added_again_once_a_second_at_most(
    connected: Callable[[float], Made],
) -> None:
    agent, fake = connected(600.0)
    fake.first_state = ConnectionError("gone")
    assert isinstance(nixl_agents.start_read(agent).wait(), ReadFailed)
    assert "broke again at once" in str(nixl_agents.start_read(agent).wait())
    assert "remove peer" not in fake.log and len(fake.posted) == 1


def test_a_peer_that_cannot_be_added_again_is_tried_later(
    connected: Callable[[float], Made],
) -> None:
    agent, fake = connected(0.0)
    fake.first_state = ConnectionError("gone")
    assert isinstance(nixl_agents.start_read(agent).wait(), ReadFailed)
    fake.fail.add("prep_peer")
    assert "cannot reach" in str(nixl_agents.start_read(agent).wait())
    fake.fail.clear()
    fake.first_state = "DONE"
    assert nixl_agents.start_read(agent).wait() is None
    agent.forget(nixl_agents.PEER)
    fake.wait_polls(2)
    assert fake.log.count("remove peer") == 3  # once for each time that it was added


def test_a_broken_peer_with_a_read_in_flight_is_kept(
    connected: Callable[[float], Made],
) -> None:
    """That READ may still land, or never end: its peer stays, and no other READ is posted."""
    agent, fake = connected(0.0)  # other READs do not wait for its end
    pending, failed = nixl_agents.start_read(agent), nixl_agents.start_read(agent)
    fake.posted[1].state = "ERR"
    assert isinstance(failed.wait(), ReadFailed)
    assert "with READs in flight" in str(nixl_agents.start_read(agent).wait())
    fake.posted[0].state = "DONE"
    assert pending.wait() is None and "remove peer" not in fake.log
    fake.first_state = "DONE"
    assert nixl_agents.start_read(agent).wait() is None and "remove peer" in fake.log


def test_reads_wait_for_the_end_of_those_on_a_broken_connection(
    connected: Callable[[float], Made],
) -> None:
    """NIXL reports the ends of a broken connection's READs one after the other."""
    agent, fake = connected(600.0)
    nixl_agents.set_connected_for(agent, 600.0)
    pending, failed = nixl_agents.start_read(agent), nixl_agents.start_read(agent)
    fake.posted[1].state = "ERR"
    assert isinstance(failed.wait(), ReadFailed)
    waiting = nixl_agents.start_read(agent)
    fake.wait_polls(2)
    assert not waiting.reported and len(fake.posted) == 2
    fake.first_state, fake.posted[0].state = "DONE", "ERR"
    assert isinstance(pending.wait(), ReadFailed)
    assert waiting.wait() is None and fake.log.count("remove peer") == 1


@pytest.fixture
def in_segments(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], tuple[Ended, list[tuple[int, int]]]]:
    """Starts a READ of five blocks, two to a segment; returns its end and the reports before it."""
    agent, _ = made
    nixl_agents.there(agent, lambda: agent.connect(nixl_agents.nixl_peer()))

    def start(landed: Landed | None = None) -> tuple[Ended, list[tuple[int, int]]]:
        reports: list[tuple[int, int]] = []
        look = landed or (lambda first, end: reports.append((first, end)))
        return nixl_agents.start_read(
            agent, [4, 0, 1, 2, 3], [7, 2, 6, 5, 0], look, step=2
        ), reports

    return start


def test_segments_are_reported_as_they_land_and_the_end_last(
    made: Made, in_segments: Callable[[], tuple[Ended, list[tuple[int, int]]]]
) -> None:
    _, fake = made
    ended, reports = in_segments()
    assert fake.indices == [([7, 2], [4, 0]), ([6, 5], [1, 2]), ([0], [3])]
    for number in (1, 0):
        fake.posted[number].state = "DONE"
        fake.wait_polls(2)
    assert reports == [(2, 4), (0, 2)] and not ended.reported
    fake.posted[2].state = "DONE"
    assert ended.wait() is None
    assert reports[2:] == [(4, 5)]


def test_a_failed_piece_fails_the_read_once_the_others_settle(
    made: Made, in_segments: Callable[[], tuple[Ended, list[tuple[int, int]]]]
) -> None:
    _, fake = made
    ended, reports = in_segments()
    fake.posted[0].state = "ERR"
    fake.wait_polls(3)
    assert not ended.reported  # bytes of the others may still land
    fake.posted[1].state = fake.posted[2].state = "DONE"
    assert "ERR" in str(ended.wait())
    assert len(reports) == 2


def test_no_segment_is_posted_after_one_that_cannot_be(
    made: Made, in_segments: Callable[[], tuple[Ended, list[tuple[int, int]]]]
) -> None:
    _, fake = made
    fake.fail.add("make_prepped_xfer")
    ended, reports = in_segments()
    assert "scripted to fail" in str(ended.wait())
    assert not fake.posted and not reports


def test_a_look_that_raises_fails_the_read_and_nothing_else(
    made: Made, in_segments: Callable[[], tuple[Ended, list[tuple[int, int]]]]
) -> None:
    _, fake = made
    fake.first_state = "DONE"

    def look(first: int, end: int) -> None:
        raise IndexError("no such block")

    ended, _ = in_segments(look)
    assert "no such block" in str(ended.wait())
    assert in_segments()[0].wait() is None


def test_an_unknown_peer_is_no_read(made: Made) -> None:
    agent, fake = made
    failure = nixl_agents.start_read(agent).wait()
    assert "not connected" in str(failure) and not fake.posted
