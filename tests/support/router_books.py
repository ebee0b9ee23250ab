"""The books of the router's parts, for tests of what they keep, forget and time.

The parts show what they decide, not what they keep; of all tests only this module reads that.
"""

from __future__ import annotations

import asyncio

from baton.proto import worker_pb2
from baton.router.dispatch.attempts import Attempts
from baton.router.dispatch.dispatcher import Dispatcher
from baton.router.dispatch.retry_budget import RetryBudget, RetryPermit
from baton.router.dispatch.retry_policy import MigrationQueue
from baton.router.dispatch.submitter import Submitter
from baton.router.fleet.circuits import Circuits
from baton.router.fleet.other_routers import OtherRouters
from baton.router.fleet.radix_index import RadixIndex
from baton.router.fleet.worker_link import WorkerLink
from baton.router.requests.body_budget import BodyBudget


def keeps_nothing(attempts: Attempts) -> bool:
    """Return whether `attempts` has no entry by request and none by link."""
    return not attempts._by_active_request and not attempts._by_link


def tenants_of(budget: BodyBudget) -> list[bytes]:
    """Return the tenants of which the budget keeps a share."""
    return list(budget._tenants)


def widest_holders(index: RadixIndex) -> int:
    """Return the bits that the longest set of holders in the index takes."""
    return max(index._holders.values()).bit_length()


def remembered_routers(others: OtherRouters) -> int:
    """Return how many other routers are remembered by their counters."""
    return len(others._counters)


def submitter_of(dispatcher: Dispatcher) -> Submitter:
    """Return the part of the dispatcher that places an attempt on a worker."""
    return dispatcher._submitter


def retrying(dispatcher: Dispatcher) -> set[asyncio.Task[None]]:
    """Return the dispatcher's tasks that wait to retry a request."""
    return dispatcher._retrying


def open_again(circuits: Circuits, boot_id: bytes, now_s: float) -> None:
    """Open the circuit of `boot_id`, which must be known, as a failing worker's."""
    circuits._open(circuits._circuits[boot_id], now_s, "failing")


def strikes_of(circuits: Circuits, boot_id: bytes) -> float:
    """Return the strikes of a worker; 0 where it has no circuit."""
    circuit = circuits._circuits.get(boot_id)
    return 0.0 if circuit is None else float(circuit.strikes)


def waiting_turns(queue: MigrationQueue) -> int:
    """Return how many migrations wait, short and long ones."""
    return sum(len(turns) for turns in queue._queues.values())


def is_timed(queue: MigrationQueue) -> bool:
    """Return whether the queue has a timer."""
    return queue._timer is not None


def permits_under_way(budget: RetryBudget) -> list[RetryPermit]:
    """Return the permits that were taken and not returned, in the order of their taking."""
    return list(budget._under_way)


def leave_unsent(link: WorkerLink, message: worker_pb2.RouterMessage) -> None:
    """Put `message` into the outbox of a link that is broken."""
    link._outbox.put_nowait(message)
