"""Processes that are started one by one, as on several hosts: Redis, addresses, certificates.

Each worker listens on all addresses of this machine and announces one of its own (127.0.0.2 and
127.0.0.3), for which `baton authority` has issued its certificate.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.cluster import Site
from chaos.redis_server import RedisServer, running_server
from tests.support.many_hosts import HostedProcesses
from tests.support.redis_server import required_binary

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

LIFETIME_S = 15.0  # of an entry: in this time all are registered again, and linked
HOSTS = {"prefill-0": "127.0.0.2", "prefill-1": "127.0.0.4", "decode-0": "127.0.0.3"}


def site(name: str) -> Site:
    if name not in HOSTS:
        return Site()
    return Site(settings=("worker.host=0.0.0.0", f"worker.advertise={HOSTS[name]}"))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with running_server(tmp_path, required_binary()) as made:
        yield made


def test_a_fleet_serves_through_an_outage_of_its_registry(
    tmp_path: Path, server: RedisServer
) -> None:
    hosts = HostedProcesses(tmp_path, server, HOSTS, site)
    try:
        hosts.start_router()
        hosts.start_worker("prefill-0")
        hosts.start_worker("decode-0")
        hosts.until(lambda: hosts.linked() == {"prefill": 1, "decode": 1})
        expected = hosts.ask("Name three rivers, please, and say where each begins.")
        server.kill()
        hosts.until(lambda: hosts.metric("baton_registry_up") == 0)
        hosts.start_worker("prefill-1")  # it is not found in the outage
        hosts.start_router("router-1")  # nor does a new router find a worker
        hosts.until(lambda: hosts.events("prefill-1", "worker ready") == 1)  # it could be called
        time.sleep(17.0)  # longer than the lifetime of entries
        assert hosts.linked() == {"prefill": 1, "decode": 1}
        assert hosts.ask("Name three rivers, please, and say where each begins.") == expected
        assert hosts.linked("router-1") == {}
        begun_s = time.monotonic()
        server.start()  # empty
        for router in ("router", "router-1"):
            hosts.until(lambda name=router: hosts.linked(name) == {"prefill": 2, "decode": 1})
        assert time.monotonic() - begun_s < LIFETIME_S, hosts.logs()
        hosts.until(lambda: hosts.metric("baton_registry_up") == 1)
        for router in ("router", "router-1"):  # each hears of the other
            hosts.until(lambda name=router: hosts.metric("baton_other_routers", name) == 1)
        answer = hosts.ask("Name three rivers, please, and say where each begins.", "router-1")
        assert answer == expected
        for name in ("router", "router-1", "prefill-0", "prefill-1", "decode-0"):
            hosts.until(lambda name=name: hosts.events(name, "registry available again") >= 1)
        for name in ("router", "router-1", "prefill-0", "prefill-1", "decode-0"):
            for event in ("registry unavailable", "registry available again"):
                assert hosts.events(name, event) == 1, hosts.logs()
        status = json.loads(hosts.as_client("cluster", "status", "--json"))
        assert {row["worker_id"]: row["state"] for row in status["workers"]} == dict.fromkeys(
            HOSTS, "ready"
        )
        assert [row["workers"] for row in status["routers"]] == [3, 3]
        assert status["warnings"] == []
        assert "prefill-1 has ended" in hosts.as_client("drain", "prefill-1")
    finally:
        hosts.close()
