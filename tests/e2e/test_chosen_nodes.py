"""The node that a driver chooses for an actor, on a real Ray of two nodes, without workers."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.network import unavailable
from chaos.ray_nodes import HEAD, RayNodes, ray_nodes

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(unavailable()), reason=f"no network namespaces: {unavailable()}"),
]
DRIVER_S = 120.0
# Actors without the cluster's token start no worker, and report on which node they are.
DRIVER = """
import json, sys, time
import ray
from baton.deploy.nodes.node_choice import NodeChoice
from baton.deploy.nodes.ray_fleet import RayFleet
from baton.deploy.nodes.worker_order import WorkerOrder

head, first, second = sys.argv[1:]
ray.init(address=head, namespace="test", log_to_driver=False)
fleet, found = RayFleet(ray, pack=False), {}
settings = (("registry.location", "redis://127.0.0.1:1/0"),)
for name, choice in (
    ("decode-0", NodeChoice(second)),
    ("decode-1", NodeChoice(first)),
    ("decode-2", NodeChoice(first)),  # which is full by then
    ("decode-3", NodeChoice(first, waits=True)),
):
    fleet.make(WorkerOrder(name, "decode", "test", "", settings, 10.0), choice)
    until_s = time.monotonic() + (10.0 if choice.waits else 60.0)
    while name not in found and time.monotonic() < until_s:
        found |= {name: report.node for name, report in fleet.ask().items()}
print(json.dumps({"rooms": sorted(fleet.rooms()), "found": found}))
"""


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[RayNodes]:
    with ray_nodes(tmp_path) as made:
        for name, cpus in (("n1", 1), ("n2", 2)):
            made.reserve(name)
            made.start_node(name, {}, {}, cpus)
        made.wait_joined(("n1", "n2"))
        yield made


def test_ray_takes_the_chosen_node_unless_it_is_full(nodes: RayNodes) -> None:
    head, first, second = (nodes.address_of(name) for name in (HEAD, "n1", "n2"))
    command = [sys.executable, "-P", "-c", DRIVER, nodes.address, first, second]
    process = nodes.in_node(HEAD, command, {}, "driver")
    process.wait(DRIVER_S)
    line = nodes.log("driver").splitlines()[-1]
    assert line.startswith("{"), nodes.log("driver")
    said = json.loads(line)
    assert said["rooms"] == sorted((head, first, second))
    assert said["found"] == {"decode-0": second, "decode-1": first, "decode-2": second}
