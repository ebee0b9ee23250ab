"""A worker process within the test's own, and clients that order and ask it as routers do."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import grpc
import grpc.aio

from baton.decode_worker.worker import DecodeWorker
from baton.deploy.host.cluster_secrets import ClusterSecrets
from baton.deploy.processes.worker_process import WorkerProcess
from baton.deploy.processes.worker_roles import Boot
from baton.engine.execution.engine_options import EngineOptions
from baton.engine.execution.loading import build_engine
from baton.engine.execution.torch_engine import TorchEngine
from baton.models.embedded import embedded_model
from baton.prefill_worker.worker import PrefillWorker
from baton.proto import control_pb2, control_pb2_grpc, worker_pb2
from baton.router.fleet.dialer import GrpcDialer
from baton.runtime.config import Config, WorkerConfig
from baton.runtime.errors import by_code
from baton.runtime.grpc_links import credentials, open_channel
from baton.runtime.links import LINK_PROTOCOL_VERSION
from baton.runtime.registry import MemoryRegistry, Role, WorkerRecord
from baton.runtime.registry_client import InlineRegistry
from tests.support.engine_probe import runner_of
from tests.support.waiting import eventually

OK = grpc.StatusCode.OK


class InProcess:
    """A `WorkerProcess` within the test's own process, which cannot send it a signal. This class
    alone touches its private parts: `drain` is what its signal handler and its orders call."""

    def __init__(self, process: WorkerProcess, boot: Boot, engine: TorchEngine) -> None:
        """`boot` is that of its first role."""
        self._process = process
        self.boot, self.engine, self.runner = boot, engine, runner_of(engine)

    @property
    def worker(self) -> DecodeWorker | PrefillWorker | None:
        """The worker of the present role; None between two roles and after the last."""
        return self._process._worker

    def drain(self) -> None:
        """Let it drain and end."""
        self._process._role_control.drain()

    def change_role(self, role: Role) -> None:
        """Let it drain and serve `role`."""
        self._process._role_control.change(role)


def started(
    role: Role, *, registry: MemoryRegistry | None = None, blocks: int = 8, **settings: Any
) -> tuple[InProcess, asyncio.Task[None], MemoryRegistry]:
    """A whole worker process but for its loading, in this one: pool, NIXL, gRPC, admin port."""
    folder, registry = embedded_model(), registry or MemoryRegistry()
    engine = build_engine(
        folder, EngineOptions(blocks=blocks, block_size=16, dtype="float32", threads=1)
    )
    config = Config(worker=WorkerConfig(host="127.0.0.1", **settings))
    secrets = ClusterSecrets(("secret",), "secret")
    made = Boot(
        config, role, f"{role}-0", os.urandom(16), folder, InlineRegistry(registry), secrets
    )
    process = WorkerProcess(made, engine)
    serving = asyncio.create_task(process.run())
    return InProcess(process, made, engine), serving, registry


async def next_record(
    registry: MemoryRegistry, serving: asyncio.Task[None], other_than: str = ""
) -> WorkerRecord:
    """Wait for a record with another boot id, and return it."""

    def found() -> list[WorkerRecord]:
        assert not serving.done(), serving.result()
        return [record for record in registry.workers() if record.boot_id != other_than]

    await eventually(found)
    return found()[0]


async def send_order(to: WorkerRecord, role: str = "") -> grpc.StatusCode:
    """Order that boot of the worker to change its role, or without one to drain."""
    boot = control_pb2.WorkerBoot(worker_id=to.worker_id, boot_id=bytes.fromhex(to.boot_id))
    async with open_channel(to.address) as channel:
        stub = control_pb2_grpc.WorkerControlStub(channel)
        metadata = credentials("secret")
        try:
            if role:
                request = control_pb2.ChangeRoleRequest(worker=boot, role=role)
                await stub.ChangeRole(request, metadata=metadata, timeout=30)
            else:
                drain = control_pb2.DrainRequest(worker=boot)
                await stub.Drain(drain, metadata=metadata, timeout=30)
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


async def generate(address: str, max_tokens: int) -> tuple[str, list[int]]:
    """Return the worker's role, and its answer to a prompt that it prefills itself, over a router's
    link."""
    connection = GrpcDialer("secret").connect(address)
    link = connection.link()
    hello = worker_pb2.RouterHello(
        router_id="r", boot_id=os.urandom(16), protocol_version=LINK_PROTOCOL_VERSION
    )
    submit = worker_pb2.Submit(
        request_id="a",
        attempt=1,
        prompt=[5, 6, 7],
        choices=[worker_pb2.Choice(choice=0)],
        sampling=worker_pb2.Sampling(top_p=1.0, repetition_penalty=1.0, seed=1),
        max_tokens=max_tokens,
        placement=worker_pb2.Placement(local=True),
    )
    tokens: list[int] = []
    try:
        await link.send(worker_pb2.RouterMessage(hello=hello))
        role = (await link.receive()).hello.role
        if role == "decode":
            await link.send(worker_pb2.RouterMessage(submit=submit))
        while role == "decode" and len(tokens) < max_tokens:
            for output in (await link.receive()).outputs.outputs:
                if output.end == worker_pb2.FAILED:
                    raise by_code(output.failure.code, output.failure.detail)
                tokens.append(output.token)
    finally:
        await link.close()
        await connection.close()
    return role, tokens
