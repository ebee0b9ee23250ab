"""Bytes that came in over TCP are counted, whichever process reads them; nothing else is."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from baton.kv_transfer import tcp_bytes

SIZE = 3_000_000


def pass_bytes(near: socket.socket, far: socket.socket) -> None:
    sending = threading.Thread(target=lambda: near.sendall(b"x" * SIZE))
    sending.start()
    left = SIZE
    while left:
        left -= len(far.recv(1 << 20))
    sending.join()


def test_bytes_over_tcp_are_counted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        before = tcp_bytes.received()
        with socket.create_connection(listener.getsockname()) as near:
            far, _ = listener.accept()
            with far:
                pass_bytes(near, far)
                assert tcp_bytes.since(before) == SIZE
                middle = tcp_bytes.received()
                assert tcp_bytes.since(middle) == 0
                pass_bytes(far, near)
                assert tcp_bytes.since(middle) == SIZE
                assert near.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0  # still its owner's


def test_bytes_by_another_way_are_not() -> None:
    before = tcp_bytes.received()
    near, far = socket.socketpair()
    with near, far:
        pass_bytes(near, far)
        assert tcp_bytes.since(before) == 0


def test_a_socket_that_was_closed_takes_nothing_away() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
        pass_bytes(near, far)
        before = tcp_bytes.received()
        near.close(), far.close()
        assert tcp_bytes.since(before) == 0


def test_where_the_system_does_not_count_nothing_is_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert tcp_bytes.since(None) is None
    before = tcp_bytes.received()
    with socket.create_server(("127.0.0.1", 0)):
        monkeypatch.setattr(tcp_bytes, "_RECEIVED_AT", 4096)  # an older, shorter answer
        assert tcp_bytes.received() is None and tcp_bytes.since(before) is None
    monkeypatch.setattr(tcp_bytes, "_SOCKETS", os.fspath(tmp_path / "none"))
    assert tcp_bytes.received() is None
