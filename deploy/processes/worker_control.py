"""Orders to a worker over its gRPC port: drain and end, change the role, or report its status.

The port asks every caller for a certificate of the cluster's authority, and every call for the
cluster's token (runtime/grpc_links.py). An order names the boot that it is for, so that a late or
repeated order has no effect on the next boot of the worker, or on another worker. The controller
that leads names its term in each question and in each order to change a role: one of a lower term
is late, and refused. An order to drain has no term.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import grpc.aio
import orjson

from baton.deploy.processes.worker_roles import Served
from baton.proto import control_pb2, control_pb2_grpc
from baton.runtime import logs
from baton.runtime.errors import InvalidRequest, Unavailable
from baton.runtime.grpc_links import abort
from baton.runtime.registry import Role
from baton.runtime.worker.order_terms import OrderTerms

log = logs.get(__name__)

ROLES: dict[str, Role] = {"prefill": "prefill", "decode": "decode"}
Context = grpc.aio.ServicerContext[Any, Any]


class WorkerControl(control_pb2_grpc.WorkerControlServicer):
    """Accepts the orders for one boot of one worker. `drain`, `change_role`
    and `status` return at once."""

    def __init__(
        self,
        worker_id: str,
        boot_id: bytes,
        *,
        drain: Callable[[], None],
        change_role: Callable[[Role], None],
        status: Callable[[], control_pb2.StatusReply],
    ) -> None:
        self._boot = control_pb2.WorkerBoot(worker_id=worker_id, boot_id=boot_id)
        self._terms = OrderTerms()
        self._drain = drain
        self._change_role = change_role
        self._status = status

    async def Drain(
        self, request: control_pb2.DrainRequest, context: Context
    ) -> control_pb2.DrainReply:
        await self._check_boot(request.worker, context)
        log.info("order received", order="drain", caller=context.peer())
        self._drain()
        return control_pb2.DrainReply()

    async def ChangeRole(
        self, request: control_pb2.ChangeRoleRequest, context: Context
    ) -> control_pb2.ChangeRoleReply:
        await self._check_boot(request.worker, context)
        await self._check_term(request.term, context)
        role = ROLES.get(request.role)
        if role is None:
            await abort(context, InvalidRequest(f"no role {request.role!r}: prefill or decode"))
        else:
            log.info("order received", order="change role", role=role, caller=context.peer())
            self._change_role(role)
        return control_pb2.ChangeRoleReply()

    async def Status(
        self, request: control_pb2.StatusRequest, context: Context
    ) -> control_pb2.StatusReply:
        await self._check_boot(request.worker, context)
        self._terms.note(request.term)
        return self._status()

    async def _check_term(self, term: int, context: Context) -> None:
        """End the call if it is an order of a controller that leads no more."""
        try:
            self._terms.check(term)
        except Unavailable as error:
            log.warning("order refused", order="change role", reason=str(error))
            await abort(context, error)

    async def _check_boot(self, named: control_pb2.WorkerBoot, context: Context) -> None:
        """End the call if it is for another worker or another boot of this one."""
        if named != self._boot:
            error = Unavailable(
                f"the order names boot {named.boot_id.hex()} of {named.worker_id}; this is boot "
                f"{self._boot.boot_id.hex()} of {self._boot.worker_id}: the worker has restarted "
                "or changed its role; repeat the command"
            )
            await abort(context, error)


def worker_status(
    served: Served, begun_s: float, not_ready: Callable[[], str | None]
) -> control_pb2.StatusReply:
    """Return the present status of a boot that began at `begun_s` of the monotonic clock. No block
    is counted for it."""
    routers = [
        control_pb2.LinkedRouter(
            router_id=each.router_id, host=each.host, waiting=each.waiting, refused=each.refused
        )
        for each in served.links.routers.all()
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
