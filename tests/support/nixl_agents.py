"""NIXL agents over scripted bindings, and commands that run in an agent's thread.

A mover hides its agents and their queue: no caller may wait for one of them. Tests of what a thread
does, and of what is left when one fails, reach them only by this module.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from baton.kv_transfer.local_pool import HostPool
from baton.kv_transfer.mover import PeerPool
from baton.kv_transfer.nixl_agent import NixlAgent
from baton.kv_transfer.nixl_mover import NixlMover
from baton.kv_transfer.read_segments import Landed, cut
from baton.kv_transfer.segment_queue import SegmentQueue
from tests.support.handoff_stage import BLOCK_BYTES
from tests.support.scripted_nixl import Ended

PEER = b"P" * 16
NIXL_BLOCKS = 8
AGENT_S = 30.0  # for an agent's thread to do something


def opened_agent() -> NixlAgent:
    return NixlAgent(nixl_pool(), "name", SegmentQueue())


def nixl_pool() -> HostPool:
    return HostPool(np.zeros((NIXL_BLOCKS, BLOCK_BYTES), dtype=np.uint8), 1)


def nixl_peer(boot_id: bytes = PEER, name: bytes = b"peer") -> PeerPool:
    return PeerPool(boot_id, "nixl", name, 1 << 33, BLOCK_BYTES, 5, 3)


def agents_of(mover: NixlMover) -> tuple[NixlAgent, ...]:
    """Return the agents of `mover`; peers read through the first."""
    return tuple(mover._agents)


def queue_of(mover: NixlMover) -> SegmentQueue:
    """Return the queue that the agents of `mover` take segments of READs from."""
    return mover._segments


def connected(agent: NixlAgent) -> set[bytes]:
    """Return the boot ids of the peers that `agent` is connected to."""
    return set(agent._peers)


def set_connected_for(agent: NixlAgent, seconds: float) -> None:
    """Make the connection to PEER so old."""
    there(agent, lambda: setattr(agent._peers[PEER], "added_s", time.monotonic() - seconds))


def there(agent: NixlAgent, action: Callable[[], Any]) -> Any:
    """Do something in the agent's thread; its result, or what it raised."""
    done = threading.Event()
    result: list[Any] = []

    def command() -> None:
        try:
            result.append(action())
        except Exception as error:  # the caller compares what was raised
            result.append(error)
        done.set()

    assert agent.do(command)
    assert done.wait(AGENT_S)
    return result[0]


def start_read(
    agent: NixlAgent,
    remote: Sequence[int] = (4, 0),
    local: Sequence[int] = (7, 2),
    landed: Landed | None = None,
    step: int = NIXL_BLOCKS,
) -> Ended:
    """Queue a READ and wait until the agent's thread has posted it."""
    ended = Ended()
    agent._segments.add(cut(PEER, remote, local, step, landed, ended))
    agent.wake()
    assert [there(agent, lambda: None) for _ in range(2)]  # a turn later
    return ended
