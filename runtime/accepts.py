"""How many connections asyncio takes in one turn of its loop.

Its listeners try as often in a turn as their queue is long. Where no file descriptor is left each
try fails, is a line in the log, and brings another try a second later: a hundred a second, by
default. So a listener is made with a queue of ACCEPTS, and then given the one that it wants.
(gRPC's own listeners try once a second.)
"""

from __future__ import annotations

import socket
from collections.abc import Iterable

ACCEPTS = 1


def lengthen(listeners: Iterable[socket.socket], backlog: int) -> None:
    """Let so many connections wait at each of an asyncio server's sockets."""
    for listener in listeners:
        with listener.dup() as same:  # asyncio's own has no `listen`
            same.listen(backlog)
