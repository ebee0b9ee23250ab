"""The control port of a worker, served for the commands that give it orders."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from baton.deploy.host.authority import Authority
from baton.deploy.processes.worker_control import WorkerControl
from baton.proto import control_pb2, control_pb2_grpc
from baton.runtime.cluster_config import SecurityConfig
from baton.runtime.grpc_links import open_port, open_server
from baton.runtime.registry import Role
from baton.runtime.settings.loading import load
from baton.runtime.tls import Tls


class ControlServer:
    """A worker's control port: the real service over mutual TLS, on an event loop of its own.

    Accepts orders for boot `bb...` of `decode-0` and lists them in `orders`.
    """

    token = "the instance's secret"

    def __init__(self, authority: Authority) -> None:
        self.authority = authority
        self.address = ""
        self.orders: list[str] = []
        audit = {"blocks": {"total": 64, "free": 50, "cached": 4, "used": 10}, "draining": False}
        self.status = control_pb2.StatusReply(
            version="1.0",
            up_s=12.5,
            audit=json.dumps(audit | {"running": 2, "waiting": 1}).encode(),
            routers=[control_pb2.LinkedRouter(router_id="c" * 32, host="10.0.0.9")],
        )
        self.accepted = threading.Event()
        self._tls = Tls(self.security("decode-0", "127.0.0.1"))
        self.loop = asyncio.new_event_loop()

    def security(self, name: str, host: str | None = None) -> SecurityConfig:
        """The settings of a process with a certificate of this cluster."""
        return load(None, {}, self.authority.issue(name, host).settings()).security

    def block(self, seconds: float) -> None:
        """Let nothing run on the server's event loop for so long."""
        self.loop.call_soon_threadsafe(time.sleep, seconds)

    async def serve(self, started: threading.Event, stopped: asyncio.Event) -> None:
        server = open_server(self.token)
        control = WorkerControl(
            "decode-0",
            b"\xbb" * 16,
            drain=self._drained,
            change_role=self._changed,
            status=lambda: self.status,
        )
        control_pb2_grpc.add_WorkerControlServicer_to_server(control, server)
        self.address = f"127.0.0.1:{open_port(server, '127.0.0.1:0', self._tls)}"
        await server.start()
        started.set()
        await stopped.wait()
        await server.stop(None)

    def _drained(self) -> None:
        self._record("drain")

    def _changed(self, role: Role) -> None:
        self._record(f"change role to {role}")

    def _record(self, order: str) -> None:
        self.orders.append(order)
        self.accepted.set()


@contextmanager
def served_control(folder: Path) -> Iterator[ControlServer]:
    """Serve the control port of a worker, with certificates in the folder that it makes."""
    made = ControlServer(Authority(folder))
    started, stopped = threading.Event(), asyncio.Event()
    run, served = made.loop.run_until_complete, made.serve(started, stopped)
    thread = threading.Thread(target=run, args=(served,))
    thread.start()
    assert started.wait(60)
    try:
        yield made
    finally:
        made.loop.call_soon_threadsafe(stopped.set)
        thread.join(60)
        made.loop.close()
