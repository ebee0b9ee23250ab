"""Placement groups and nodes of a fleet, on a real Ray of two nodes, without workers."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chaos.network import unavailable
from chaos.ray_nodes import HEAD, RayNodes, ray_nodes

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(420),
    pytest.mark.skipif(bool(unavailable()), reason=f"no network namespaces: {unavailable()}"),
]
PROGRAM_S = 240.0
# Actors without the cluster's token start no worker, and report on which node they are.
SCENE = """
import json, os, sys, time
import ray
from baton.deploy.nodes.fleet_driver import FleetDriver
from baton.deploy.nodes.ray_fleet import RayFleet
from baton.deploy.nodes.worker_order import WorkerOrder, node_settings

head, first, second = sys.argv[1:]
ray.init(address=head, namespace="baton-test", log_to_driver=False)
fleet = RayFleet(ray, "test")

def order(name, cpus, ranks=1):
    settings = (("registry.location", "redis://127.0.0.1:1/0"),)
    return WorkerOrder(name, "decode", "test", "", settings, 10.0, cpus, ranks=ranks)

def until(ask):
    ends_s = time.monotonic() + 60.0
    while not (found := ask()) and time.monotonic() < ends_s:
        time.sleep(0.1)  # Ray reports no change by itself
    return found

def made(order, host):
    fleet.make(order, host)
    return until(lambda: fleet.ask().get(order.worker_id)).node

def groups():
    return {
        e["name"]: [
            e["strategy"], list(e["bundles"].values()), len({*e["bundles_to_node_id"].values()})
        ]
        for e in ray.util.placement_group_table().values()
        if e["state"] == "CREATED"
    }

def threads(order):
    def counts(actor):
        return os.environ["OMP_NUM_THREADS"], node_settings(order, "", os.environ)["worker.threads"]

    return ray.get(ray.get_actor(order.worker_id).__ray_call__.remote(counts))

def driven(pack):
    orders = [order(f"decode-{number}", 1.0) for number in range(3)]
    driver = FleetDriver(fleet, orders, dict, pack=pack)
    until(lambda: driver.turn() or all(each.given_up for each in driver.summary().progress))
    nodes = [each.node for each in driver.summary().progress]
    driver.end(time.monotonic() + 30.0)
    until(free)
    return nodes

def free():
    return ray.available_resources().get("CPU") == 8.0
"""


def said(nodes: RayNodes, program: str) -> Any:
    """Return what a program prints last, beside Ray's head."""
    addresses = [nodes.address_of(name) for name in ("n1", "n2")]
    command = [sys.executable, "-P", "-c", SCENE + program, nodes.address, *addresses]
    nodes.in_node(HEAD, command, {}, "driver").wait(PROGRAM_S)
    line = nodes.log("driver").splitlines()[-1]
    assert line.startswith("{"), nodes.log("driver")
    return json.loads(line)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[RayNodes]:
    with ray_nodes(tmp_path) as made:
        for name in ("n1", "n2"):
            made.reserve(name)
            made.start_node(name, {}, {}, 4)
        made.wait_joined(("n1", "n2"))
        yield made


def test_ray_takes_the_chosen_node_unless_it_is_full(nodes: RayNodes) -> None:
    found = said(
        nodes,
        """
wanted = (("decode-0", 2.0, second), ("decode-1", 4.0, first), ("decode-2", 1.0, first))
hosts = {name: made(order(name, cpus), host) for name, cpus, host in wanted}
print(json.dumps({"rooms": sorted(fleet.rooms()), "hosts": hosts}))
""",
    )
    head, first, second = (nodes.address_of(name) for name in (HEAD, "n1", "n2"))
    assert found["rooms"] == sorted((head, first, second))
    assert found["hosts"] == {"decode-0": second, "decode-1": first, "decode-2": second}


def test_a_worker_has_a_group_that_leaves_with_it(nodes: RayNodes) -> None:
    """One bundle for each rank, on one node; it is used again, and swept once it is not wanted."""
    found = said(
        nodes,
        """
two = order("decode-0", 4.0, ranks=2)
said = {"first": made(two, second), "groups": groups(), "threads": threads(two)}
said["bare"] = made(order("decode-1", 0.0, 2), first)
ray.kill(ray.get_actor("decode-0"), no_restart=True)
until(lambda: fleet.names() == {"decode-1"})
fleet.sweep({"decode-0"})
said["again"] = made(two, None)
said["kept"] = sorted(groups())
ray.kill(ray.get_actor("decode-0"), no_restart=True)
until(lambda: fleet.names() == {"decode-1"})
fleet.sweep({"decode-1"})
until(free)
said["swept"] = groups()
fleet.remove("decode-1")
until(lambda: not groups())
print(json.dumps(said | {"left": groups(), "free": free()}))
""",
    )
    second = nodes.address_of("n2")
    assert found["first"] == found["again"] == second
    assert found["groups"] == {"baton-test/decode-0": ["STRICT_PACK", [{"CPU": 2.0}] * 2, 1]}
    assert found["threads"] == ["2", "4"], "those of a bundle, and of all ranks"
    assert found["kept"] == ["baton-test/decode-0", "baton-test/decode-1"]
    assert found["bare"] == nodes.address_of("n1")
    bare = ["STRICT_PACK", [{"memory": 1.0}] * 2, 1]
    assert found["swept"] == {"baton-test/decode-1": bare}
    assert found["left"] == {} and found["free"]


def test_a_fleet_is_packed_on_a_node_or_spread(nodes: RayNodes) -> None:
    found = said(
        nodes,
        """
print(json.dumps({"packed": driven(True), "spread": driven(False), "left": groups()}))
""",
    )
    first, second = (nodes.address_of(name) for name in ("n1", "n2"))
    assert found["packed"] == [first] * 3
    assert found["spread"] == [first, second, first]
    assert found["left"] == {}
