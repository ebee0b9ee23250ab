"""Which node of a Ray cluster gets a worker that a running fleet is given."""

from __future__ import annotations

import pytest

from baton.deploy.nodes.node_choice import emptiest_node
from baton.deploy.nodes.worker_order import WorkerOrder
from baton.runtime.registry import Role

A, B = "10.0.0.1", "10.0.0.2"


def order(name: str, cpus: float = 1.0, by_role: bool = False) -> WorkerOrder:
    role: Role = "prefill" if name.startswith("prefill") else "decode"
    return WorkerOrder(name, role, "baton", "", (), 60.0, cpus, by_role=by_role)


NEW = order("decode-9")


@pytest.mark.parametrize(
    ("placed", "rooms", "expected"),
    [
        ([], {A: {"CPU": 9.0}}, ""),
        ([("decode-0", A)], {A: {"CPU": 9.0}, B: {"CPU": 9.0}}, B),
        ([("decode-0", A), ("prefill-0", B)], {A: {"CPU": 9.0}, B: {"CPU": 9.0}}, B),
        ([("prefill-0", A)], {A: {"CPU": 9.0}, B: {"CPU": 9.0}}, B),
        ([("decode-0", A)], {A: {"CPU": 9.0}, B: {"CPU": 0.5}}, A),
        ([("decode-0", A)], {A: {"CPU": 9.0}, B: {"GPU": 8.0}}, A),
        ([("decode-0", A)], {A: {"CPU": 1.0}, B: {}}, ""),
        ([("decode-0", "10.0.0.9")], {A: {"CPU": 1.0}}, A),
    ],
)
def test_the_node_with_room_and_the_fewest_of_its_role_is_chosen(
    placed: list[tuple[str, str]], rooms: dict[str, dict[str, float]], expected: str
) -> None:
    found = emptiest_node(NEW, rooms, [(order(name), host) for name, host in placed])
    assert found == expected


def test_what_the_role_reserves_counts() -> None:
    rooms = {A: {"baton-decode": 2.0}, B: {"baton-decode": 1.0}}
    placed = [(order("decode-0", 0.0, by_role=True), host) for host in (A, B)]
    assert emptiest_node(order("decode-1", 0.0, by_role=True), rooms, placed) == A
