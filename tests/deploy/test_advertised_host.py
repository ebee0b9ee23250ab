"""What a worker announces: an address, a name or an interface, never one that nothing can call."""

from __future__ import annotations

import socket

import pytest

from baton.deploy.host.advertised_host import advertised_host
from baton.runtime.config import WorkerConfig
from baton.runtime.errors import ConfigError


@pytest.mark.parametrize(
    ("advertise", "expected"),
    [
        ("", "0.0.0.0"),
        ("10.1.2.3", "10.1.2.3"),
        ("fd00::5", "fd00::5"),
        ("[fd00:0:0::5]", "fd00::5"),
        ("worker-0.workers.svc.cluster.local", "worker-0.workers.svc.cluster.local"),
    ],
)
def test_an_address_or_a_name_is_announced(advertise: str, expected: str) -> None:
    assert advertised_host(WorkerConfig(host="0.0.0.0", advertise=advertise)) == expected


def test_an_interface_is_announced_by_its_address() -> None:
    assert "lo" in {name for _, name in socket.if_nameindex()}
    worker = WorkerConfig(host="0.0.0.0", advertise="lo")
    assert advertised_host(worker, many_hosts=True) == "127.0.0.1"


@pytest.mark.parametrize("advertise", ["0.0.0.0", "::", "224.0.0.1", "no such", "a" * 300, "-x"])
def test_what_no_process_can_call_is_refused(advertise: str) -> None:
    with pytest.raises(ConfigError, match=r"worker\.advertise"):
        advertised_host(WorkerConfig(advertise=advertise))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]"])
def test_many_hosts_need_an_address_that_can_be_called(host: str) -> None:
    with pytest.raises(ConfigError, match=r"set worker\.advertise"):
        advertised_host(WorkerConfig(host=host), many_hosts=True)
    assert advertised_host(WorkerConfig(host="10.0.0.1"), many_hosts=True) == "10.0.0.1"
