"""The address that a worker announces, apart from the one that it listens on.

`worker.advertise` is an IP address, a host name, or a network interface of this machine, whose
first usable address is taken. Certificates are issued for it, and routers and other workers call
it. Keeps no state.
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import re
import socket
import struct
from pathlib import Path

from baton.runtime.config import WorkerConfig
from baton.runtime.errors import ConfigError

_SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of an interface
_SIOCGIFCONF = 0x8912  # all IPv4 addresses, each with its interface
_IFCONF = struct.Struct("iP")  # the bytes of the answer, and where it goes
_IFREQ_BYTES = struct.calcsize("16s24s")  # one address: a name and a socket address
_IFREQ_ADDRESS = slice(20, 24)
_MAX_IFREQS = 1024
_NAME_BYTES = 256
_ADDRESS = slice(20, 24)  # in the answer
_IPV6_TABLE = Path("/proc/net/if_inet6")
_GLOBAL_SCOPE = "00"
_HOST_NAME = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9-]{1,63}(?<!-))*\.?")
_MAX_NAME = 253  # characters


def advertised_host(worker: WorkerConfig, *, many_hosts: bool = False) -> str:
    """Return what the worker announces. With `many_hosts` that must be an address which other
    hosts can call. Raises ConfigError."""
    host = _resolved(worker.advertise) if worker.advertise else worker.host
    if many_hosts and _is_unspecified(host):
        raise ConfigError(
            f"worker.host is {host}, which no other host can call: set worker.advertise to an "
            "address or a network interface of this machine"
        )
    return host


def _resolved(advertise: str) -> str:
    """Return an interface's address, or the given address or name."""
    text = advertise.strip("[]")
    if (address := _ip(text)) is not None:
        if address.is_unspecified or address.is_multicast:
            raise ConfigError(
                f"worker.advertise is {advertise}, which no other process can call: give an "
                "address of this machine"
            )
        return str(address)
    if text in {name for _, name in socket.if_nameindex()}:
        return _interface_address(text)
    if len(text) > _MAX_NAME or not _HOST_NAME.fullmatch(text):
        names = ", ".join(sorted(name for _, name in socket.if_nameindex()))
        raise ConfigError(
            f"worker.advertise is {advertise[:_MAX_NAME]!r}: give an IP address, a host name, or "
            f"one of the interfaces {names}"
        )
    return text


def _interface_address(name: str) -> str:
    """Return the interface's IPv4 address, else its first global IPv6 address."""
    request = struct.pack(f"{_NAME_BYTES}s", name.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            return socket.inet_ntoa(answer[_ADDRESS])
        except OSError:
            pass  # it has no IPv4 address
    for interface, address in _ipv6_addresses():
        if interface == name:
            return str(address)
    raise ConfigError(
        f"worker.advertise is the interface {name}, which has no address that other hosts can "
        "call: give it one, or name an address"
    )


def interface_of(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str | None:
    """Return the interface of this machine that has the address; None if none has it."""
    if address.version == 6:
        return next((name for name, each in _ipv6_addresses() if each == address), None)
    answer = array.array("B", bytes(_MAX_IFREQS * _IFREQ_BYTES))
    request = _IFCONF.pack(len(answer), answer.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        length, _ = _IFCONF.unpack(fcntl.ioctl(probe.fileno(), _SIOCGIFCONF, request))
    for start in range(0, length, _IFREQ_BYTES):
        row = answer[start : start + _IFREQ_BYTES].tobytes()
        if row[_IFREQ_ADDRESS] == address.packed:
            label = row[:16].partition(b"\0")[0].decode()
            return label.partition(":")[0]  # a second address may have a label of its own
    return None


def _ipv6_addresses() -> list[tuple[str, ipaddress.IPv6Address]]:
    """Return each global IPv6 address with its interface."""
    try:
        rows = [line.split() for line in _IPV6_TABLE.read_text().splitlines()]
    except OSError:  # a kernel without IPv6
        return []
    return [
        (interface, ipaddress.IPv6Address(bytes.fromhex(address)))
        for address, _, _, scope, _, interface in rows
        if scope == _GLOBAL_SCOPE
    ]


def _ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _is_unspecified(host: str) -> bool:
    address = _ip(host.strip("[]"))
    return address is not None and address.is_unspecified
