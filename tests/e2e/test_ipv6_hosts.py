"""A fleet whose hosts reach one another by IPv6 alone: Redis, certificates, links, handoffs and KV.

Each process has a network namespace whose link has no IPv4 address. Workers listen on all addresses
and announce that of their interface.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.cluster import Site
from chaos.network import DEVICE, Network, unavailable
from chaos.redis_server import RedisServer
from tests.support.many_hosts import HostedProcesses
from tests.support.redis_server import required_binary

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(unavailable()), reason=f"no network namespaces: {unavailable()}"),
]

QUESTION = "Name three rivers, please, and say where each begins."
HANDOFFS = 'baton_handoffs_total{outcome="completed"}'
MOVED = "baton_handoff_bytes_total"
REDIS = "redis"
WORKERS = ("prefill-0", "decode-0")
OPEN = ("--protected-mode", "no")  # else it resets calls from other hosts without a password


@pytest.fixture
def net() -> Iterator[Network]:
    with Network(ipv6=True) as made:
        yield made


@pytest.fixture
def server(tmp_path: Path, net: Network) -> Iterator[RedisServer]:
    site = net.add(REDIS)
    made = RedisServer(
        tmp_path, required_binary(), *OPEN, host=net.address(REDIS), prefix=site.prefix
    )
    made.start()
    yield made
    made.kill()


def test_a_fleet_of_ipv6_hosts_hands_a_prompt_over(
    tmp_path: Path, net: Network, server: RedisServer
) -> None:
    def site(name: str) -> Site:
        made = net.add(name)
        if name not in WORKERS:
            return made
        # UCX_NET_DEVICES is left to the worker, which finds the interface of its address
        settings = ("worker.host=::", f"worker.advertise={DEVICE}")
        return Site(made.prefix, settings, {"UCX_TLS": "tcp"})

    for name in WORKERS:
        net.add(name)
    addresses = {name: net.address(name) for name in WORKERS}
    assert {ipaddress.ip_address(each).version for each in addresses.values()} == {6}
    hosts = HostedProcesses(tmp_path, server, addresses, site)
    try:
        hosts.start_router()
        for name in WORKERS:
            hosts.start_worker(name)
        hosts.until(lambda: hosts.linked() == {"prefill": 1, "decode": 1})
        assert hosts.ask(QUESTION)
        assert hosts.worker_metric("decode-0", HANDOFFS) == 1
        assert hosts.worker_metric("decode-0", MOVED) > 0
        status = json.loads(hosts.as_client("cluster", "status", "--json"))
        found = {row["worker_id"]: row for row in status["workers"]}
        assert {name: row["state"] for name, row in found.items()} == dict.fromkeys(
            WORKERS, "ready"
        )
        for name, row in found.items():
            assert row["address"].startswith(f"[{addresses[name]}]:")
        assert "decode-0 has ended" in hosts.as_client("drain", "decode-0")
    finally:
        hosts.close()
