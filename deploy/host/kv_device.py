"""The network interface over which UCX moves KV, where the user names none.

UCX takes every interface that it finds and offers all of them to its peers. A worker that announces
an address to other hosts means the network of that address, so UCX is bound to its interface.
RDMA devices are no interfaces, and UCX chooses those near a GPU: where there are some, it is left
to. Keeps no state.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from pathlib import Path

from baton.deploy.host.advertised_host import interface_of

VARIABLE = "UCX_NET_DEVICES"
RDMA = Path("/dev/infiniband")  # what a process can open, unlike /sys/class/infiniband


def kv_device(advertised: str, environ: Mapping[str, str], rdma: Path = RDMA) -> str | None:
    """Return the interface of the announced host, an address or a name. None: UCX chooses, since
    the environment names devices, there is RDMA, the address is of this host alone, or no interface
    here has it."""
    if environ.get(VARIABLE) or any(rdma.glob("uverbs*")):
        return None
    try:
        found = socket.getaddrinfo(advertised.strip("[]"), None, type=socket.SOCK_STREAM)
    except OSError:
        return None  # its peers may know the name, and this host need not
    addresses = [ipaddress.ip_address(str(each[4][0]).partition("%")[0]) for each in found]
    names = (interface_of(each) for each in addresses if not each.is_loopback)
    return next((name for name in names if name is not None), None)
