"""Chooses the node of each worker of a fleet: over all nodes, or packed on few. Pure.

Each worker has a placement group of its own, so Ray does not know which groups are a fleet: it
would put each on the fullest node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from baton.deploy.nodes.worker_order import WorkerOrder

ROUNDING = 1e-6  # Ray counts in units of 1/10000

Room = Mapping[str, float]  # what a node has in all, by resource


def chosen_node(
    order: WorkerOrder,
    nodes: Mapping[str, Room],
    placed: Sequence[tuple[WorkerOrder, str]],
    *,
    pack: bool,
) -> str | None:
    """Return the address of the node for the order: of those with room beside the workers `placed`
    on them, the one with the fewest workers of its role, then of all; with `pack` the one with the
    most. None if none has room: Ray places the worker once one has."""
    there = {address: [o for o, host in placed if host == address] for address in nodes}
    fitting = [address for address, room in nodes.items() if _fits(order, room, there[address])]

    def crowd(address: str) -> tuple[int, int, str]:
        workers = there[address]
        if pack:
            return -len(workers), 0, address
        return sum(each.role == order.role for each in workers), len(workers), address

    return min(fitting, key=crowd, default=None)


def _fits(order: WorkerOrder, room: Room, workers: Sequence[WorkerOrder]) -> bool:
    return all(
        room.get(name, 0.0) - sum(each.reserves().get(name, 0.0) for each in workers)
        >= amount - ROUNDING
        for name, amount in order.reserves().items()
        if amount
    )
