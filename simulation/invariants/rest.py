"""Whether a fleet is at rest: nothing is held anywhere, and every router knows what workers have.

Looked at after all requests have ended and all faults are over. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from baton.router.fleet.radix_index import RadixIndex
from baton.simulation.fleet.world import RouterProcess, WorkerProcess, World


def restless(world: World) -> list[str]:
    """Return the processes that lack a device or still hold something: a lease, a pin, a
    quarantined or used block, a request; and routers that are not linked to every worker, or
    believe that a request waits there, or know another cache than a worker has."""
    found = []
    for process in world.workers.values():
        found += [f"{process.machine.name}: {what}" for what in _held(process, len(world.routers))]
    for router in world.routers.values():
        found += [f"{router.machine.name}: {what}" for what in _borne(router)]
        linked = router.fleet.linked_counts()
        roles: list[str] = [process.role for process in world.workers.values()]
        if any(linked[role] != roles.count(role) for role in linked):
            found.append(f"{router.machine.name}: linked to {linked} of {len(roles)} workers")
        found += [f"{router.machine.name}: believes {what}" for what in _reported(router, world)]
    if in_flight := world.reads_in_flight():
        found.append(f"{in_flight} READs are in flight, {world.exchange.stuck} of them stuck")
    return found or list(_unlike_pools(world))  # which come to rest last


def _held(process: WorkerProcess, routers: int) -> Iterable[str]:
    if process.machine.alive and process.engine.stands:
        yield "its device is lost, and no other process has taken its place"
        return
    if process.worker.draining.is_set():
        yield "it drains"
        return
    counts = process.pool.counts()
    if counts.available != counts.total:
        yield f"{counts}"
        return  # the books are looked at when it is quiet
    try:
        audit = process.worker.audit()
    except RuntimeError as error:
        yield f"the books do not balance: {error}"
        return
    for name in ("requests", "waiting", "running", "open_handoffs"):
        if audit.get(name):
            yield f"{audit[name]}"
    if audit.get("sessions", 0) > routers:
        yield f"{audit['sessions']} routers' sessions, of {routers}"
    if process.mover.holds:
        yield f"{process.mover.holds} leases ask for progress"


def _borne(router: RouterProcess) -> Iterable[str]:
    dispatcher = router.dispatcher
    if len(dispatcher) or dispatcher._retrying:
        yield f"{len(dispatcher)} attempts, {len(dispatcher._retrying)} being placed"
    if router.admission.taken:
        yield f"{router.admission.taken} tickets taken"
    if waiting := router.fleet.unplaced.waiting:
        yield f"{waiting} requests still counted as waiting on the router"


def _reported(router: RouterProcess, world: World) -> Iterable[str]:
    """Yield workers whose queue the router believes not to be empty: it would refuse a request."""
    for name in world.workers:
        link = router.fleet.link(name)
        if link is not None and link.up and link.load.waiting:
            yield f"{link.load.waiting} requests wait at {name}"


def _unlike_pools(world: World) -> Iterable[str]:
    """Yield the routers whose index says of a worker what its pool has not cached, or lacks some
    of it. Deltas come until all is quiet: a worker tells with its next step what it has evicted."""
    for router in world.routers.values():
        for process in world.workers.values():
            if (what := _unlike(router.fleet.index, process)) is not None:
                yield f"{router.machine.name}: of {process.machine.name}'s cache its index {what}"


def _unlike(index: RadixIndex, process: WorkerProcess) -> str | None:
    watched = index._watched.get(process.machine.name)
    if watched is None or not watched.complete or watched.boot_id != process.boot_id:
        return "knows nothing, or another process's"
    mask = watched.mask
    reported = {identity for identity, holders in index._holders.items() if holders & mask}
    cached = set(process.pool.identities())
    if reported == cached:
        return None
    return f"lacks {len(cached - reported)} blocks, and has {len(reported - cached)} too many"
