"""The status that a worker reports to `baton cluster status`. Holds no state."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

import orjson

from baton.deploy.processes.worker_roles import Served
from baton.proto import control_pb2


def worker_status(
    served: Served, begun_s: float, not_ready: Callable[[], str | None]
) -> control_pb2.StatusReply:
    """Return the present status of a boot that began at `begun_s` of the monotonic clock. No block
    is counted for it."""
    routers = [
        control_pb2.LinkedRouter(router_id=router_id, host=host)
        for router_id, host in served.links.routers()
    ]
    return control_pb2.StatusReply(
        version=_version(),
        up_s=time.monotonic() - begun_s,
        audit=orjson.dumps(served.worker.audit(check=False)),
        routers=routers,
        not_ready_reason=not_ready() or "",
    )


def _version() -> str:
    try:
        return version("baton-serve")
    except PackageNotFoundError:  # copied here without its metadata
        return "unknown"
