"""An agent with more segments to copy than it can: commands, polls and a stop have their turn."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from baton.kv_transfer import nixl_agent
from baton.kv_transfer.local_pool import HostPool
from baton.kv_transfer.mover import PeerPool
from baton.kv_transfer.nixl_agent import NixlAgent
from baton.kv_transfer.read_segments import cut
from baton.kv_transfer.segment_queue import SegmentQueue
from baton.runtime.errors import ReadFailed
from tests.support.scripted_nixl import NixlHandle, ScriptedAgent

pytestmark = pytest.mark.timed

BUSY, OTHER = b"B" * 16, b"O" * 16
BLOCKS = 4
DEADLINE_S = 30.0


class CopyingAgent(ScriptedAgent):
    """Posting a READ copies it: 1 ms of this thread."""

    def transfer(self, handle: NixlHandle) -> str:
        # A copy takes this time of the thread.
        time.sleep(0.001)
        return "DONE"


def peer(boot_id: bytes) -> PeerPool:
    return PeerPool(boot_id, "nixl", boot_id[:1], 1 << 33, 64, BLOCKS)


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[NixlAgent, CopyingAgent, SegmentQueue]]:
    """An agent whose queue never empties: what ends is followed by as much again."""
    fake, segments = CopyingAgent(), SegmentQueue()
    bindings = SimpleNamespace(
        __name__="scripted",
        nixl_agent=lambda name, config: fake,
        nixl_agent_config=lambda **options: options,
    )
    monkeypatch.setattr(nixl_agent, "load_bindings", lambda: bindings)
    agent = NixlAgent(HostPool(np.zeros((BLOCKS, 64), dtype=np.uint8), 1), "busy", segments)
    assert done(agent, lambda: agent.connect(peer(BUSY)))

    def more(failure: ReadFailed | None) -> None:
        segments.add(cut(BUSY, range(BLOCKS), range(BLOCKS), 1, None, more))

    for _ in range(50):
        more(None)
    agent.wake()
    yield agent, fake, segments
    agent.stop()


def done(agent: NixlAgent, action: Callable[[], None]) -> bool:
    """Whether a command has had its turn within the deadline."""
    had = threading.Event()

    def command() -> None:
        action()
        had.set()

    return agent.do(command) and had.wait(DEADLINE_S)


def test_commands_have_their_turn(busy: tuple[NixlAgent, CopyingAgent, SegmentQueue]) -> None:
    agent, fake, segments = busy
    before = len(fake.posted)
    assert done(agent, lambda: agent.connect(peer(OTHER)))
    agent.forget(OTHER)
    assert done(agent, lambda: None)
    assert "remove O" in fake.log
    fake.wait_polls(3)  # of notifications: what serves peers' READs
    assert segments and len(fake.posted) > before  # the READs went on


def test_a_stop_ends_the_copying(busy: tuple[NixlAgent, CopyingAgent, SegmentQueue]) -> None:
    agent, fake, segments = busy
    agent.stop()
    posted = len(fake.posted)
    assert not agent.alive and fake.log[-1] == "deregister"
    # A thread that was not stopped would post more in this time.
    time.sleep(0.02)
    assert len(fake.posted) == posted and segments
