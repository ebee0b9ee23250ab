"""Requests whose time to the first token ends where the kernel has it for the client.

    first byte sent ─ ... ─ the token's bytes are in the client's socket ─ the client reads them
    └────────────── `Measured.seconds` ─────────────┘                    └ left out: its own delay

A client that shares its cores with the servers may get one only milliseconds after its token came.
Both calls write to a bare socket; that of gRPC speaks as much HTTP/2 as one call needs.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from baton.proto import client_pb2

GENERATE = "/baton.client.v1.Inference/Generate"
SO_TIMESTAMPNS = 35  # Linux: a read tells when the kernel had its last byte
TIMESPEC = struct.Struct("@qq")
PIECE = 64  # bytes of a read: less than an event, so that no later one is read with it
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, GOAWAY = 0, 1, 4, 7
END_STREAM, END_HEADERS, ACK = 1, 4, 1


@dataclass(frozen=True)
class Measured:
    """`seconds` from the first byte that was sent to the first token that came."""

    request_id: str
    seconds: float


def stream_http(url: str, path: str, asked: dict[str, Any]) -> Measured:
    """Send a request for a stream, and read all of it."""
    body = json.dumps(asked | {"stream": True}).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        "Content-Type: application/json\r\nConnection: close\r\n\r\n"
    )
    with _connected(url.removeprefix("http://").rstrip("/")) as link:
        begun_ns = time.time_ns()
        link.sendall(head.encode() + body)
        came, at_ns = b"", 0
        while b"data: " not in came:
            part, at_ns = _received(link, PIECE)
            came += part
        while part := link.recv(65536):
            came += part
    assert came.startswith(b"HTTP/1.1 200") and b"data: [DONE]" in came, came[:2000]
    (name,) = [
        line.split(b": ")[1].decode()
        for line in came.split(b"\r\n")
        if line.lower().startswith(b"x-request-id")
    ]
    return Measured(name, (at_ns - begun_ns) / 1e9)


def stream_grpc(address: str, url: str, asked: client_pb2.GenerateRequest) -> Measured:
    """Call Generate, the only request that the router at `url` gets, and read all answers."""
    message = asked.SerializeToString()
    fields = {":method": "POST", ":scheme": "http", ":path": GENERATE, ":authority": "localhost"}
    fields |= {"te": "trailers", "content-type": "application/grpc"}
    before = _newest(url)
    with _connected(address) as link:
        link.sendall(PREFACE + _frame(SETTINGS, 0, 0, b""))
        kind, *_ = _read_frame(link)
        assert kind == SETTINGS
        link.sendall(_frame(SETTINGS, ACK, 0, b""))
        call = _frame(HEADERS, END_HEADERS, 1, b"".join(map(_literal, fields, fields.values())))
        call += _frame(DATA, END_STREAM, 1, struct.pack(">xI", len(message)) + message)
        begun_ns = time.time_ns()
        link.sendall(call)
        first_ns = 0
        while True:
            kind, flags, body, at_ns = _read_frame(link)
            assert kind != GOAWAY, body
            if kind == DATA and body and not first_ns:
                first_ns = at_ns
            if kind in (DATA, HEADERS) and flags & END_STREAM:
                break
    assert first_ns, "the call ended without an answer"
    deadline_s = time.monotonic() + 30
    while (name := _newest(url)) == before:
        assert time.monotonic() < deadline_s, "the router keeps no trace of the call"
        time.sleep(0.01)  # it is stored after the last byte, which tells nothing of that
    return Measured(name, (first_ns - begun_ns) / 1e9)


@contextmanager
def _connected(address: str) -> Iterator[socket.socket]:
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=60) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        yield link


def _received(link: socket.socket, most: int) -> tuple[bytes, int]:
    """Return at most so many bytes, and when the kernel had the last one, in nanoseconds of
    time(). It stamps nothing that came just after it was asked to: the time of that is now."""
    part, extra, *_ = link.recvmsg(most, socket.CMSG_SPACE(TIMESPEC.size))
    assert part, "the server closed the connection"
    for *kind, stamp in extra:
        if kind == [socket.SOL_SOCKET, SO_TIMESTAMPNS]:
            seconds, nanoseconds = TIMESPEC.unpack(stamp)
            return part, 1_000_000_000 * seconds + nanoseconds
    return part, time.time_ns()


def _read_frame(link: socket.socket) -> tuple[int, int, bytes, int]:
    """A frame's kind, flags and body, and when its last byte came."""
    head, at_ns = _exactly(link, 9)
    size, kind, flags = int.from_bytes(head[:3]), head[3], head[4]
    body = b""
    if size:
        body, at_ns = _exactly(link, size)
    return kind, flags, body, at_ns


def _exactly(link: socket.socket, count: int) -> tuple[bytes, int]:
    came, at_ns = b"", 0
    while len(came) < count:
        part, at_ns = _received(link, count - len(came))
        came += part
    return came, at_ns


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return len(body).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + body


def _literal(name: str, value: str) -> bytes:
    """A header field that no table has; both are shorter than 127 bytes."""
    return bytes([0, len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


def _newest(url: str) -> str:
    found = httpx.get(f"{url}/traces?latest=1", timeout=60).json()["traces"]
    return str(found[0]["id"]) if found else ""
