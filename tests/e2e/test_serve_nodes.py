"""`baton serve` on all nodes of a Ray cluster: each in a network namespace, Redis between them."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.network import unavailable
from chaos.ray_nodes import HEAD
from tests.support.ray_fleet import PASSWORD, ROUTER_PORT, TOKEN, Fleet, running_fleet

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(unavailable()), reason=f"no network namespaces: {unavailable()}"),
]

HANDOFFS = 'baton_handoffs_total{outcome="completed"}'


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with running_fleet(tmp_path) as made:
        yield made


NODES = ("n1", "n2", "n3")
WORKERS = ("prefill-0", "decode-0", "decode-1")


def test_serve_ends_with_the_log_of_a_worker_that_fails(fleet: Fleet) -> None:
    """A node that serves another device than it has, and no worker stays anywhere."""
    fleet.add_node("n1", {}, cpus=2, BATON_WORKER__DEVICE="cuda")
    serve = fleet.start_serve()
    assert serve.wait(180) == 78, fleet.logs()
    said = fleet.nodes.log("driver")
    beginning = f"on {fleet.nodes.address_of('n1')} is not ready: "
    error = said[said.index("baton: error: ") :]
    assert beginning in error and "The end of its log:" in error and "cuda" in error, said
    assert fleet.workers_on("n1") == [] and fleet.status() == {}


def test_serve_answers_by_workers_on_different_nodes(fleet: Fleet) -> None:
    """Each worker has a node of its own, and an operator on another node commands them."""
    for name in NODES:
        fleet.add_node(name, {}, cpus=1)
    serve = fleet.start_serve("--decode", "2")
    fleet.until(lambda: "Ready at" in fleet.nodes.log("driver"))
    said = fleet.nodes.log("driver")
    assert "the router is linked to 1 of 1 prefill and 2 of 2 decode" in said
    for name in WORKERS:
        fleet.until(lambda name=name: f"{name} ready at " in fleet.nodes.log("driver"))
        said = fleet.nodes.log("driver")
        shown, _, rest = said.partition(f"{name} ready at ")
        assert re.search(rf"{name} on \S+: loading weights: ", shown) and rest, said
    assert {fleet.host_of(name) for name in WORKERS} == set(map(fleet.nodes.address_of, NODES))

    first = fleet.ask()
    read = [fleet.worker_metric(name, HANDOFFS) for name in WORKERS[1:]]
    assert sum(read) == 1, "the decode worker read the prompt's KV from another node"
    for secret in (TOKEN, PASSWORD):
        found = [Path(each) for each in fleet.nodes.files_with(secret)]
        assert {each.parent.name for each in found} == {f"port-{ROUTER_PORT}"}  # of `baton serve`
        assert [each for each in found if each.stat().st_mode & 0o077] == []

    for command in (("ps",), ("cluster", "status")):
        said = fleet.operator_on("n1", *command)
        assert all(name in said for name in WORKERS) and "linked to 3" in said
    assert "3 workers, 1 routers" in fleet.operator_on("n1", "doctor")
    assert "a prefill worker now" in fleet.operator_on("n1", "role", "decode-1", "prefill")
    fleet.until_linked(prefill=2, decode=1)
    assert fleet.ask() == first
    assert "decode-1 has ended" in fleet.operator_on("n1", "drain", "decode-1")
    fleet.until_linked(prefill=1, decode=2)  # a worker starts in its first role

    jobs = fleet.command_on(HEAD, "ps")
    assert "router" in jobs and "fleet" in jobs
    assert "decode-0 has ended" in fleet.command_on(HEAD, "drain", "decode-0")
    fleet.until_linked(prefill=1, decode=2)
    assert fleet.ask() == first

    serve.send_signal(signal.SIGINT)
    assert serve.wait(120) == 0, fleet.logs()
    assert [fleet.workers_on(name) for name in NODES] == [[], [], []]
    assert fleet.status() == {}
