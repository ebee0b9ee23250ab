"""Parts of a running worker that tests watch or break.

Routers, peers and operators know a worker by its link, its grants and its audit: which part
schedules, fetches or keeps connections is its own affair. Of all tests only this module reaches in.
"""

from __future__ import annotations

import asyncio

from baton.decode_worker.scheduler import DecodeScheduler
from baton.decode_worker.sequences import Group
from baton.decode_worker.worker import DecodeWorker
from baton.kv_transfer.peers.registered_peers import Peers


def decode_scheduler(worker: DecodeWorker) -> DecodeScheduler:
    """Return the scheduler of a decode worker."""
    return worker._scheduler


def waiting_groups(scheduler: DecodeScheduler) -> list[Group]:
    """Return the groups that wait for credit, oldest first."""
    return list(scheduler.queue._groups)


def fetches_of(worker: DecodeWorker) -> list[asyncio.Task[None]]:
    """Return the tasks that fetch KV at present."""
    return list(worker._fetches.values())


def peers_of(worker: DecodeWorker) -> Peers:
    """Return the connections to prefill workers that its handoffs share."""
    return worker._handoffs._peers


def open_streams(worker: DecodeWorker) -> int:
    """Return the number of prefill workers that it has handoff streams to."""
    return len(worker._handoffs._reads._streams)
