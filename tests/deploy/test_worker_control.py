"""Orders over a worker's gRPC port: only from the cluster, only for this boot of the worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
from structlog.testing import capture_logs

from baton.deploy.host.authority import Authority
from baton.proto import control_pb2, control_pb2_grpc
from baton.runtime.grpc_links import credentials, open_channel
from baton.runtime.settings.loading import load
from baton.runtime.tls import Tls
from tests.support.control_server import ControlServer, served_control

TOKEN = "the instance's secret"  # as the control port has it
BOOT = b"\xbb" * 16


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[ControlServer]:
    with served_control(tmp_path / "tls") as server:
        yield server


async def ordered(
    worker: ControlServer,
    *,
    tls: Tls | None,
    token: str = TOKEN,
    worker_id: str = "decode-0",
    boot_id: bytes = BOOT,
    role: str = "",
    term: int = 0,
) -> str:
    """Order a change to `role`, or without one a drain. Returns the status with its message."""
    boot = control_pb2.WorkerBoot(worker_id=worker_id, boot_id=boot_id)
    async with open_channel(worker.address, tls) as channel:
        stub = control_pb2_grpc.WorkerControlStub(channel)
        metadata = credentials(token)
        try:
            if role:
                request = control_pb2.ChangeRoleRequest(worker=boot, role=role, term=term)
                await stub.ChangeRole(request, metadata=metadata, timeout=30)
            else:
                request = control_pb2.DrainRequest(worker=boot)
                await stub.Drain(request, metadata=metadata, timeout=30)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
    return "OK"


def own(worker: ControlServer) -> Tls:
    return Tls(worker.security("client"))


async def test_an_order_of_the_cluster_is_accepted_and_logged(worker: ControlServer) -> None:
    with capture_logs() as logs:
        assert await ordered(worker, tls=own(worker)) == "OK"
        assert await ordered(worker, tls=own(worker), role="prefill") == "OK"
    assert worker.orders == ["drain", "change role to prefill"]
    assert [line["order"] for line in logs if line["event"] == "order received"] == [
        "drain",
        "change role",
    ]


async def test_a_late_order_of_a_former_leader_is_refused(worker: ControlServer) -> None:
    """The next controller has asked for the status only: its term counts from then on."""
    await asked(worker, term=2)
    await asked(worker, term=1)  # a status request of any term changes nothing
    found = await ordered(worker, tls=own(worker), role="prefill", term=1)
    assert found.startswith(
        "UNAVAILABLE: the order is of the controller of term 1, and one of term 2"
    )
    assert worker.orders == []
    assert await ordered(worker, tls=own(worker), role="prefill", term=2) == "OK"
    assert await ordered(worker, tls=own(worker), role="prefill") == "OK"  # an operator's
    assert worker.orders == ["change role to prefill"] * 2


async def asked(worker: ControlServer, term: int) -> None:
    """Ask for the worker's status as the controller of this term."""
    boot = control_pb2.WorkerBoot(worker_id="decode-0", boot_id=BOOT)
    async with open_channel(worker.address, own(worker)) as channel:
        stub = control_pb2_grpc.WorkerControlStub(channel)
        request = control_pb2.StatusRequest(worker=boot, term=term)
        await stub.Status(request, metadata=credentials(TOKEN), timeout=30)


@pytest.mark.parametrize(
    ("worker_id", "boot_id"),
    [("decode-1", BOOT), ("decode-0", b"\xcc" * 16), ("decode-0", b""), ("", b"")],
)
@pytest.mark.parametrize("role", ["", "prefill"])
async def test_an_order_for_another_worker_or_boot_is_refused(
    worker: ControlServer, worker_id: str, boot_id: bytes, role: str
) -> None:
    found = await ordered(worker, tls=own(worker), worker_id=worker_id, boot_id=boot_id, role=role)
    assert found.startswith("UNAVAILABLE: the order names boot") and worker.orders == []


async def test_an_unknown_role_is_refused(worker: ControlServer) -> None:
    found = await ordered(worker, tls=own(worker), role="router")
    assert found == "INVALID_ARGUMENT: no role 'router': prefill or decode"
    assert worker.orders == []


@pytest.mark.parametrize("token", ["", "another", TOKEN + "2"])
async def test_an_order_without_the_clusters_token_is_refused(
    worker: ControlServer, token: str
) -> None:
    assert (await ordered(worker, tls=own(worker), token=token)).startswith("UNAUTHENTICATED")
    assert worker.orders == []


async def test_an_order_without_the_clusters_certificate_is_refused(
    worker: ControlServer, tmp_path: Path
) -> None:
    issued = Authority(tmp_path / "foreign").issue("client", None)
    foreign = Tls(load(None, {}, issued.settings()).security)
    for tls in (None, foreign):
        assert (await ordered(worker, tls=tls)).startswith("UNAVAILABLE")
    assert worker.orders == []
