"""`baton fleet` on a Ray cluster of several nodes: placed, found again, moved, without Ray."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.network import unavailable
from tests.support.ray_fleet import PASSWORD, TOKEN, Fleet, running_fleet

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(unavailable()), reason=f"no network namespaces: {unavailable()}"),
]

TOKENS = 300


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with running_fleet(tmp_path) as made:
        yield made


def at_rest(fleet: Fleet) -> bool:
    return all(row["busy_blocks"] == row["running"] == 0 for row in fleet.status().values())


def test_workers_are_placed_by_role_and_found_again(fleet: Fleet) -> None:
    """Each role on its node; a driver, an actor and a worker are killed; the end leaves nothing."""
    fleet.add_node("n1", {"baton-prefill": 1})
    fleet.add_node("n2", {"baton-decode": 1})
    driver = fleet.start_driver("--by-role")
    fleet.start_router()
    fleet.until_linked(prefill=1, decode=1)
    first = fleet.ask()
    rows = fleet.status()
    assert fleet.host_of("prefill-0") == fleet.nodes.address_of("n1")
    assert fleet.host_of("decode-0") == fleet.nodes.address_of("n2")
    assert fleet.nodes.files_with(TOKEN) == fleet.nodes.files_with(PASSWORD) == []

    driver.send_signal(signal.SIGKILL)
    driver.wait(10)
    assert fleet.nodes.kill_programs("n2", "ray::NodeActor") == 1
    assert fleet.groups() == {"prefill-0": 1, "decode-0": 1}
    driver = fleet.start_driver("--by-role")
    fleet.until(lambda: fleet.nodes.log("driver").count("worker registered") == 4)
    assert fleet.groups() == {"prefill-0": 1, "decode-0": 1}
    after = fleet.status()
    assert {n: r["boot_id"] for n, r in after.items()} == {n: r["boot_id"] for n, r in rows.items()}
    assert fleet.ask() == first
    fleet.until(lambda: fleet.metric('baton_adopted_workers{role="decode"}') == 1)
    assert fleet.metric("baton_ray_nodes") == 3

    (worker,) = fleet.workers_on("n2")
    os.kill(worker, signal.SIGKILL)
    fleet.until(lambda: fleet.workers_on("n2") not in ([], [worker]))
    fleet.until_linked(prefill=1, decode=1)
    assert fleet.ask() == first
    fleet.until(lambda: fleet.metric('baton_worker_restarts_total{reason="ended"}') == 1)
    assert fleet.metric('baton_wanted_workers{role="decode"}') == 1
    assert fleet.metric('baton_registered_workers{role="decode"}') == 1
    assert fleet.metric('baton_adopted_workers{role="decode"}') == 0

    driver.send_signal(signal.SIGTERM)
    assert driver.wait(90) == 0, fleet.logs()
    assert fleet.workers_on("n1") == fleet.workers_on("n2") == []
    assert fleet.groups() == {} and "not recommended" not in fleet.nodes.log("driver")
    assert fleet.nodes.files_with(TOKEN) == fleet.nodes.files_with(PASSWORD) == []


def test_the_ranks_of_a_worker_are_on_one_node(fleet: Fleet) -> None:
    """Two ranks with a core each: the node with one core is not taken."""
    fleet.add_node("n1", {"baton-decode": 1}, cpus=1)
    fleet.add_node("n2", {"baton-decode": 1}, cpus=2)
    driver = fleet.start_driver(
        "--by-role", "--prefill=0", "--decode=2", "--cpus=1", "--set=worker.tp=2"
    )
    fleet.until(lambda: fleet.ranks_on("n2") == 1)  # beside the leader
    assert fleet.workers_on("n1") == [] and fleet.ranks_on("n1") == 0
    waiting = fleet.audit()["waiting"].values()
    assert "no node has room for it (CPU 2, baton-decode 1)" in waiting
    assert fleet.groups() == {"decode-0": 2, "decode-1": 2}, "a bundle for each rank"
    driver.send_signal(signal.SIGTERM)
    assert driver.wait(90) == 0, fleet.logs()
    assert fleet.groups() == {}


def test_a_packed_fleet_is_on_one_node(fleet: Fleet) -> None:
    """Spread, the second worker would go to the other node."""
    fleet.add_node("n1", {}, cpus=3)
    fleet.add_node("n2", {}, cpus=3)
    driver = fleet.start_driver("--pack", "--prefill=1", "--decode=2")
    fleet.start_router()
    fleet.until_linked(prefill=1, decode=2)
    assert {fleet.host_of(name) for name in fleet.groups()} == {fleet.nodes.address_of("n1")}
    driver.send_signal(signal.SIGTERM)
    assert driver.wait(90) == 0, fleet.logs()
    assert fleet.groups() == {}


def test_a_lost_node_moves_its_workers_and_fails_no_request(fleet: Fleet) -> None:
    """A node is killed with its decode worker under load; then a raylet is, whose node lives."""
    fleet.add_node("n1", {"baton-prefill": 1})
    fleet.add_node("n2", {"baton-decode": 2})
    fleet.add_node("n3", {"baton-decode": 2})
    driver = fleet.start_driver("--by-role", "--decode", "2", "--cpus", "0")
    fleet.start_router()
    fleet.until_linked(prefill=1, decode=2)
    nodes = {fleet.nodes.address_of(name): name for name in ("n2", "n3")}
    lost = nodes[fleet.host_of("decode-0")]
    kept = nodes[fleet.host_of("decode-1")]
    assert lost != kept, "two workers of a role are spread over two nodes"
    (expected,) = fleet.streams(1, TOKENS).end()

    streams = fleet.streams(4, TOKENS)
    fleet.nodes.kill(lost)
    assert streams.end() == [expected] * 4, fleet.logs()
    fleet.until_linked(prefill=1, decode=2)
    fleet.until(lambda: fleet.host_of("decode-0") == fleet.nodes.address_of(kept))
    assert len(fleet.workers_on(kept)) == 2

    fleet.add_node("n4", {"baton-prefill": 1})
    before = fleet.status()["prefill-0"]
    with fleet.asking() as asking:
        assert fleet.nodes.kill_programs("n1", "raylet/raylet ") == 1
        fleet.until(lambda: fleet.workers_on("n4") != [])
        fleet.until(lambda: fleet.workers_on("n1") == [])
        fleet.until(lambda: fleet.host_of("prefill-0") == fleet.nodes.address_of("n4"))
    assert asking.asked > 0 and asking.wrong == [], fleet.logs()
    assert fleet.status()["prefill-0"]["boot_id"] != before["boot_id"]
    fleet.until_linked(prefill=1, decode=2)
    assert fleet.ask() == asking.expected
    fleet.until(lambda: at_rest(fleet))  # a report may be older than the last answer

    driver.send_signal(signal.SIGTERM)
    assert driver.wait(90) == 0, fleet.logs()
    for name in ("n1", kept, "n4"):
        assert fleet.workers_on(name) == [], name
    assert fleet.status() == {} and fleet.groups() == {}


def test_a_node_that_joins_takes_what_waits_and_what_is_added(fleet: Fleet) -> None:
    """Under load; the workers that run stay as they are."""
    fleet.add_node("n1", {"baton-prefill": 1, "baton-decode": 3})
    options = ("--by-role", "--cpus", "0", "--leave-workers", "--prefill", "2")
    driver = fleet.start_driver(*options)
    fleet.start_router()
    fleet.until_linked(prefill=1, decode=1)
    fleet.until(lambda: len(fleet.audit()["waiting"]) == 1)  # it follows a turn later
    ((waiting, reason),) = fleet.audit()["waiting"].items()
    assert "no node has room" in reason
    before = fleet.status()
    with fleet.asking() as asking:
        fleet.add_node("n2", {"baton-prefill": 1, "baton-decode": 3})
        fleet.until_linked(prefill=2, decode=1)
        driver.send_signal(signal.SIGTERM)
        assert driver.wait(30) == 0, fleet.logs()
        driver = fleet.start_driver(*options, "--decode", "2")
        fleet.until_linked(prefill=2, decode=2)
    assert asking.asked > 0 and asking.wrong == [], fleet.logs()
    joined = fleet.nodes.address_of("n2")
    assert fleet.host_of(waiting) == fleet.host_of("decode-1") == joined
    after = fleet.status()
    assert [after[name]["boot_id"] for name in before] == [
        row["boot_id"] for row in before.values()
    ]
    assert {fleet.host_of(name) for name in before} == {fleet.nodes.address_of("n1")}


def test_workers_serve_without_ray_and_are_adopted_later(fleet: Fleet) -> None:
    fleet.add_node("n1", {"baton-prefill": 1, "baton-decode": 1})
    fleet.add_node("n2", {"baton-prefill": 1, "baton-decode": 1})
    fleet.start_driver("--by-role", "--leave-workers", "--cpus", "0")
    fleet.start_router()
    fleet.until_linked(prefill=1, decode=1)
    before = fleet.status()
    with fleet.asking() as asking:
        fleet.nodes.kill_ray()
        fleet.nodes.start_head()
        for name in ("n1", "n2"):
            fleet.add_node(name, {"baton-prefill": 1, "baton-decode": 1})
        driver = fleet.start_driver("--by-role", "--leave-workers", "--cpus", "0")
        fleet.until(lambda: fleet.nodes.log("driver").count("worker registered") == 4)
    assert asking.asked > 0 and asking.wrong == [], fleet.logs()
    assert {n: row["boot_id"] for n, row in fleet.status().items()} == {
        n: row["boot_id"] for n, row in before.items()
    }
    driver.send_signal(signal.SIGTERM)
    assert driver.wait(30) == 0, fleet.logs()
    assert fleet.ask() == asking.expected
