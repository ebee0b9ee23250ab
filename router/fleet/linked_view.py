"""The view that placement has of a linked worker: from its handshake, its last load report, and
what was placed on it since. Holds no state."""

from __future__ import annotations

from baton.router.fleet.worker_costs import WorkerCosts
from baton.router.fleet.worker_link import WorkerLink
from baton.router.fleet.worker_view import WorkerView, kv_format_of
from baton.runtime.wire import degraded_peers


def view_of(link: WorkerLink, bit: int, costs: WorkerCosts) -> WorkerView:
    """Return what placement knows of a linked worker; `bit` is the worker's in the index."""
    hello, load = link.worker_hello, link.load
    assert hello is not None  # a link is up after its handshake
    return WorkerView(
        worker_id=link.worker_id,
        boot_id=link.boot_id,
        role=hello.role,
        address=link.record.address,
        kv_format=kv_format_of(hello),
        max_context=hello.max_context,
        running=load.running,
        active_requests=load.active_requests,
        waiting=load.waiting,
        free_blocks=load.free_blocks,
        total_blocks=load.total_blocks or hello.total_blocks,
        promised_blocks=load.promised_blocks,
        waiting_blocks=load.waiting_blocks,
        queued_tokens=load.queued_tokens,
        queued_pairs=load.queued_pairs,
        placed_us=link.placed_us,
        placed_tokens=link.placed_tokens,
        placed_requests=link.placed_requests,
        draining=not link.takes_work,
        expected_end=link.expected_end(),
        bit=bit,
        degraded=degraded_peers(load),
        joined_s=link.joined_s,
        hinted=link.hinted,
        costs=costs,
        topology=hello.topology,
    )
