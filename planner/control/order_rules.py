"""The rules of a controller's order to a worker: the last one of a role gets none, and each is
bounded in time.

Knows no connection: the caller sends the order.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable

from baton.runtime.errors import Unavailable
from baton.runtime.registry import WorkerRecord

ORDER_TIMEOUT_S = 4.0  # after which a controller looks again; its leadership lasts longer


class OrderUnanswered(Unavailable):
    """The worker may have accepted the order, or accept it yet."""


def check_others(worker: WorkerRecord, registered: Iterable[WorkerRecord]) -> None:
    """Raises Unavailable if no other worker of its role is registered."""
    worker_id, role = worker.worker_id, worker.role
    if not any(each.role == role and each.worker_id != worker_id for each in registered):
        raise Unavailable(f"{worker_id} is the last {role} worker in the registry: it keeps it")


@contextlib.asynccontextmanager
async def order_time(worker: WorkerRecord, order: str) -> AsyncIterator[None]:
    """Raises OrderUnanswered after ORDER_TIMEOUT_S."""
    try:
        async with asyncio.timeout(ORDER_TIMEOUT_S):
            yield
    except TimeoutError as error:
        raise OrderUnanswered(
            f"{worker.worker_id} at {worker.address} has not accepted {order} within "
            f"{ORDER_TIMEOUT_S:.0f} s; it may still accept it: see `baton ps`"
        ) from error
