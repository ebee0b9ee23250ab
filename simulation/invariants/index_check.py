"""Whether each router's index says of each worker what that worker's pool has cached.

    pool.identities() ── snapshot, deltas ──▶ router.fleet.index: no block more, none less

To be asked when all is quiet: a delta may still be on its way, and a worker tells with its next
step what it has evicted. A restarted router has its index from snapshots alone. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from baton.router.fleet.radix_index import RadixIndex
from baton.simulation.fleet.world import WorkerProcess, World


def unlike_pools(world: World) -> Iterable[str]:
    for router in world.routers.values():
        for process in world.workers.values():
            if what := _unlike(router.fleet.index, process):
                yield f"{router.machine.name}: of {process.machine.name}'s cache its index {what}"


def _unlike(index: RadixIndex, process: WorkerProcess) -> str:
    watched = index._watched.get(process.machine.name)
    if watched is None or not watched.complete or watched.boot_id != process.boot_id:
        return "knows nothing, or another process's"
    mask = watched.mask
    reported = {identity for identity, holders in index._holders.items() if holders & mask}
    cached = set(process.pool.identities())
    if reported == cached:
        return ""
    return f"lacks {len(cached - reported)} blocks, and has {len(reported - cached)} too many"
