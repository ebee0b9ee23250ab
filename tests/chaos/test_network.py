"""Namespaces with shaped links: joined, cut one way or both, and gone at the end."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from chaos import network
from chaos.cluster import Site
from chaos.network import Network, NetworkError

ECHO = """
import socket
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("0.0.0.0", 7007))
heard = []
print("up", flush=True)
while True:
    data, peer = server.recvfrom(100)
    print("heard", flush=True)
    server.sendto(data, peer)
"""
CALL = """
import socket, sys
client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
client.settimeout(0.3)
try:
    client.sendto(b"x" * 50, (sys.argv[1], 7007))
    client.recv(100)
except OSError:  # nothing came, or the link is down
    sys.exit(1)
"""


@pytest.fixture(scope="module")
def joined() -> Iterator[Network]:
    if why := network.unavailable():
        pytest.skip(why)
    with Network() as made:
        for name in ("decode-0", "prefill-0"):
            made.add(name)
        yield made


@pytest.fixture
def echo(joined: Network) -> Iterator[subprocess.Popen[str]]:
    command = [*joined.add("decode-0").prefix, sys.executable, "-c", ECHO]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    yield process
    process.kill()
    process.wait(10)
    process.stdout.close()


def reaches(joined: Network, echo: subprocess.Popen[str]) -> tuple[bool, bool]:
    """Whether the echo heard a call, and whether its answer came back."""
    answered = calls(joined, "prefill-0")
    assert calls(joined) is answered  # this machine is on the same bridge
    return answered, heard(echo)


def calls(joined: Network, name: str = "") -> bool:
    """Whether the echo answers a caller from the namespace `name`, or from this machine."""
    prefix = joined.add(name).prefix if name else ()
    command = [*prefix, sys.executable, "-c", CALL, joined.address("decode-0")]
    return subprocess.run(command, timeout=20).returncode == 0


def heard(echo: subprocess.Popen[str]) -> bool:
    import select

    assert echo.stdout is not None
    found = False
    while select.select([echo.stdout], [], [], 0.1)[0]:
        found = echo.stdout.readline() == "heard\n" or found
    return found


def test_a_link_is_cut_one_way_both_ways_and_healed(
    joined: Network, echo: subprocess.Popen[str]
) -> None:
    assert reaches(joined, echo) == (True, True)
    for way, reported in (("in", (False, False)), ("out", (False, True)), ("both", (False, False))):
        joined.cut("decode-0", way)
        assert reaches(joined, echo) == reported, way
        joined.heal("decode-0")
        assert reaches(joined, echo) == (True, True), way


def test_two_that_are_parted_hear_all_but_each_other(
    joined: Network, echo: subprocess.Popen[str]
) -> None:
    joined.part("prefill-0", "decode-0")
    assert (calls(joined, "prefill-0"), calls(joined)) == (False, True)
    joined.join("prefill-0", "decode-0")
    assert (calls(joined, "prefill-0"), calls(joined)) == (True, True)


def test_a_site_binds_its_process_to_its_own_address_and_to_tcp(joined: Network) -> None:
    worker, router = joined.add("decode-0"), joined.add("router")
    assert worker.settings == (f"worker.host={joined.address('decode-0')}",)
    assert router.settings == (f"router.host={joined.address('router')}",)
    assert joined.address("router") not in (joined.address("decode-0"), joined.address("prefill-0"))
    assert worker.environment["UCX_TLS"] == "tcp"
    assert joined.add("decode-0") == worker


def test_an_ipv6_network_has_no_other_addresses() -> None:
    if why := network.unavailable():
        pytest.skip(why)
    with Network(ipv6=True) as made:
        sites = [made.add(name) for name in ("decode-0", "prefill-0")]
        for site, name in zip(sites, made.names, strict=True):
            assert addresses(site, "-4") == []
            assert made.address(name) in addresses(site, "-6")


def addresses(site: Site, family: str) -> list[str]:
    """Return the addresses of a namespace's link."""
    command = [*site.prefix, "ip", "-o", family, "address", "show", "dev", network.DEVICE]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=10)
    return [line.split()[3].partition("/")[0] for line in listed.stdout.splitlines()]


def test_nothing_is_left_of_a_network() -> None:
    if why := network.unavailable():
        pytest.skip(why)
    before = namespaces()
    with Network() as made:
        made.add("prefill-0")
        assert len(namespaces() - before) == 2
    assert namespaces() == before
    with pytest.raises(NetworkError, match="ip netns"):
        made.cut("prefill-0", "both")


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert "ip and tc" in network.unavailable()
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert network.unavailable() == "needs root"


def namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=10)
    return {line.split()[0] for line in listed.stdout.splitlines() if line}
