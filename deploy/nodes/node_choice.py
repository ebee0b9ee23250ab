"""Chooses the node of a worker that a running fleet gets, as when a node has joined. Pure.

Ray's own spreading begins anywhere and does not know which actors are a fleet, so it may add a
worker to a full node beside an empty one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.deploy.nodes.worker_order import WorkerOrder

ROUNDING = 1e-6  # Ray counts in units of 1/10000

Room = Mapping[str, float]  # what a node has in all, by resource


@dataclass(frozen=True, slots=True)
class NodeChoice:
    """The address of a node in Ray, or none if Ray is to choose. `waits`: for room there, because
    the worker runs there already; else Ray takes another node if this one has no room."""

    host: str = ""
    waits: bool = False


def emptiest_node(
    order: WorkerOrder, nodes: Mapping[str, Room], placed: Sequence[tuple[WorkerOrder, str]]
) -> str:
    """Return the address of the node that has room for the order beside the workers `placed` on
    it, and of those the one with the fewest workers of its role, then of all. Empty if no node
    has room, or if no worker is placed: a whole fleet is spread by Ray."""
    if not placed:
        return ""
    there = {address: [o for o, host in placed if host == address] for address in nodes}
    fitting = [address for address, room in nodes.items() if _fits(order, room, there[address])]

    def crowd(address: str) -> tuple[int, int, str]:
        workers = there[address]
        return sum(each.role == order.role for each in workers), len(workers), address

    return min(fitting, key=crowd, default="")


def _fits(order: WorkerOrder, room: Room, workers: Sequence[WorkerOrder]) -> bool:
    return all(
        room.get(name, 0.0) - sum(each.reserves().get(name, 0.0) for each in workers)
        >= amount - ROUNDING
        for name, amount in order.reserves().items()
        if amount
    )
