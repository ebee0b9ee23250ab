"""A router over HTTP and gRPC with scripted workers."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterable, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest

from baton.proto import client_pb2_grpc
from baton.router.console.admin_port import AdminAccess
from baton.router.server import serve_router
from baton.runtime.cluster_config import SloConfig
from baton.runtime.config import Config, RouterConfig
from baton.runtime.registry import MemoryRegistry, Role
from baton.runtime.registry_client import ThreadedRegistry
from tests.support.json_values import JsonObject
from tests.support.plain_http import NO_AUTHORITIES
from tests.support.scripted_worker import ScriptedWorker
from tests.support.waiting import eventually

TOKEN = "a secret of the test"


@dataclass
class RunningRouter:
    """A router under test: its URL, its registry, its scripted workers, and a client."""

    url: str
    registry: MemoryRegistry
    workers: dict[str, ScriptedWorker]
    http: httpx.AsyncClient
    vocabulary: int
    serving: asyncio.Task[None]
    grpc_address: str = ""  # where the router's configuration asks for gRPC
    admin: httpx.AsyncClient | None = None  # of the admin port, with the operator's key

    async def ready(self) -> None:
        await eventually(self.is_ready)

    async def is_ready(self) -> bool:
        return (await self.http.get("/readyz")).status_code == 200

    async def chat(self, **fields: Any) -> httpx.Response:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **fields}
        return await self.http.post("/v1/chat/completions", json=body)

    async def complete(self, **fields: Any) -> httpx.Response:
        body = {"model": "tiny", "prompt": "the quick brown", **fields}
        return await self.http.post("/v1/completions", json=body)

    async def trace(self, request_id: str, **headers: str) -> JsonObject:
        """The request's record, as soon as the router has stored it."""
        path = f"/trace/{request_id}"

        async def stored() -> bool:
            return (await self.http.get(path, headers=headers)).status_code == 200

        await eventually(stored)
        return dict((await self.http.get(path, headers=headers)).json())

    async def trace_of(self, reply: httpx.Response, **headers: str) -> JsonObject:
        return await self.trace(reply.headers["x-request-id"], **headers)


RouterAndStub = tuple[RunningRouter, client_pb2_grpc.InferenceStub]
StartRouter = Callable[..., AbstractAsyncContextManager[RunningRouter]]
StartGrpcRouter = Callable[..., AbstractAsyncContextManager[RouterAndStub]]


FAST_ROUTER = RouterConfig(
    port=0, link_heartbeat_s=0.1, link_silence_s=2.0, link_grace_s=0.5, max_attempts=4
)


@asynccontextmanager
async def running_router(
    model_folder: Path,
    workers: tuple[str, ...] = ("decode-0",),
    config: RouterConfig = FAST_ROUTER,
    wait: bool = True,
    admin: AdminAccess | None = None,
    slo: SloConfig | None = None,
    trust: ssl.SSLContext = NO_AUTHORITIES,
    **switches: Any,
) -> AsyncIterator[RunningRouter]:
    """A router on a port given by the system, and scripted workers named "<role>-<number>", all
    of them with these switches. Its clients trust what `trust` does."""
    registry = MemoryRegistry()
    vocabulary = json.loads((model_folder / "config.json").read_text())["vocab_size"]
    async with AsyncExitStack() as stack:
        made = {}
        for name in workers:
            role: Role = "prefill" if name.startswith("prefill") else "decode"
            made[name] = ScriptedWorker(name, registry, vocabulary, TOKEN, role=role, **switches)
            await made[name].start()
            stack.push_async_callback(made[name].die)
        url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        grpc_addresses: list[str] = []
        admin_ports: list[int] = []
        serving = asyncio.create_task(
            serve_router(
                replace(Config(), router=config, slo=slo or SloConfig()),
                model_folder=model_folder,
                model_name="tiny",
                registry=ThreadedRegistry(registry),
                token=TOKEN,
                ready=url.set_result,
                grpc_ready=grpc_addresses.append,
                admin=admin,
                admin_ready=admin_ports.append,
            )
        )
        stack.push_async_callback(_stop, serving)
        waited: set[asyncio.Future[Any]] = {serving, url}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED, timeout=30)
        if not url.done():
            serving.result()
        http = await stack.enter_async_context(
            httpx.AsyncClient(base_url=url.result(), timeout=60, verify=trust)
        )
        running = RunningRouter(
            url.result(), registry, made, http, vocabulary, serving, "".join(grpc_addresses)
        )
        if admin is not None:
            running.admin = await stack.enter_async_context(
                httpx.AsyncClient(
                    base_url=admin.url(admin_ports[0], config.tls),
                    headers={"authorization": f"Bearer {admin.key}"},
                    timeout=60,
                    verify=trust,
                )
            )
        if wait:
            await running.ready()
        yield running


async def _stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def refused(call: AsyncIterable[object]) -> grpc.aio.AioRpcError:
    """The error that a gRPC call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as found:
        async for _ in call:
            pass
    return found.value
