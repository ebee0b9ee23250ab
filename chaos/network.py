"""Network namespaces joined by a bridge, each with a shaped link that can be cut one way or both.

    this machine ── 10.N.0.1 ─┐
                          [bridge] in a namespace of its own
      10.N.0.2 eth0 ──────────┤  each end of a link: so many Mbit/s (tc tbf); a way that is cut
      10.N.0.3 eth0 ──────────┘  drops silently, both ways are the link down, and two that are
                                 parted hear all but each other

With `ipv6` the links have addresses of fdBA:N::/64 alone: nothing in a namespace reaches another
by IPv4.
Needs root, `ip` and `tc`; `unavailable` says what is missing. Owns the namespaces and removes
them, `remove_leftovers` those of killed runs. Knows nothing of what runs in them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from chaos.cluster import Site

Way = Literal["in", "out", "both"]

NO_PEER = "02:00:00:00:00:01"  # a hardware address of no link
RATE = ("rate", "400mbit", "burst", "256kb", "latency", "50ms")
COMMAND_S = 10
DEVICE = "eth0"
PID_DIGITS = 5  # of the process, in names of devices, which have at most 15 characters
NAMES = Path("/run/netns")  # where `ip netns` keeps the names
_OURS = re.compile(r"bt(\d+)-\d+-[\w-]+")
_NUMBERS = itertools.count()  # of the networks of this process


class NetworkError(RuntimeError):
    """A command of ip or tc failed; the message is its own."""


def unavailable() -> str | None:
    """Return why no such network can be made here, None where it can."""
    if missing := [name for name in ("ip", "tc") if shutil.which(name) is None]:
        return f"{' and '.join(missing)} (iproute2) not found"
    if os.geteuid():
        return "needs root"
    try:
        with Network() as trial:
            trial.add("trial")
    except NetworkError as error:
        return str(error)
    return None


class Network:
    """Namespaces of this process, as a context: they are gone at its end."""

    def __init__(self, *, ipv6: bool = False) -> None:
        number = next(_NUMBERS)
        self._tag = f"bt{os.getpid() % 10**PID_DIGITS}-{number}"
        subnet = 64 + (os.getpid() + number) % 128
        self._subnet = f"fdba:{subnet:x}::" if ipv6 else f"10.{subnet}.0."
        self._address_options = ("nodad",) if ipv6 else ()  # else its first second is lost
        self._prefix_bits, self._format = (64, "x") if ipv6 else (24, "d")
        self._hub = f"{self._tag}-hub"
        self._names: list[str] = []

    def __enter__(self) -> Network:
        try:
            self._make_hub()
        except NetworkError:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, name: str) -> Site:
        """A namespace for the process `name`, and what starts it there. Once for each name."""
        if name not in self._names:
            self._names.append(name)
            self._link(name)
        address = self.address(name)
        return Site(
            prefix=("ip", "netns", "exec", self._namespace(name)),
            settings=(f"{'router' if name.startswith('router') else 'worker'}.host={address}",),
            environment={"UCX_TLS": "tcp", "UCX_NET_DEVICES": DEVICE},
        )

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._names)

    @property
    def machine(self) -> str:
        """Return the address of this machine in the network."""
        return f"{self._subnet}1"

    def address(self, name: str) -> str:
        return f"{self._subnet}{self._names.index(name) + 2:{self._format}}"

    def cut(self, name: str, way: Way) -> None:
        """Cut the link of `name`: what it sends (out), what it is sent (in), or both."""
        if way == "both":
            self._in_hub("ip", "link", "set", self._port(name), "down")
        else:
            self._shape(name, way, ("pfifo", "limit", "0"))

    def heal(self, name: str) -> None:
        self._in_hub("ip", "link", "set", self._port(name), "up")
        for way in ("in", "out"):
            self._shape(name, way, ("tbf", *RATE))

    def part(self, name: str, other: str) -> None:
        """Cut the way between two alone: what either sends the other is dropped."""
        for here, there in ((name, other), (other, name)):
            _do("ip", "-n", self._namespace(here), "neighbour", "replace", self.address(there),
                "lladdr", NO_PEER, "dev", DEVICE, "nud", "permanent")  # fmt: skip

    def join(self, name: str, other: str) -> None:
        for here, there in ((name, other), (other, name)):
            _do("ip", "-n", self._namespace(here), "neighbour", "del", self.address(there),
                "dev", DEVICE)  # fmt: skip

    def close(self) -> None:
        """Remove all; a namespace takes its devices with it."""
        for namespace in [self._hub, *(self._namespace(name) for name in self._names)]:
            subprocess.run(
                ["ip", "netns", "del", namespace], capture_output=True, timeout=COMMAND_S
            )

    def _make_hub(self) -> None:
        _do("ip", "netns", "add", self._hub)
        self._in_hub("ip", "link", "add", "bridge", "type", "bridge")
        self._in_hub("ip", "link", "set", "bridge", "up")
        _do("ip", "link", "add", self._tag, "type", "veth", "peer", "name", "host",
            "netns", self._hub)  # fmt: skip
        self._in_hub("ip", "link", "set", "host", "master", "bridge", "up")
        self._give_address((), self.machine, self._tag)
        _do("ip", "link", "set", self._tag, "up")

    def _link(self, name: str) -> None:
        namespace, port = self._namespace(name), self._port(name)
        _do("ip", "netns", "add", namespace)
        self._in_hub("ip", "link", "add", port, "type", "veth", "peer", "name", DEVICE,
                     "netns", namespace)  # fmt: skip
        self._in_hub("ip", "link", "set", port, "master", "bridge", "up")
        inside = ("ip", "-n", namespace)
        self._give_address(inside[1:], self.address(name), DEVICE)
        _do(*inside, "link", "set", DEVICE, "up")
        _do(*inside, "link", "set", "lo", "up")
        self.heal(name)

    def _give_address(self, where: tuple[str, ...], address: str, device: str) -> None:
        _do("ip", *where, "address", "add", f"{address}/{self._prefix_bits}", "dev", device,
            *self._address_options)  # fmt: skip

    def _shape(self, name: str, way: str, queue: tuple[str, ...]) -> None:
        """Queue what `name` sends at its own end of the link, what it is sent at the other."""
        namespace, device = self._namespace(name), DEVICE
        if way == "in":
            namespace, device = self._hub, self._port(name)
        _do("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *queue)

    def _namespace(self, name: str) -> str:
        return f"{self._tag}-{name}"

    def _port(self, name: str) -> str:
        return f"p{self._names.index(name)}"

    def _in_hub(self, *command: str) -> None:
        _do("ip", "netns", "exec", self._hub, *command)


def remove_leftovers(names: Path = NAMES) -> list[str]:
    """Remove the namespaces of processes that were killed; return their names. Those whose digits
    a living process has stay."""
    removed = []
    for name in names_of_ended(names, _OURS, PID_DIGITS):
        with contextlib.suppress(NetworkError):
            _do("ip", "netns", "del", name)
            removed.append(name)
    return removed


def names_of_ended(
    folder: Path, pattern: re.Pattern[str], digits: int | None = None
) -> Iterator[str]:
    """Yield the entries of `folder` that `pattern` matches and whose process has ended. Its first
    group is the process's number, or the last `digits` of it."""
    if not folder.is_dir():
        return
    living = {int(each) for each in os.listdir("/proc") if each.isdecimal()}
    if digits is not None:
        living = {pid % 10**digits for pid in living}
    for name in sorted(os.listdir(folder)):
        found = pattern.fullmatch(name)
        if found is not None and int(found[1]) not in living:
            yield name


def _do(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NetworkError(f"{' '.join(command)}: {error}") from error
    if done.returncode:
        raise NetworkError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
