"""A name server for Services: `lookup` gives the IPv4 addresses of a name, None if there is none.

RFC 1035, 4: one question by UDP; answers have a time to live of 0. Runs in a thread of its own.
"""

from __future__ import annotations

import ipaddress
import socketserver
import struct
import threading
from collections.abc import Callable, Sequence

A = 1
HEADER = struct.Struct("!6H")
ANSWER = struct.Struct("!HHHIH")
OF_THE_QUESTION = 0xC00C  # a pointer to the name in the question
RESPONSE, NO_SUCH_NAME = 0x8400, 3
Lookup = Callable[[str], Sequence[str] | None]


class NameServer:
    """Answers at port 53 of `address` until it is closed."""

    def __init__(self, address: str, lookup: Lookup) -> None:
        class QuestionHandler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                message, out = self.request
                out.sendto(answered(message, lookup), self.client_address)

        self._server = socketserver.UDPServer((address, 53), QuestionHandler)
        self._thread = threading.Thread(target=self._server.serve_forever, name="dns", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def answered(message: bytes, lookup: Lookup) -> bytes:
    """Return the answer to one question. Raises ValueError or struct.error for what is none."""
    number, *_ = HEADER.unpack_from(message)
    name, end = _name(message)
    (kind,) = struct.unpack_from("!H", message, end)
    found = lookup(name)
    addresses = (found or ()) if kind == A else ()
    flags = RESPONSE | (NO_SUCH_NAME if found is None else 0)
    header = HEADER.pack(number, flags, 1, len(addresses), 0, 0)
    records = (
        ANSWER.pack(OF_THE_QUESTION, A, 1, 0, 4) + ipaddress.IPv4Address(each).packed
        for each in addresses
    )
    return header + message[HEADER.size : end + 4] + b"".join(records)


def _name(message: bytes) -> tuple[str, int]:
    """Return the name in the question, and where it ends."""
    labels, at = [], HEADER.size
    while length := message[at]:
        labels.append(message[at + 1 : at + 1 + length].decode("ascii"))
        at += 1 + length
    return ".".join(labels).lower(), at + 1
