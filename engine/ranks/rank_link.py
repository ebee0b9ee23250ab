"""Serves a rank before its first step: reads what its leader sends, and reports what the rank
refuses."""

from __future__ import annotations

import ctypes
import json
import signal
import socket
import sys
from typing import NoReturn

from baton.engine.ranks.rank_options import RankOptions
from baton.runtime.errors import BatonError

_MAX_MESSAGE_BYTES = 1 << 16  # of one message
_PR_SET_PDEATHSIG = 1


def end_with_leader() -> None:
    """Let the leader alone end this process. Ctrl-C, a supervisor and systemd signal all processes
    of a worker at once, and the leader needs its ranks until it has drained."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def receive(link: socket.socket) -> tuple[RankOptions, list[int]]:
    """Receive options and descriptors of shared memory."""
    text, descriptors, _, _ = socket.recv_fds(link, _MAX_MESSAGE_BYTES, 4)
    if not text:
        sys.exit(0)  # the leader has ended
    return RankOptions.parse(text), list(descriptors)


def refuse(link: socket.socket, error: BatonError) -> NoReturn:
    link.send(json.dumps({"error": type(error).__name__, "detail": str(error)}).encode())
    sys.exit(1)
