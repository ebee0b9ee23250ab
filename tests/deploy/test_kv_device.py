"""KV over TCP goes by the interface of the announced address, on the ports that were given."""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.deploy.host.advertised_host import interface_of
from baton.deploy.host.kv_device import kv_device
from baton.models.embedded import embedded_model
from chaos.cluster import BATON, Cluster
from chaos.network import Network, unavailable
from chaos.starter import start
from tests.support.waiting import wait_until

OTHER, OTHER_ADDRESS = "eth9", "10.9.9.9"
PORTS = range(21000, 21100)
READY_S = 120.0
LISTENING = "0A"  # proc(5): the state of a listening socket


def test_an_interface_is_found_by_its_address() -> None:
    assert interface_of(ipaddress.ip_address("127.0.0.1")) == "lo"
    assert interface_of(ipaddress.ip_address("203.0.113.7")) is None
    assert interface_of(ipaddress.ip_address("2001:db8::7")) is None


@pytest.mark.parametrize("advertised", ["127.0.0.1", "localhost", "203.0.113.7", "no.such.invalid"])
def test_ucx_chooses_for_one_host_and_for_what_is_not_here(advertised: str, tmp_path: Path) -> None:
    assert kv_device(advertised, {}, tmp_path) is None


def test_the_environment_and_rdma_leave_the_choice_to_ucx(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.deploy.host.kv_device.interface_of", lambda _: "eth3")
    assert kv_device("10.1.2.3", {}, tmp_path) == "eth3"
    assert kv_device("[fd00::5]", {"UCX_NET_DEVICES": ""}, tmp_path) == "eth3"
    assert kv_device("10.1.2.3", {"UCX_NET_DEVICES": "mlx5_0:1"}, tmp_path) is None
    (tmp_path / "uverbs0").touch()
    assert kv_device("10.1.2.3", {}, tmp_path) is None


@pytest.fixture
def network() -> Iterator[Network]:
    """A namespace with two interfaces, of which one leads nowhere."""
    with Network() as made:
        inside = made.add("decode-0").prefix
        for command in (
            ("ip", "link", "add", OTHER, "type", "veth", "peer", "name", "far"),
            ("ip", "address", "add", f"{OTHER_ADDRESS}/24", "dev", OTHER),
            ("ip", "link", "set", OTHER, "up"),
            ("ip", "link", "set", "far", "up"),
        ):
            subprocess.run([*inside, *command], check=True)
        yield made


@pytest.mark.nightly
@pytest.mark.skipif(bool(unavailable()), reason=f"no network namespaces: {unavailable()}")
@pytest.mark.parametrize("given", ["", OTHER, "all"])
def test_a_worker_moves_kv_over_its_announced_interface(
    network: Network, tmp_path: Path, given: str
) -> None:
    address = network.address("decode-0")
    cluster = Cluster(tmp_path, kept=["decode-0"])
    environment = os.environ | cluster.credentials("decode-0", address)
    environment |= {"UCX_TLS": "tcp", "UCX_TCP_PORT_RANGE": f"{PORTS[0]}-{PORTS[-1]}"}
    environment |= {"UCX_NET_DEVICES": given, "OMP_NUM_THREADS": "1"}
    expected = {"": {address}, OTHER: {OTHER_ADDRESS}, "all": {address, OTHER_ADDRESS}}[given]
    command = [*network.add("decode-0").prefix, *BATON, "worker", "--role", "decode"]
    command += ["--worker-id", "decode-0", "--model", str(embedded_model())]
    command += ["--registry", str(tmp_path / "registry"), "--set=worker.host=0.0.0.0"]
    command += [f"--set=worker.advertise={address}", "--set=pool.blocks=64"]
    with open(tmp_path / "worker.log", "ab") as log:
        process = start(command, environment, log)
    try:
        log = (tmp_path / "worker.log").read_text

        def registered() -> bool:
            assert process.poll() is None, log()
            return bool(cluster.records())

        wait_until(registered, READY_S, every_s=0.1, show=log)
        found = {each for each in listening(process.pid) if each[1] in PORTS}
        assert {host for host, _ in found} - {"127.0.0.1"} == expected
        bound = "kv transfers bound" in log()
        assert bound == (not given)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(10)


def listening(pid: int) -> set[tuple[str, int]]:
    """Return the IPv4 addresses and ports on which a process listens."""
    links = Path(f"/proc/{pid}/fd").iterdir()
    sockets = {os.readlink(link) for link in links if link.exists() or link.is_symlink()}
    found = set()
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        (
            _,
            local,
            _,
            state,
            *_,
        ) = line.split()
        inode = line.split()[9]
        if state == LISTENING and f"socket:[{inode}]" in sockets:
            host, _, port = local.partition(":")
            raw = bytes.fromhex(host)
            found.add(
                (socket.inet_ntoa(raw[::-1] if sys.byteorder == "little" else raw), int(port, 16))
            )
    return found
