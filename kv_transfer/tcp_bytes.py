"""The bytes received over TCP: the kernel's count for each TCP socket of this process.

UCX does not report the transport of a READ, which may make it a hundred times slower. The bytes of
a READ over TCP arrive at a socket of the reading process, so counting them shows whether TCP
carried the READ. The module knows no UCX; only Linux provides the counts.
"""

from __future__ import annotations

import os
import socket
import struct

_SOCKETS = "/proc/self/fd"
_RECEIVED_AT = 128  # of tcpi_bytes_received, a u64 of struct tcp_info (Linux 4.1 and later)


def received() -> dict[str, int] | None:
    """Return the bytes that each open TCP socket has received, by its inode; None if the system
    does not count them."""
    counts: dict[str, int] = {}
    try:
        descriptors = os.listdir(_SOCKETS)
    except OSError:
        return None
    for descriptor in descriptors:
        try:
            name = os.readlink(f"{_SOCKETS}/{descriptor}")
            info = _tcp_info(int(descriptor)) if name.startswith("socket:") else b""
        except OSError:
            continue  # closed, or not TCP
        if info:
            if len(info) < _RECEIVED_AT + 8:
                return None
            (counts[name],) = struct.unpack_from("=Q", info, _RECEIVED_AT)
    return counts


def since(before: dict[str, int] | None) -> int | None:
    """Return the bytes received since `before`, a result of `received`; None: not known."""
    now = received()
    if before is None or now is None:
        return None
    return sum(count - before.get(name, 0) for name, count in now.items())


def _tcp_info(descriptor: int) -> bytes:
    """Return the kernel's `tcp_info`. Raises OSError if the socket is not TCP."""
    borrowed = socket.socket(fileno=descriptor)
    try:
        return borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    finally:
        borrowed.detach()
