"""Reads what a leader sends its ranks before they serve, and reports what a rank refuses."""

from __future__ import annotations

import json
import socket
import sys
from typing import NoReturn

from baton.engine.ranks.rank_options import RankOptions
from baton.runtime.errors import BatonError

_MAX_MESSAGE_BYTES = 1 << 16  # of one message


def receive(link: socket.socket) -> tuple[RankOptions, list[int]]:
    """Receive options and descriptors of shared memory."""
    text, descriptors, _, _ = socket.recv_fds(link, _MAX_MESSAGE_BYTES, 4)
    if not text:
        sys.exit(0)  # the leader has ended
    return RankOptions.parse(text), list(descriptors)


def refuse(link: socket.socket, error: BatonError) -> NoReturn:
    link.send(json.dumps({"error": type(error).__name__, "detail": str(error)}).encode())
    sys.exit(1)
