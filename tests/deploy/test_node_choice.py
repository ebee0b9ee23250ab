"""Which node of a Ray cluster gets a worker of a fleet, over all nodes or packed on few."""

from __future__ import annotations

import pytest

from baton.deploy.nodes.node_choice import chosen_node
from baton.deploy.nodes.worker_order import WorkerOrder
from baton.runtime.registry import Role

A, B, C = "10.0.0.1", "10.0.0.2", "10.0.0.3"
Rooms = dict[str, dict[str, float]]


def order(name: str, cpus: float = 1.0, by_role: bool = False) -> WorkerOrder:
    role: Role = "prefill" if name.startswith("prefill") else "decode"
    return WorkerOrder(name, role, "baton", "", (), 60.0, cpus, by_role=by_role)


NEW = order("decode-9")


def fleet_on(rooms: Rooms, names: list[str], *, pack: bool) -> list[str]:
    """Return the nodes of a whole fleet, each worker placed beside those before it."""
    placed: list[tuple[WorkerOrder, str]] = []
    for name in names:
        node = chosen_node(order(name), rooms, placed, pack=pack)
        assert node is not None
        placed.append((order(name), node))
    return [host for _, host in placed]


@pytest.mark.parametrize(
    ("placed", "rooms", "expected"),
    [
        ([], {A: {"CPU": 9.0}}, A),
        ([("decode-0", A)], {A: {"CPU": 9.0}, B: {"CPU": 9.0}}, B),
        ([("decode-0", A), ("prefill-0", B)], {A: {"CPU": 9.0}, B: {"CPU": 9.0}}, B),
        ([("prefill-0", A)], {A: {"CPU": 9.0}, B: {"CPU": 9.0}}, B),
        ([("decode-0", A)], {A: {"CPU": 9.0}, B: {"CPU": 0.5}}, A),
        ([("decode-0", A)], {A: {"CPU": 9.0}, B: {"GPU": 8.0}}, A),
        ([("decode-0", A)], {A: {"CPU": 1.0}, B: {}}, None),
        ([("decode-0", "10.0.0.9")], {A: {"CPU": 1.0}}, A),
    ],
)
def test_the_node_with_room_and_the_fewest_of_its_role_is_chosen(
    placed: list[tuple[str, str]], rooms: Rooms, expected: str | None
) -> None:
    there = [(order(name), host) for name, host in placed]
    assert chosen_node(NEW, rooms, there, pack=False) == expected


def test_what_the_role_reserves_counts() -> None:
    rooms = {A: {"baton-decode": 2.0}, B: {"baton-decode": 1.0}}
    placed = [(order("decode-0", 0.0, by_role=True), host) for host in (A, B)]
    new = order("decode-1", 0.0, by_role=True)
    assert chosen_node(new, rooms, placed, pack=False) == A


def test_a_fleet_is_spread_or_fills_nodes_one_by_one() -> None:
    rooms = {A: {"CPU": 3.0}, B: {"CPU": 3.0}, C: {"CPU": 3.0}}
    names = ["prefill-0", "decode-0", "decode-1", "decode-2"]
    assert fleet_on(rooms, names, pack=False) == [A, B, C, A]
    assert fleet_on(rooms, names, pack=True) == [A, A, A, B]


def test_packed_workers_join_the_fullest_node_with_room() -> None:
    rooms = {A: {"CPU": 4.0}, B: {"CPU": 4.0}, C: {"CPU": 2.0}}
    placed = [(order("decode-0"), B), (order("prefill-0"), C), (order("prefill-1"), C)]
    assert chosen_node(NEW, rooms, placed, pack=True) == B
